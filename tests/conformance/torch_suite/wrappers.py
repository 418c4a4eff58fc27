"""Which wrapper the tests get, and the count of how often it was built.

The count is kept in files, so that it is there too when the rank crashed or was ended.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.nn.parallel

from paceline.tools.run.patch_torch import replace_everywhere

NAMES = ("torch", "paceline")


def put_in_place(name: str, *, rank: int, directory: Path) -> None:
    """Give the tests this wrapper, and count from now on how often each wrapper is built."""
    torchs = torch.nn.parallel.DistributedDataParallel
    if name == "paceline":
        replace_everywhere(torchs, _paceline())
    _count(torchs, _counter(directory, "torch", rank))
    if name == "paceline":
        _count(_paceline(), _counter(directory, "paceline", rank))


def times_built(directory: Path, name: str, *, world: int) -> list[int]:
    """How often each rank built this wrapper."""
    files = [_counter(directory, name, rank) for rank in range(world)]
    return [file.stat().st_size if file.exists() else 0 for file in files]


def _paceline() -> type:
    import paceline

    return paceline.DistributedDataParallel


def _counter(directory: Path, name: str, rank: int) -> Path:
    return directory / f"built-{name}-{rank}"


def _count(wrapper: type, counter: Path) -> None:
    """Note each construction of ``wrapper``, and leave out the devices it is given.

    They stand for the CPU here, and a module on the CPU must be wrapped without naming devices.
    """
    init = wrapper.__init__

    @functools.wraps(init)
    def counted(
        self: Any,
        module: torch.nn.Module,
        device_ids: Sequence[object] | None = None,  # noqa: ARG001 - left out, see above
        output_device: object = None,  # noqa: ARG001 - as above
        *args: object,
        **kwargs: object,
    ) -> None:
        with counter.open("a") as file:
            file.write("+")
        init(self, module, None, None, *args, **kwargs)

    wrapper.__init__ = counted
