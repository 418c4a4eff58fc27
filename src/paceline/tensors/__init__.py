"""Helpers for tensors: nested structures, devices, DTensors, parameter groups."""
