"""Optimizers that know that there are other ranks."""
