"""The common state of a fragment, and what a host's parameters move by."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.hooks.compressors import Cast, Integers, TopK
from paceline.outer.fragment import FlatParameters, Fragment, OuterOptimizer

LOSSLESS = Cast(torch.float64)


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4), (5,), ())
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def fragment(
    compressor: object = LOSSLESS, lr: float = 0.7, momentum: float = 0.9
) -> tuple[list[nn.Parameter], Fragment]:
    own = parameters()
    return own, Fragment(FlatParameters(own), compressor, OuterOptimizer(lr, momentum))  # type: ignore[arg-type]


def drift(own: list[nn.Parameter], generator: torch.Generator) -> None:
    with torch.no_grad():
        for each in own:
            each.add_(torch.randn(each.shape, generator=generator, dtype=each.dtype))


@given(st.integers(1, 4), st.floats(0.1, 1.5), st.floats(0, 0.95), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_outer_steps_are_those_of_sgd_with_nesterov_momentum_on_the_mean_change(
    hosts: int, lr: float, momentum: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    all_hosts = [fragment(lr=lr, momentum=momentum) for _ in range(hosts)]
    expected = all_hosts[0][1].common.clone().requires_grad_()
    reference = torch.optim.SGD([expected], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for number in range(4):
        before = expected.detach().clone()
        changes: dict[int, bytes] = {}
        differences: list[Tensor] = []
        for host, (own, each) in enumerate(all_hosts):
            drift(own, generator)
            differences.append(before - each.parameters.read())
            changes[host] = each.encode(number, each.parameters.read())
        expected.grad = torch.stack(differences).mean(0)
        reference.step()
        for host, (_, each) in enumerate(all_hosts):
            move = each.step(number, changes, host)
            assert move is not None
            each.parameters.move(move)
            torch.testing.assert_close(each.common, expected.detach(), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(each.parameters.read(), expected.detach(), rtol=1e-9, atol=1e-9)
            assert torch.equal(each.common, all_hosts[0][1].common), "hosts have the same bits"


def test_what_a_host_learns_while_its_change_is_under_way_stays() -> None:
    own, each = fragment()
    generator = torch.Generator().manual_seed(1)
    drift(own, generator)
    sent = each.parameters.read()
    change = each.encode(0, sent)
    drift(own, generator)
    later = each.parameters.read()
    move = each.step(0, {0: change}, 0)
    assert move is not None
    each.parameters.move(move)
    torch.testing.assert_close(each.parameters.read(), each.common + (later - sent))


def test_what_a_host_has_learned_stays_if_its_change_does_not_count() -> None:
    (own, each), (others, other) = fragment(), fragment()
    generator = torch.Generator().manual_seed(1)
    drift(own, generator)
    drift(others, generator)
    before = each.parameters.read() - each.common
    each.encode(0, each.parameters.read())
    move = each.step(0, {1: other.encode(0, other.parameters.read())}, 0)
    assert move is not None
    each.parameters.move(move)
    torch.testing.assert_close(each.parameters.read() - each.common, before)
    assert not each.residual.any()


@given(st.sampled_from([Integers(8), Integers(4), TopK(0.3), Cast(torch.bfloat16)]), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_what_compression_leaves_out_is_sent_later(compressor: object, seed: int) -> None:
    own, each = fragment(compressor, lr=1.0, momentum=0.0)
    generator = torch.Generator().manual_seed(seed)
    start = each.common.clone()
    learned = torch.zeros_like(start)
    for number in range(6):
        before = each.parameters.read()
        drift(own, generator)
        learned += each.parameters.read() - before
        change = each.encode(number, each.parameters.read())
        move = each.step(number, {0: change}, 0)
        assert move is not None
        each.parameters.move(move)
    torch.testing.assert_close(each.common - each.residual, start + learned, rtol=1e-6, atol=1e-6)


def test_a_round_without_changes_moves_nothing() -> None:
    own, each = fragment()
    drift(own, torch.Generator().manual_seed(1))
    before = each.common.clone()
    each.encode(0, each.parameters.read())
    assert each.step(0, {}, 0) is None
    assert each.sent is None
    assert torch.equal(each.common, before)


def test_another_hosts_state_replaces_the_common_one_and_keeps_own_progress() -> None:
    own, each = fragment()
    drift(own, torch.Generator().manual_seed(1))
    progress = each.parameters.read() - each.common
    common, momentum = torch.ones_like(each.common), torch.full_like(each.common, 2.0)
    each.parameters.move(each.take(common, momentum, joins=False))
    assert torch.equal(each.common, common)
    assert torch.equal(each.momentum, momentum)
    torch.testing.assert_close(each.parameters.read(), common + progress)


def leave_something_out() -> Fragment:
    """A host whose change counted; compression has left out a part of it."""
    own, each = fragment(TopK(0.3))
    drift(own, torch.Generator().manual_seed(1))
    each.step(0, {0: each.encode(0, each.parameters.read())}, 0)
    assert each.residual.any()
    return each


def test_what_compression_left_out_is_sent_later_also_to_the_hosts_whose_state_was_taken() -> None:
    each = leave_something_out()
    before = each.residual.clone()
    each.take(torch.ones_like(each.common), torch.ones_like(each.common), joins=False)
    assert torch.equal(each.residual, before)


def test_what_compression_left_out_is_forgotten_if_own_parameters_are_or_a_change_is_under_way() -> None:
    for joins in (True, False):
        each = leave_something_out()
        if not joins:
            each.encode(1, each.parameters.read())
        each.take(torch.ones_like(each.common), torch.ones_like(each.common), joins=joins)
        assert not each.residual.any()


def test_parameters_of_several_types_are_read_in_the_widest_and_written_in_their_own() -> None:
    mixed = [
        nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        nn.Parameter(torch.ones(3, dtype=torch.complex64)),
        nn.Parameter(torch.ones(2, 2).to(memory_format=torch.contiguous_format)),
    ]
    flat = FlatParameters(mixed)
    assert flat.numel == 2 + 6 + 4
    assert flat.read().dtype == torch.float32
    flat.move(torch.arange(12.0))
    assert mixed[0].tolist() == [1, 2]
    assert mixed[1].tolist() == [3 + 3j, 5 + 5j, 7 + 7j]
    assert mixed[2].tolist() == [[9, 10], [11, 12]]
    flat.replace(torch.zeros(12))
    assert not any(each.detach().any() for each in mixed)
