"""Shared memory between ranks of one host."""
