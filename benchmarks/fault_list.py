"""The faults that benchmarks/faults.py plants, and what each does to the rank that it strikes.

A fault strikes one rank, the culprit, at one place of one step. The training script (fault_script.py) has the
places; a place asks ``PlantedFault.strikes(place)``.
"""

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from fault_judge import Frame, Where
from torch import nn

PAUSE_SECONDS = 12.0
# In a wait: the others come this much later than the culprit, which is struck half-way.
OTHERS_LATE_SECONDS = 1.0
# The functions of the script that do everything are no place that helps.
GENERAL_FUNCTIONS = ("<module>", "main", "train")
OWN_FOLDER = str(Path(__file__).parent)

Act = Callable[["PlantedFault"], object]


class PlantedError(RuntimeError):
    """What planted code raises."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        what: what happens, in words.
        place: where in a step.
        act: what the culprit does there.
        while_waiting: whether it happens half a second later, from a thread, while the culprit waits for the
            others, which come later.
        held: whether it keeps the culprit from ever ending.
        where: what a message should name beside the rank.
        stuck_in: where the culprit is then, if not in ``act``.
        also_named: what may be named instead of a tensor.
        culprit: which rank, or "later" for any but the first; None for any.
        outside: what the program that runs the ranks does: "resume" a stopped rank, "cut" the link, or "stop"
            a host.
        goes_on: whether it passes, so that all ranks must go on afterwards.
        catches: whether every rank catches exceptions of a step, and goes on with the next batch.
        hook: whether there is a communication hook.
        gan: whether there are two wrappers.
        hosts_only: whether it needs two hosts.
    """

    what: str
    place: str
    act: Act
    while_waiting: bool = False
    held: bool = False
    where: Where = Where.LINE
    stuck_in: Callable[..., object] | None = None
    also_named: tuple[str, ...] = ()
    culprit: int | str | None = None
    outside: str | None = None
    goes_on: bool = False
    catches: bool = False
    hook: bool = False
    gan: bool = False
    hosts_only: bool = False


@dataclass
class PlantedFault:
    """The fault of a run, as one rank sees it.

    Attributes:
        fault: the fault; None for a run in which all is well.
        step: the step in which it strikes.
        is_culprit: whether it strikes this rank.
        now: the step of this rank.
        module: the module that is trained.
        optimizer: its optimizer.
    """

    fault: Fault | None
    step: int
    is_culprit: bool
    now: int = 0
    module: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    _struck: bool = False

    def strikes(self, place: str) -> bool:
        """Come to a place: False, or True after what the fault does there, unless that never returns."""
        if self.fault is None or self._struck or (place, self.step) != (self.fault.place, self.now):
            return False
        self._struck = True
        if not self.is_culprit:
            if self.fault.while_waiting:
                time.sleep(OTHERS_LATE_SECONDS)
            return False
        if self.fault.while_waiting:
            threading.Timer(OTHERS_LATE_SECONDS / 2, self._act, [sys._getframe()]).start()
        else:
            self._act(sys._getframe())
        return True

    def _act(self, frame: FrameType) -> None:
        assert self.fault is not None
        if self.fault.while_waiting:
            frame = sys._current_frames()[threading.main_thread().ident or 0]
        codes = [self.fault.act.__code__, *_codes(frame)]
        if self.fault.stuck_in is not None:
            codes.insert(0, self.fault.stuck_in.__code__)
        names = [*self.fault.also_named, *(() if self.module is None else self.module.state_dict())]
        say("fault", frames=[asdict(each) for each in _frames(codes)], tensors=names)
        self.fault.act(self)


def say(event: str, **values: Any) -> None:
    """Tell the program that runs the ranks; what a user sees goes to stderr."""
    line = json.dumps({"event": event, "seconds": time.monotonic(), **values}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())  # at once, whatever comes next


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _frames(codes: list[CodeType]) -> Iterator[Frame]:
    """The functions of the user's files, innermost first."""
    for code in codes:
        path = Path(code.co_filename)
        if str(path.parent) == OWN_FOLDER and code.co_name not in (*GENERAL_FUNCTIONS, "strikes", "_act"):
            last = max(line for _, _, line in code.co_lines() if line is not None)
            yield Frame(path.name, code.co_name, code.co_firstlineno, last)


def kill_self(_: PlantedFault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self(_: PlantedFault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt_self(_: PlantedFault) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def read_address_zero(_: PlantedFault) -> None:
    ctypes.string_at(0)


def exit_at_once(_: PlantedFault) -> NoReturn:
    os._exit(0)


def exit_in_loop(_: PlantedFault) -> NoReturn:
    sys.exit(3)


def raise_planted(_: PlantedFault) -> NoReturn:
    raise PlantedError("planted")


def loop_for_ever(_: PlantedFault) -> None:
    number = 0
    while True:
        number += 1


def match_for_ever(_: PlantedFault) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # tries 2**60 ways, and holds Python's lock meanwhile


def wait_for_lock(_: PlantedFault) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def read_slow_disk(_: PlantedFault) -> None:
    time.sleep(PAUSE_SECONDS)


class SlowFile:
    """A file on a slow disk: the first write takes long."""

    def __init__(self) -> None:
        self._seconds = PAUSE_SECONDS

    def write(self, data: bytes) -> int:
        time.sleep(self._seconds)
        self._seconds = 0.0
        return len(data)

    def flush(self) -> None:
        pass


def save_checkpoint(planted: PlantedFault) -> None:
    assert planted.module is not None
    file: Any = SlowFile()  # torch.save needs no more of a file
    torch.save(planted.module.state_dict(), file)


def slow_backend(graph: Any, _: Any) -> Any:
    time.sleep(PAUSE_SECONDS)
    return graph.forward


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def compile_slowly(_: PlantedFault) -> None:
    torch.compile(doubled, backend=slow_backend)(torch.ones(1))


def return_only(_: PlantedFault) -> None:
    """The place itself does the rest."""


def reduce_something_else(_: PlantedFault) -> None:
    dist.all_reduce(torch.ones(1))


def wait_at_barrier(_: PlantedFault) -> None:
    dist.barrier()


def flip_bit(planted: PlantedFault) -> None:
    assert planted.module is not None
    next(planted.module.parameters()).detach().view(torch.int32).view(-1)[0] ^= 1 << 20


def change_learning_rate(planted: PlantedFault) -> None:
    assert planted.optimizer is not None
    for group in planted.optimizer.param_groups:
        group["lr"] *= 2


def load_checkpoint(planted: PlantedFault) -> None:
    assert planted.module is not None
    older = {name: 0.9 * value for name, value in planted.module.state_dict().items()}
    planted.module.load_state_dict(older)


FAULTS: dict[str, Fault] = {
    "kill-forward": Fault("killed in forward", "forward", kill_self),
    "kill-backward": Fault("killed in backward", "backward", kill_self),
    "kill-reduction": Fault("killed in a reduction", "before backward", kill_self, while_waiting=True),
    "kill-buffers": Fault(
        "killed in the buffers' broadcast", "before forward", kill_self, while_waiting=True, culprit="later"
    ),
    "kill-optimizer": Fault("killed in the optimizer", "optimizer", kill_self),
    "kill-loader": Fault("killed in the data loader", "loader", kill_self),
    "segfault": Fault("segmentation fault in forward", "forward", read_address_zero),
    "exit-0": Fault("`os._exit(0)` in the loop", "loop", exit_at_once),
    "sys-exit": Fault("`sys.exit(3)` in the loop", "loop", exit_in_loop),
    "stop-12s": Fault("stopped for 12 s (SIGSTOP)", "loop", stop_self, outside="resume", goes_on=True),
    "stop": Fault("stopped for ever (SIGSTOP)", "loop", stop_self, held=True),
    "raise-forward": Fault("exception in forward", "forward", raise_planted),
    "raise-backward": Fault("exception in backward", "backward", raise_planted),
    "raise-loss": Fault("exception in the loss", "loss", raise_planted),
    "raise-loss-caught": Fault(
        "exception in the loss, caught, next batch", "loss", raise_planted, catches=True, goes_on=True
    ),
    "raise-output-hook": Fault("exception in a hook on the output", "output hook", raise_planted),
    "raise-comm-hook": Fault("exception in a communication hook", "comm hook", raise_planted, hook=True),
    "raise-gan": Fault("two wrappers: exception in the second's forward", "forward", raise_planted, gan=True),
    "interrupt": Fault("Ctrl-C in a reduction", "before backward", interrupt_self, while_waiting=True),
    "endless-python": Fault("endless loop in Python", "loop", loop_for_ever, held=True),
    "endless-c": Fault("endless loop in C that holds Python's lock", "loss", match_for_ever, held=True),
    "lock": Fault("a lock that is never released", "loop", wait_for_lock, held=True),
    "slow-disk": Fault("slow disk: 12 s in the data loader", "loader", read_slow_disk, goes_on=True),
    "slow-checkpoint": Fault(
        "checkpoint of 12 s on rank 0",
        "loop",
        save_checkpoint,
        stuck_in=SlowFile.write,
        culprit=0,
        goes_on=True,
    ),
    "slow-compile": Fault("compilation of 12 s", "loop", compile_slowly, stuck_in=slow_backend, goes_on=True),
    "out-of-data-waits": Fault(
        "out of data a step early, waits at a barrier", "end of data", wait_at_barrier
    ),
    "out-of-data-exits": Fault(
        "out of data a step early, exits", "end of data", return_only, where=Where.NOTHING
    ),
    "skip-batch": Fault("skips a batch by `continue`", "skip", return_only, where=Where.NOTHING),
    "other-reduce": Fault("calls `all_reduce` instead of backward", "instead", reduce_something_else),
    "other-barrier": Fault("calls `barrier` instead of backward", "instead", wait_at_barrier),
    "nan": Fault("NaN gradients", "nan", return_only, where=Where.TENSOR),
    "flipped-bit": Fault("flipped bit in a parameter", "loop", flip_bit, where=Where.TENSOR),
    "other-rate": Fault(
        "another learning rate", "loop", change_learning_rate, where=Where.TENSOR, also_named=("lr",)
    ),
    "other-checkpoint": Fault("loads a checkpoint alone", "loop", load_checkpoint, where=Where.TENSOR),
    "cut-link": Fault(
        "network between hosts cut", "loop", return_only, outside="cut", where=Where.NOTHING, hosts_only=True
    ),
    "stop-host": Fault(
        "all ranks of a host stopped for ever",
        "loop",
        return_only,
        outside="stop",
        held=True,
        hosts_only=True,
    ),
}
