"""Gradients in flat memory: which slot goes into which bucket, and the memory behind a bucket."""
