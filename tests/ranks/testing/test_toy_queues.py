"""The toy device's queues: the host goes on while the device works; each body in a process of its own."""

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.testing import run_ranks, toy

BODIES: list[Callable[[], None]] = []
LATENCY = 0.02


def on_toy(body: Callable[[], None]) -> Callable[[], None]:
    BODIES.append(body)
    return body


def register_and_run(_rank: int, number: int) -> None:
    toy.register()
    torch.manual_seed(0)
    BODIES[number]()


class Training:
    """A net with its optimizer, on some device."""

    def __init__(self, net: nn.Module, device: str) -> None:
        self.net = copy.deepcopy(net).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


@on_toy
def a_step_returns_before_the_device_has_begun_and_gives_the_cpus_bits() -> None:
    net, x = mlp(), torch.randn(6, 5)
    here, there = Training(net, "cpu"), Training(net, "toy:0")
    on_device = x.to("toy:0")
    before = copy.deepcopy(net.state_dict())
    with toy.set_latency(LATENCY), toy.counting() as counts, toy.hold():
        losses = [there.step(on_device) for _ in range(2)]
        queued = toy.unfinished()
        # The device has not touched its memory yet.
        for name, value in there.net.state_dict().items():
            assert torch.equal(value.memory, before[name])
    assert queued > 50
    assert (counts.reads, counts.waits, counts.host_copies) == (0, 0, 0)
    assert counts.allocations > 0
    assert [loss.item() for loss in losses] == [here.step(x).item() for _ in range(2)]
    for name, value in here.net.state_dict().items():
        assert torch.equal(there.net.state_dict()[name].cpu(), value), name
    assert toy.unfinished() == 0


@on_toy
def each_way_to_read_counts_and_names_its_line() -> None:
    x = torch.ones(3, device="toy:0")
    ways: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(),
        "bool": lambda: bool(x.sum()),
        "tolist": lambda: x.tolist(),
        "cpu": lambda: x.cpu(),
        "copy": lambda: torch.empty(3).copy_(x),
        "copy that does not block": lambda: torch.empty(3).copy_(x, non_blocking=True),
        "print": lambda: str(x),
        "equal": lambda: torch.equal(x, x),
        "nonzero": lambda: x.nonzero(),
        "masked_select": lambda: x.masked_select(x > 0),
        "mask": lambda: x[x > 0],
        "unique": lambda: x.unique(),
    }
    for name, read in ways.items():
        with toy.counting() as counts:
            read()
        assert counts.reads == 1, name
        [line] = counts.lines["reads"]
        assert f"{__file__}:{read.__code__.co_firstlineno} in <lambda>" in line
        assert line in repr(counts)


@on_toy
def a_mask_that_is_written_to_is_a_read_too() -> None:
    x = torch.arange(4.0, device="toy:0")
    with toy.counting() as counts:
        x[x > 1] = 0
    assert counts.reads == 1
    assert x.tolist() == [0, 1, 0, 0]


@on_toy
def waits_are_counted_and_wait() -> None:
    module = toy.register()
    x = torch.zeros(3, device="toy:0")
    event = module.Event()
    waits = [
        module.synchronize,
        torch.accelerator.synchronize,
        module.current_stream(0).synchronize,
        event.synchronize,
    ]
    for number, wait in enumerate(waits, 1):
        with toy.hold():
            x.add_(1)
            event.record()
            assert not event.query()
        with toy.counting() as counts:
            wait()
        assert (counts.waits, counts.reads) == (1, 0)
        assert event.query()
        assert x.memory.tolist() == [number] * 3


@on_toy
def copies_from_the_host_are_counted_and_take_the_values_of_the_call() -> None:
    source = torch.ones(3)
    target = torch.zeros(3, device="toy:0")
    with toy.counting() as counts, toy.hold():
        moved = source.to("toy:0", non_blocking=True)
        target.copy_(source, non_blocking=True)
        scaled = target * source.sum()  # a CPU scalar, which is an argument of the kernel
        source.zero_()
    assert (counts.host_copies, counts.blocking_copies, counts.reads) == (2, 0, 0)
    assert moved.tolist() == target.tolist() == [1, 1, 1]
    assert scaled.tolist() == [3, 3, 3]
    with toy.counting() as counts:
        source.to("toy:0")
        torch.tensor([1.0], device="toy:0")
    assert (counts.host_copies, counts.blocking_copies) == (2, 2)


@on_toy
def only_new_storages_count_as_allocations() -> None:
    x = torch.ones(4, device="toy:0")
    with toy.counting() as counts:
        x.view(2, 2).t()[0].add_(1)
        x.mul_(2)
        x.copy_(x.flip(0))
    assert counts.allocations == 1
    assert len(counts.lines["allocations"]) == 1
    with toy.counting() as counts:
        for _ in range(20):
            torch.empty(2, device="toy:0")
    assert counts.allocations == 20
    assert len(counts.lines["allocations"]) < 20


@on_toy
def a_wait_for_a_device_that_is_held_raises_and_names_its_line() -> None:
    x = torch.ones(3, device="toy:0")
    toy.register().synchronize()
    with toy.hold():
        assert x.tolist() == [1, 1, 1]  # nothing to wait for
        x.add_(1)
        for wait in (x.tolist, toy.register().synchronize, lambda: torch.ones(2).to("toy:0")):
            with pytest.raises(
                RuntimeError, match=r"stream 1 of toy:0, which is held \(.*test_toy_queues.py:\d"
            ):
                wait()
    assert x.tolist() == [2, 2, 2]


@on_toy
def a_stream_waits_for_an_event_of_another_and_the_host_does_not() -> None:
    module = toy.register()
    one, other = module.Stream(0), module.Stream(0)
    with module.stream(one):
        x = torch.zeros(3, device="toy:0")
    with toy.counting() as counts, toy.hold():
        with module.stream(one), toy.set_latency(LATENCY):
            for _ in range(3):
                x.add_(1)
            event = one.record_event()
        x.record_stream(other)
        other.wait_event(event)
        with module.stream(other):
            x.mul_(10)
            after = other.record_event()
            assert not other.query()
        one.wait_stream(other)
        with module.stream(one):
            x.add_(1)
    assert (counts.reads, counts.waits) == (0, 0)
    with module.stream(one):
        assert x.tolist() == [31, 31, 31]
    assert after.query()


@on_toy
def streams_do_not_wait_for_each_other_by_themselves() -> None:
    module = toy.register()
    slow = module.Stream(0)
    x = torch.zeros(3, device="toy:0")
    released = threading.Event()
    slow.queue.put("a kernel that the test ends", released.wait)
    with module.stream(slow):
        x.add_(1)
    assert x.tolist() == [0, 0, 0]  # on the default stream
    released.set()
    slow.synchronize()
    assert x.tolist() == [1, 1, 1]


@on_toy
def a_copy_between_devices_is_in_the_order_of_both() -> None:
    with toy.set_latency(LATENCY):
        x = torch.zeros(3, device="toy:0")
        x.add_(1)
        y = x.to("toy:1")
        x.add_(1)
        z = y * 10
    assert z.tolist() == [10, 10, 10]
    assert x.tolist() == [2, 2, 2]


@on_toy
def an_error_in_the_queue_is_raised_at_the_next_read_and_only_there() -> None:
    x = torch.ones(3, device="toy:0")
    index = torch.tensor([7], device="toy:0")
    taken = x.index_select(0, index)
    later = x + 1
    with pytest.raises(RuntimeError, match=r"index_select.*test_toy_queues.py:\d+ in an_error.*out of range"):
        taken.cpu()
    assert later.tolist() == [2, 2, 2]
    x.index_select(0, index)
    with pytest.raises(RuntimeError, match="out of range"):
        toy.register().synchronize()
    toy.register().synchronize()


@on_toy
def wrong_arguments_are_refused_at_once() -> None:
    x = torch.ones(3, device="toy:0")
    with toy.hold():
        for wrong in (
            lambda: x + torch.ones(2, device="toy:0"),
            lambda: x.add_(torch.ones(2, device="toy:0")),
        ):
            with pytest.raises(RuntimeError, match=r"(?i)size"):
                wrong()


@on_toy
def random_numbers_are_those_of_the_cpu_in_the_order_of_the_calls() -> None:
    draws: list[Callable[[str], torch.Tensor]] = [
        lambda device: torch.randn(3, device=device),
        lambda device: torch.rand_like(torch.empty(3, device=device)),
        lambda device: torch.empty(3, device=device).bernoulli_(0.5),
        lambda device: torch.randperm(3, device=device),
    ]
    torch.manual_seed(1)
    with toy.hold():
        drawn = [(draw("toy:0"), torch.rand(2)) for draw in draws]
    torch.manual_seed(1)
    for (there, between), draw in zip(drawn, draws, strict=True):
        assert torch.equal(there.cpu(), draw("cpu"))
        assert torch.equal(between, torch.rand(2))


@on_toy
def storages_have_addresses_and_are_shared_by_views() -> None:
    x, y = torch.ones(4, device="toy:0"), torch.ones(4, device="toy:0")
    view = x[2:]
    assert view.data_ptr() == x.data_ptr() + 2 * x.itemsize
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() == x.memory.data_ptr()
    assert x.data_ptr() != y.data_ptr()
    assert x.untyped_storage().nbytes() == 16


@on_toy
def data_can_be_replaced_and_a_copy_is_its_own() -> None:
    x = nn.Parameter(torch.ones(3, device="toy:0"))
    other = copy.deepcopy(x)
    x.data = torch.zeros(2, device="toy:0")
    assert x.tolist() == [0, 0]
    assert isinstance(other, nn.Parameter)
    assert other.tolist() == [1, 1, 1]


@on_toy
def what_inference_mode_makes_is_queued_too() -> None:
    net, x = mlp().eval(), torch.randn(2, 5)
    expected = net(x).detach()
    net.to("toy:0")
    with torch.inference_mode(), toy.hold():
        output = net(x.to("toy:0", non_blocking=True))
        output += 1
    assert torch.equal(output.cpu(), expected + 1)
    assert torch.equal(net(x.to("toy:0")).cpu(), expected)


@on_toy
def a_forked_child_has_queues_of_its_own() -> None:
    x = torch.ones(3, device="toy:0")
    toy.register().synchronize()
    with toy.hold():
        x.add_(1)  # is queued in the parent alone
        child = os.fork()
        if child == 0:
            is_right = (x * 3).tolist() == [3, 3, 3] and toy.unfinished() == 0
            os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert x.tolist() == [2, 2, 2]


@on_toy
def threads_end_when_there_is_nothing_to_do() -> None:
    before = threading.active_count()
    torch.ones(3, device="toy:0").tolist()
    [thread] = [each for each in threading.enumerate() if each.name == "stream 1 of toy:0"]
    thread.join(30)
    assert threading.active_count() == before
    assert torch.ones(3, device="toy:0").tolist() == [1, 1, 1]


@pytest.mark.parametrize("number", range(len(BODIES)), ids=[body.__name__ for body in BODIES])
def test_on_the_toy_device(number: int) -> None:
    run_ranks(register_and_run, world=1, args=(number,), backend=None)


EXITS_EARLY = """
import torch
from paceline.testing import toy
toy.register()
x = torch.ones(3, device="toy:0")
with toy.set_latency(1.0):
    for _ in range(1000):
        x.add_(1)
print("ends")
"""


def test_a_process_ends_while_kernels_are_queued() -> None:
    done = subprocess.run([sys.executable, "-c", EXITS_EARLY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
