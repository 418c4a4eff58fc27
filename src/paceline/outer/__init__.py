"""Outer steps between hosts that are far apart; inside a host every step is exact."""
