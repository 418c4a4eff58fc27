"""Optimizers that split their work over the ranks."""
