"""Uneven inputs: a rank that has none left shadows the others' collectives."""
