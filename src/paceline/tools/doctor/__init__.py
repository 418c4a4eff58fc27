"""Diagnoses a host and the ranks on it: thin code gathers facts, pure functions judge them."""
