"""Tells why ranks wait: what each rank does, written where others can read it without the rank's help."""
