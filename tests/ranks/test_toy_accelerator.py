"""The accelerator paths, run on the toy device; each body in a process of its own."""

import copy
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.parallel
from torch import distributed, nn

import paceline
from paceline.nn import parallel
from paceline.testing import run_ranks, toy

BODIES: list[Callable[[], None]] = []


def on_toy(body: Callable[[], None]) -> Callable[[], None]:
    BODIES.append(body)
    return body


def register_and_run(_rank: int, number: int) -> None:
    warnings.simplefilter("error")
    toy.register()
    torch.manual_seed(0)
    BODIES[number]()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 5, dtype=torch.float64)


def assert_same_gradients(module: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-12, atol=1e-12)


@on_toy
def it_is_an_accelerator_with_two_indexes() -> None:
    assert torch.accelerator.current_accelerator().type == "toy"
    assert torch.accelerator.device_count() == 2
    assert torch.ones(2, device="toy:1").device == torch.device("toy", 1)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="toy:0") + torch.ones(2, device="toy:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="toy:0") + torch.ones(2)


class Mixed(nn.Module):
    """Many small tensors, a large one, one of another type, and one of other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)))
        self.large = nn.Parameter(torch.randn(1 << 18, 2))
        self.bias64 = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x) * self.scale + self.shift + self.bias64.float()
        return out.sum() + self.large[:10].sum() + self.conv(x.new_ones(1, 2, 3, 3)).sum()


@on_toy
def small_tensors_of_replicas_travel_together() -> None:
    module, x = Mixed(), torch.randn(4, 5)
    with toy.counting() as there:
        replicas = parallel.replicate(module, ["toy:0", "toy:1"])
    # For each device: small parameters, a large one, a double, a strided one, the buffers.
    assert there.host_copies == 2 * 5, there
    assert [name for name, _ in replicas[0].named_parameters()] == [n for n, _ in module.named_parameters()]
    for replica in replicas:
        for ours, theirs in zip(replica.parameters(), module.parameters(), strict=True):
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours.cpu(), theirs)
        replica.shift.add_(1)  # does not count as a change of the others
    with toy.counting() as back:
        sum(replica(x.to(replica.shift.device)).cpu() for replica in replicas).backward()
    assert back.reads == 2 + 2 * 4, back  # the outputs; small gradients, a large one, a double, a strided one
    reference = copy.deepcopy(module)
    reference.zero_grad()
    for _ in replicas:
        reference(x).backward()
    assert_same_gradients(module, reference)


@on_toy
def gradients_of_gradients_go_through_copies_of_small_tensors() -> None:
    module, x = net().to("toy:0"), batch().to("toy:1")
    [replica] = parallel.replicate(module, ["toy:1"])
    output = replica(x).square().sum()
    grads = torch.autograd.grad(output, [*module.parameters()], create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    reference, plain = net(), batch()
    reference.load_state_dict({name: value.cpu() for name, value in module.state_dict().items()})
    plain.copy_(x.cpu())
    grads = torch.autograd.grad(reference(plain).square().sum(), [*reference.parameters()], create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    assert_same_gradients(module, reference)


@on_toy
def each_thread_has_its_own_current_index() -> None:
    module = toy.register()
    module.set_device(1)
    seen = []
    thread = threading.Thread(
        target=lambda: seen.append((module.current_device(), torch.accelerator.current_device_index()))
    )
    thread.start()
    thread.join()
    assert seen == [(0, 0)]
    assert torch.accelerator.current_device_index() == 1


@on_toy
def gradients_cross_devices() -> None:
    x = torch.ones(3, requires_grad=True)
    (x.to("toy:0").to("toy:1") * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@on_toy
def scatter_takes_integers_for_indexes() -> None:
    x = batch()
    for home in ("cpu", "toy:0", "toy:1"):
        pieces = paceline.scatter(x.to(home), [0, 1])
        assert [piece.device for piece in pieces] == [torch.device("toy", 0), torch.device("toy", 1)]
        assert torch.equal(torch.cat([piece.cpu() for piece in pieces]), x)


@on_toy
def a_piece_that_is_in_place_shares_memory() -> None:
    x = batch().to("toy:0")
    first, _ = paceline.scatter(x, [0, 1])
    assert first.memory.data_ptr() == x.memory.data_ptr()


@on_toy
def scatter_brings_gradients_back_to_the_input() -> None:
    for home in ("cpu", "toy:1"):
        x = batch().to(home).requires_grad_()
        first, second = paceline.scatter(x, [0, 1])
        (first.sum() * 2 + second.sum().to("toy:0") * 3).backward()
        assert x.grad.device == x.device
        assert x.grad.cpu()[:3].eq(2).all()
        assert x.grad.cpu()[3:].eq(3).all()


@on_toy
def copies_from_the_cpu_run_on_a_side_stream_and_are_waited_for() -> None:
    module = toy.register()
    paceline.scatter(batch(), [0, 1])
    for index in (0, 1):
        events = [event for event in module.operations if event.stream.device_index == index]
        copied, waited, recorded = events
        consumer = module.current_stream(index)
        assert [event.what for event in events] == ["copy", "wait", "record"]
        assert copied.stream != consumer
        assert (waited.stream, waited.other) == (consumer, copied.stream)
        assert recorded.stream == consumer


@on_toy
def gather_takes_integers_and_minus_one_for_the_cpu() -> None:
    x = batch()
    pieces = paceline.scatter(x, [0, 1])
    assert paceline.gather(pieces, 1).device == torch.device("toy", 1)
    for name in ("cpu", -1):
        gathered = paceline.gather(pieces, name)
        assert gathered.device.type == "cpu"
        assert torch.equal(gathered, x)


@on_toy
def gather_sends_gradients_to_each_piece() -> None:
    pieces = [batch(2).to(f"toy:{index}").requires_grad_() for index in (0, 1)]
    weights = torch.randn(4, 5, dtype=torch.float64).to("toy:1")
    (paceline.gather(pieces, 1) * weights).sum().backward()
    assert torch.equal(pieces[0].grad.cpu(), weights.cpu()[:2])
    assert torch.equal(pieces[1].grad.cpu(), weights.cpu()[2:])
    assert pieces[0].grad.device == torch.device("toy", 0)


@on_toy
def replicas_are_on_their_devices_and_gradients_sum_in_the_module() -> None:
    module = net()
    reference = copy.deepcopy(module)
    module.to("toy:0")
    x = batch()
    for devices in ([0, 1], ["toy:0", "toy:1"]):
        module.zero_grad()
        reference.zero_grad()
        replicas = paceline.replicate(module, devices)
        for index, replica in enumerate(replicas):
            assert {p.device for p in replica.parameters()} == {torch.device("toy", index)}
            replica(x.to(f"toy:{index}")).sum().backward()
        (reference(x).sum() * 2).backward()
        assert_same_gradients(module, reference)


@on_toy
def the_first_replica_shares_buffers_and_the_others_have_copies_on_their_device() -> None:
    norm = nn.BatchNorm1d(5).double().to("toy:0")
    first, second = paceline.replicate(norm, [0, 1])
    assert first.running_mean is norm.running_mean
    assert second.running_mean.device == torch.device("toy", 1)
    first(batch().to("toy:0"))
    assert norm.running_mean.cpu().abs().sum() > 0
    assert second.running_mean.cpu().abs().sum() == 0


@on_toy
def data_parallel_uses_all_indexes_by_default_and_gives_the_modules_own_results() -> None:
    module = net()
    reference = copy.deepcopy(module)
    wrapper = paceline.DataParallel(module.to("toy:0"))
    assert (wrapper.device_ids, wrapper.output_device) == ([0, 1], 0)
    x = batch(7)
    output = wrapper(x)
    assert output.device == torch.device("toy", 0)
    output.square().sum().backward()
    expected = reference(x)
    expected.square().sum().backward()
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-12, atol=1e-12)
    assert_same_gradients(module, reference)


@on_toy
def a_step_of_data_parallel_neither_reads_nor_waits() -> None:
    module, x = net(), batch()
    reference = copy.deepcopy(module)
    wrapper = paceline.DataParallel(module.to("toy:0"))
    with toy.set_latency(0.001), toy.counting() as counts, toy.hold():
        wrapper(x).square().sum().backward()
    assert (counts.reads, counts.waits, counts.host_copies, counts.blocking_copies) == (0, 0, 2, 0), counts
    reference(x).square().sum().backward()
    assert_same_gradients(module, reference)


@on_toy
def data_parallel_runs_again_with_the_modules_current_values() -> None:
    module = net().to("toy:0")
    wrapper = paceline.DataParallel(module, [0, 1])
    x = batch()
    with torch.no_grad():
        before = wrapper(x).cpu()
        module[2].weight.mul_(2)
        module[2].bias.zero_()
        after = wrapper(x).cpu()
    torch.testing.assert_close(after, module.to("cpu")(x))
    assert not torch.allclose(before, after)


@on_toy
def the_same_index_twice_and_a_mix_with_the_cpu() -> None:
    for devices in ([0, 0], [0, 1, 0], ["toy:0", "cpu"], ["cpu", "toy:1"]):
        module = net()
        reference = copy.deepcopy(module)
        wrapper = paceline.DataParallel(module.to(torch.device(devices[0])), devices)
        x = batch()
        wrapper(x).square().sum().backward()
        reference(x).square().sum().backward()
        assert_same_gradients(module, reference)


@on_toy
def output_device_may_be_another_index_or_the_cpu() -> None:
    module = net().to("toy:0")
    for given, expected in ((1, "toy:1"), ("toy:1", "toy:1"), ("cpu", "cpu"), (-1, "cpu")):
        output = paceline.DataParallel(module, [0, 1], output_device=given)(batch())
        assert str(output.device) == expected


@on_toy
def each_replica_runs_with_its_device_and_the_callers_stream_current() -> None:
    device = toy.register()
    seen = {}

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            index = x.device.index
            current = (device.current_device(), torch.accelerator.current_device_index())
            seen[index] = (*current, device.current_stream())
            return x

    streams = [device.Stream(index) for index in (0, 1)]
    with device.stream(streams[0]), device.stream(streams[1]):
        paceline.DataParallel(Watch(), [0, 1])(batch())
    assert seen == {0: (0, 0, streams[0]), 1: (1, 1, streams[1])}
    assert device.current_device() == 0
    assert device.current_stream(0) != streams[0]


@on_toy
def autocast_of_the_device_is_carried_in() -> None:
    seen = []

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.is_autocast_enabled("toy"), torch.get_autocast_dtype("toy")))
            return x

    with torch.autocast("toy", dtype=torch.float16):
        paceline.DataParallel(Watch(), [0, 1])(batch())
    assert seen == [(True, torch.float16)] * 2


@on_toy
def gradient_penalty() -> None:
    module = nn.Linear(4, 1).to("toy:0")
    x = torch.ones(2, 4).to("toy:0").requires_grad_()
    output = paceline.DataParallel(module, [0, 1])(x)
    (gradient,) = torch.autograd.grad(output, x, torch.ones(2, 1).to("toy:0"), create_graph=True)
    gradient.mean().backward()
    assert module.weight.grad.cpu().tolist() == [[0.25] * 4]
    assert module.bias.grad.cpu().tolist() == [0]


@on_toy
def a_module_on_another_index_is_refused_by_name_until_it_is_moved() -> None:
    module = net().to("toy:1")
    wrapper = paceline.DataParallel(module, [0, 1])
    match = r"parameters and buffers on device toy:0 .* on device: toy:1 \(name: '0.weight'\)"
    for call in (lambda: wrapper(batch()), lambda: paceline.data_parallel(module, batch(), [0, 1])):
        with pytest.raises(RuntimeError, match=match):
            call()
    module.to("toy:0")
    assert wrapper(batch()).shape == (6, 3)
    assert paceline.data_parallel(module, batch(), [0, 1]).shape == (6, 3)


@on_toy
def one_device_moves_the_module_there() -> None:
    wrapper = paceline.DataParallel(net(), [1])
    assert wrapper(batch()).device == torch.device("toy", 1)


@on_toy
def unknown_indexes_are_refused() -> None:
    for devices in ([0, 2], [-1], ["toy:7"], ["cuda:0"]):
        with pytest.raises(paceline.DeviceError, match=r"unknown device .*here: cpu, toy:0, toy:1"):
            paceline.scatter(batch(), devices)
    assert len(paceline.scatter(batch(), [0, 1])) == 2


@on_toy
def parallel_apply_finds_the_devices_of_its_inputs_as_torch_does() -> None:
    modules = [nn.Linear(5, 3).double().to(f"toy:{index}") for index in (0, 1)]
    inputs = [batch().to(f"toy:{index}") for index in (0, 1)]
    for implementation in (torch.nn.parallel, parallel):
        for given in (inputs, [(x,) for x in inputs]):
            outputs = implementation.parallel_apply(modules, given)
            for module, x, output in zip(modules, inputs, outputs, strict=True):
                assert torch.equal(output.cpu(), module(x).cpu())


@on_toy
def an_error_names_replica_and_index_as_torch_does() -> None:
    class Bad(nn.Module):
        def forward(self, _x: object) -> None:
            raise KeyError("wonderful")

    for implementation in (torch.nn.parallel, parallel):
        with pytest.raises(
            KeyError, match=r"Caught KeyError in replica 0 on device 0\.\nOriginal Trace[\s\S]+wonderful"
        ):
            implementation.parallel_apply([Bad(), Bad()], [None, None])


@on_toy
def an_input_on_another_device_than_the_module_names_the_replica() -> None:
    modules = [nn.Linear(5, 3).double().to("toy:0") for _ in range(2)]
    inputs = [batch().to("toy:0"), batch().to("toy:1")]
    with pytest.raises(RuntimeError, match=r"in replica 1 on device 0[\s\S]+same device"):
        paceline.parallel_apply(modules, inputs, devices=[0, 0])
    assert len(paceline.parallel_apply(modules, [inputs[0]] * 2)) == 2


class SeesDevices(nn.Linear):
    def forward(self, nest: dict[str, list[torch.Tensor]], *, scale: torch.Tensor, note: str) -> torch.Tensor:
        self.seen = [nest["x"][0].device, scale.device, note]
        return super().forward(nest["x"][0]) * scale


@on_toy
def arguments_of_a_distributed_wrapper_go_to_its_device_as_torchs_do() -> None:
    device = toy.register()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    x, scale = torch.ones(4, 3), torch.ones(())
    for implementation in (torch.nn.parallel, parallel):
        module = SeesDevices(3, 2).to("toy:1")
        ddp = implementation.DistributedDataParallel(module, device_ids=[1], init_sync=False)
        with torch.no_grad():
            before = len(device.operations)
            output = ddp({"x": [x]}, scale=scale, note="kept")
        assert module.seen == [torch.device("toy", 1), torch.device("toy", 1), "kept"]
        assert output.device == torch.device("toy", 1)
        copies = [event.stream for event in device.operations[before:] if event.what == "copy"]
        assert len(copies) == 2
        # torch has side streams for its own devices only.
        assert implementation is torch.nn.parallel or device.current_stream(1) not in copies
        ((moved,),), (keywords,) = ddp.to_kwargs((x,), {"k": [scale]}, 0)
        assert moved.device == keywords["k"][0].device == torch.device("toy", 0)
        del ddp
    distributed.destroy_process_group()


@pytest.mark.parametrize("number", range(len(BODIES)), ids=[body.__name__ for body in BODIES])
def test_on_the_toy_device(number: int) -> None:
    run_ranks(register_and_run, world=1, args=(number,), backend=None)
