"""Backward passes that need a way of their own: distributed autograd and compiled graphs."""
