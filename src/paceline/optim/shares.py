"""Which rank keeps the optimizer state of which parameter. Pure: no tensors here."""

from collections.abc import Sequence


def share_out(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The owner of each of several sizes, so that ranks end with about the same load.

    The largest goes first, each to the rank that has least by then; among equals the first. So the answer is
    the same wherever it is worked out.

    Args:
        sizes: what is to be shared out, in bytes.
        loads: what each rank has already.
    """
    carried = [*loads]
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owner = min(range(len(carried)), key=lambda rank: (carried[rank], rank))
        owners[place] = owner
        carried[owner] += sizes[place]
    return owners
