"""Compares replicas across ranks: a rotating part of parameters and optimizer state in each step."""
