"""``paceline audit``: finds where two checkpoints, two runs, or the ranks of one run begin to differ."""
