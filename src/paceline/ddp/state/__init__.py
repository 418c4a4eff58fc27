"""Parameters and module buffers, kept equal over the ranks."""
