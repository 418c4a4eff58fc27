"""Split a dataset's samples over the ranks, and gather results in the dataset's order."""
