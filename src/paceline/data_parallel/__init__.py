"""One process, many devices: scatter, replicate, apply in parallel, gather."""
