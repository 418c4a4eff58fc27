"""The wrapped module: its parameters, its buffers, its devices and its precision."""
