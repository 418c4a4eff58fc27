"""Every case, by name, in the order of the table."""

from torture import accumulation, checkpoints, faults, graphs, kinds, unused

ALL = [*unused.CASES, *checkpoints.CASES, *graphs.CASES, *accumulation.CASES, *kinds.CASES, *faults.CASES]
CASES = {case.name: case for case in ALL}
