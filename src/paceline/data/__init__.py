"""Samples shared out over the ranks, and what was made of them put back in order."""
