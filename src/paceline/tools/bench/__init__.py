"""Torch against paceline on this machine: measured in one run, shown, drawn and written down."""
