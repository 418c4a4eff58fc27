"""Tensors as such: nested structures, devices."""
