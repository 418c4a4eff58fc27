"""Which device a name or an index means, and copies to a device."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import DeviceError
from paceline.tensors import devices as dev

CPU = torch.device("cpu")
META = torch.device("meta")


class Card:
    """An accelerator of two devices that records what is asked of it."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.now = 1
        self.stream_now: Any = SimpleNamespace(wait_stream=lambda side: self.events.append(("wait", side)))

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.now

    def current_stream(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self.stream_now

    def Stream(self, device: torch.device) -> str:  # noqa: N802 - torch's name
        return f"side stream of {device}"

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.events.append(("device", index))
        yield
        self.events.append(("device back", index))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.events.append(("stream", stream))
        yield
        self.events.append(("stream back", stream))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card()
    module_of = torch.get_device_module
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind=None: card if kind == "cuda" else module_of(kind)
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", card.device_count)
    dev._copy_stream.cache_clear()
    yield card
    dev._copy_stream.cache_clear()


def traveller(card: Card, device: str) -> Any:
    """A tensor on the device, as far as send looks, that records its moves."""

    def to(target: torch.device, *, non_blocking: bool = False) -> Any:
        card.events.append(("to", str(target), non_blocking))
        return SimpleNamespace(
            device=target, record_stream=lambda stream: card.events.append(("record", stream))
        )

    return SimpleNamespace(device=torch.device(device), to=to)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", CPU, torch.device("cpu", 0)], ids=repr)
def test_the_cpu_by_any_name_is_one_device(device: Any) -> None:
    assert dev.resolve(device) == CPU


def test_meta_is_a_device() -> None:
    assert dev.resolve("meta") == META


UNKNOWN: list[Any] = [
    "",
    "GPU",
    "cpu0",
    "cuda",
    "cuda:0",
    "cuda:9",
    "xpu",
    "xpu:0",
    "mps",
    "mtia",
    "hpu",
    "xla",
    "privateuseone",
    "privateuseone:0",
    torch.device("cuda"),
    torch.device("cuda", 7),
]
NO_DEVICE: list[Any] = [True, False, None, 1.0, [], (), object(), b"cpu"]


@pytest.mark.parametrize("device", UNKNOWN, ids=repr)
def test_a_device_that_is_not_here_is_refused_by_name(device: Any) -> None:
    with pytest.raises(DeviceError, match=r"unknown device \(device: .*, here: cpu\)") as caught:
        dev.resolve(device)
    assert str(device) in str(caught.value)
    assert dev.resolve("cpu") == CPU


@pytest.mark.parametrize("device", NO_DEVICE)
def test_anything_else_than_a_device_is_refused(device: Any) -> None:
    with pytest.raises(DeviceError, match="a device must be an index, a name or") as caught:
        dev.resolve(device)
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize("index", [0, 1, 10**12, -1, -2])
def test_an_index_without_an_accelerator_is_refused(index: int) -> None:
    with pytest.raises(DeviceError, match=rf"no accelerator here .*\(device: {index}\).*'cpu'"):
        dev.resolve(index)


def test_an_index_out_of_bounds_for_torch_is_shown_as_given() -> None:
    with pytest.raises(DeviceError, match="cuda:999"):
        dev.resolve("cuda:999")


def test_a_list_is_resolved_in_order() -> None:
    assert dev.resolve_all(iter(["meta", CPU, "cpu"])) == (META, CPU, CPU)


@pytest.mark.parametrize("devices", [[], (), iter([])], ids=["list", "tuple", "iterator"])
def test_an_empty_list_is_refused(devices: Any) -> None:
    with pytest.raises(DeviceError, match="at least one device is needed"):
        dev.resolve_all(devices)


def test_a_wrong_device_among_others_is_named() -> None:
    with pytest.raises(DeviceError, match="'nowhere'"):
        dev.resolve_all(["cpu", "nowhere"])


def test_without_an_accelerator_the_cpu_is_current() -> None:
    assert dev.all_accelerators() == ()
    assert dev.current_device() == CPU


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_cpu_and_meta_have_no_stream_and_need_no_switch(device: torch.device) -> None:
    assert dev.current_stream(device) is None
    with dev.use_device(device):
        pass


def test_a_tensor_on_the_device_is_returned_as_it_is() -> None:
    x = torch.ones(2)
    assert dev.send(x, CPU) is x


def test_a_tensor_is_copied_to_another_device() -> None:
    assert dev.send(torch.ones(2), META).device == META


@pytest.mark.usefixtures("card")
class TestWithAnAccelerator:
    @pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 0)], ids=repr)
    def test_an_index_means_the_accelerator(self, device: Any) -> None:
        assert dev.resolve(device) == torch.device("cuda", 0)

    @pytest.mark.parametrize("device", ["cuda", torch.device("cuda")], ids=repr)
    def test_a_name_without_an_index_means_the_current_one(self, device: Any) -> None:
        assert dev.resolve(device) == torch.device("cuda", 1)

    @pytest.mark.parametrize("index", [2, 3, -1, -2])
    def test_an_index_out_of_range_is_refused_with_what_is_here(self, index: int) -> None:
        with pytest.raises(DeviceError, match=rf"'cuda:{index}', here: cpu, cuda:0, cuda:1"):
            dev.resolve(index)

    def test_a_bool_is_not_an_index(self) -> None:
        with pytest.raises(DeviceError, match="device: True"):
            dev.resolve(True)

    def test_every_device_is_listed_and_one_is_current(self) -> None:
        assert dev.all_accelerators() == (torch.device("cuda", 0), torch.device("cuda", 1))
        assert dev.current_device() == torch.device("cuda", 1)

    def test_the_device_and_the_stream_are_switched_and_restored(self, card: Card) -> None:
        with dev.use_device(torch.device("cuda", 0), "s"):
            card.events.append("work")
        assert card.events == [
            ("device", 0),
            ("stream", "s"),
            "work",
            ("stream back", "s"),
            ("device back", 0),
        ]

    def test_nothing_is_switched_before_the_context_is_entered(self, card: Card) -> None:
        context = dev.use_device(torch.device("cuda", 0), "s")
        before = list(card.events)
        with context:
            pass
        assert before == []

    def test_a_copy_from_the_cpu_runs_on_a_side_stream_that_the_consumer_waits_for(self, card: Card) -> None:
        copy = dev.send(traveller(card, "cpu"), torch.device("cuda", 0))
        side = "side stream of cuda:0"
        assert copy.device == torch.device("cuda", 0)
        assert card.events == [
            ("device", 0),
            ("stream", side),
            ("to", "cuda:0", True),
            ("stream back", side),
            ("device back", 0),
            ("wait", side),
            ("record", card.stream_now),
        ]

    def test_a_copy_between_devices_needs_no_side_stream(self, card: Card) -> None:
        dev.send(traveller(card, "cuda:1"), torch.device("cuda", 0))
        assert card.events == [("to", "cuda:0", True)]

    def test_a_copy_to_the_cpu_is_complete_when_it_is_given_back(self, card: Card) -> None:
        dev.send(traveller(card, "cuda:0"), CPU)
        assert card.events == [("to", "cpu", False)]
