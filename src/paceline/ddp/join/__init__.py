"""Uneven inputs: training goes on while some ranks have run out of them."""
