"""What belongs to a replica, and what of it is looked at."""

import gc

import pytest
import torch
from torch import nn

from paceline.ddp.audit.buffer_watch import BufferWatch
from paceline.ddp.audit.catalogue import Catalogue, not_on_all
from paceline.ddp.audit.replica_part import MissingTensorError, ReplicaPart
from paceline.ddp.audit.rotation import Piece


class Trained:
    """A net that an optimizer has stepped once."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.catalogue = Catalogue(self.net.named_parameters())
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        self.net(torch.randn(4, 2)).sum().backward()
        self.optimizer.step()

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.catalogue.tensors]


@pytest.fixture
def trained() -> Trained:
    made = Trained()
    made.catalogue.build()
    return made


def test_parameters_state_and_options_are_listed_by_name(trained: Trained) -> None:
    assert trained.names[:4] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {"0.weight.exp_avg", "0.weight.exp_avg_sq", "0.weight.step", "1.bias.exp_avg"} <= {*trained.names}
    options = {option.name: option.get() for option in trained.catalogue.options}
    assert options["lr of optimizer group 0"] == 0.1
    assert options["betas of optimizer group 0"] == (0.9, 0.999)
    assert not any("params" in name for name in options)


def test_an_optimizer_that_steps_for_the_first_time_is_noticed(trained: Trained) -> None:
    assert trained.catalogue.is_as_before(thoroughly=True)
    second = torch.optim.SGD(trained.net.parameters(), lr=1.0, momentum=0.5)
    assert trained.catalogue.is_as_before(thoroughly=True)
    second.step()
    assert not trained.catalogue.is_as_before(thoroughly=False)
    trained.catalogue.build()
    assert "0.weight.momentum_buffer of optimizer 1" in trained.names


def test_optimizers_of_other_modules_are_none_of_it(trained: Trained) -> None:
    other = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(other.parameters())
    other(torch.ones(1)).backward()
    optimizer.step()
    assert trained.catalogue.is_as_before(thoroughly=True)


def test_state_that_was_loaded_or_made_anew_is_noticed(trained: Trained) -> None:
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    assert not trained.catalogue.is_as_before(thoroughly=False)
    trained.catalogue.build()
    trained.optimizer.state.clear()
    trained.step()
    assert not trained.catalogue.is_as_before(thoroughly=True)


def test_an_optimizer_that_is_gone_is_not_kept_alive(trained: Trained) -> None:
    trained.optimizer = None  # type: ignore[assignment]
    gc.collect()
    assert not trained.catalogue.is_as_before(thoroughly=False)
    trained.catalogue.build()
    assert trained.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert trained.catalogue.options == []


def test_what_cannot_be_hashed_is_left_out() -> None:
    net = nn.Linear(2, 2)
    net.register_parameter("nowhere", nn.Parameter(torch.empty(2, device="meta")))
    net.register_parameter("sparse", nn.Parameter(torch.eye(2).to_sparse()))
    assert [entry.name for entry in Catalogue(net.named_parameters()).tensors] == ["weight", "bias"]


def test_names_of_some_ranks_only_are_found() -> None:
    assert not_on_all([{"a": "x", "b": "y"}, {"a": "x", "b": "z", "c": "x"}]) == {"b", "c"}
    assert not_on_all([{"a": "x"}, {"a": "x"}]) == frozenset()


def part_of(trained: Trained) -> ReplicaPart:
    entries = trained.catalogue.tensors
    return ReplicaPart(entries, [Piece(at, 0, entry.nbytes) for at, entry in enumerate(entries)])


def test_a_look_follows_data_that_was_replaced(trained: Trained) -> None:
    part = part_of(trained)
    before = part.hashes(part.look())
    assert part.hashes(part.look()) == before
    trained.net[0].weight.data = trained.net[0].weight.data + 1
    after = part.hashes(part.look())
    changed = [name for name, one, other in zip(part.names, before, after, strict=True) if one != other]
    assert changed == ["0.weight"]
    trained.net[0].weight.data = torch.zeros(5)
    with pytest.raises(MissingTensorError, match=r"0\.weight"):
        part.look()


class TestBuffers:
    def test_a_change_that_should_not_be_is_named(self, trained: Trained) -> None:
        watch = BufferWatch(trained.net, ())
        watch.begin()
        watch.end()
        assert watch.changed == set()
        watch.begin()
        trained.net[1].running_mean[1] = -0.0 if trained.net[1].running_mean[1] else 1.0
        watch.end()
        assert watch.changed == {"1.running_mean"}

    def test_changes_at_other_times_are_none(self, trained: Trained) -> None:
        watch = BufferWatch(trained.net, ())
        watch.begin()
        watch.end()
        trained.step()
        watch.end()
        watch.begin()
        trained.step()
        watch.forget()
        watch.end()
        assert watch.changed == set()

    def test_buffers_that_are_replaced_are_followed(self, trained: Trained) -> None:
        watch = BufferWatch(trained.net, ())
        watch.begin()
        trained.net[1].running_var = trained.net[1].running_var.clone()
        watch.end()
        assert watch.changed == set()
        watch.begin()
        trained.net[1].running_var = torch.zeros(9)
        watch.end()
        assert watch.changed == {"1.running_var"}
        watch.begin()
        watch.begin()
        watch.end()
        assert watch.changed == {"1.running_var"}

    def test_ignored_and_large_buffers_are_not_watched(self, trained: Trained) -> None:
        trained.net.register_buffer("large", torch.zeros(2**20))
        watch = BufferWatch(trained.net, {"1.running_var"})
        watch.begin()
        assert watch.names == {"1.running_mean", "1.num_batches_tracked"}
