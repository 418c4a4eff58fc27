from typing import Any

import pytest
import torch
from scripted_steps import CPU, assert_grads, random_grads, random_parameters, slots_of
from torch import Tensor, nn

from paceline import torch_private
from paceline.ddp.buckets import dense as dense_bucket
from paceline.ddp.buckets.bucket_set import BucketOptions, BucketSet
from paceline.ddp.buckets.dense import LARGE_NUMEL, DenseBucket
from paceline.ddp.buckets.plan import BucketPlan
from paceline.ddp.buckets.sparse import SparseBucket

FACTOR = 0.25
VIEWS = pytest.mark.parametrize("as_views", [False, True], ids=["lent", "views"])
# 128 KiB of each, with a small one between two large ones.
MIXED = (3, LARGE_NUMEL, (2, 2), (4, LARGE_NUMEL // 4), 5)


def memory(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Garbage, so that what nobody wrote is seen."""
    return torch.full((numel,), torch.nan, dtype=dtype, device=device)


def dense(parameters: list[nn.Parameter], **options: Any) -> DenseBucket:
    settings = {"device": CPU, "as_views": False, "empty": memory, **options}
    return DenseBucket(slots_of(parameters), parameters, **settings)


def channels_last() -> list[nn.Parameter]:
    image = torch.randn(2, 3, 4, 5, dtype=torch.double).to(memory_format=torch.channels_last)
    return [nn.Parameter(image), *random_parameters((3, 4)), nn.Parameter(torch.randn(4, 3).double().T)]


PARAMETERS: dict[str, Any] = {
    "small": lambda: random_parameters(3, (2, 2), ()),
    "large": lambda: random_parameters(LARGE_NUMEL, (2, LARGE_NUMEL)),
    "small and large": lambda: random_parameters(*MIXED),
    "not contiguous": channels_last,
    "complex": lambda: random_parameters(3, LARGE_NUMEL, (2, 2), dtype=torch.complex128),
    "empty": lambda: random_parameters(0, 3),
}
KINDS = pytest.mark.parametrize("kind", PARAMETERS)


def give(parameters: list[nn.Parameter], grads: dict[int, Tensor]) -> None:
    for slot, grad in grads.items():
        parameters[slot].grad = grad.clone()


@KINDS
@VIEWS
@pytest.mark.parametrize("early", [0, 1, 2])
def test_gradients_go_in_multiplied_and_come_out_reduced(kind: str, as_views: bool, early: int) -> None:
    """Some gradients are copied when they arrive, the others when the bucket is filled."""
    parameters = PARAMETERS[kind]()
    bucket = dense(parameters, as_views=as_views, tail=2)
    for _ in range(2):
        grads = random_grads(parameters)
        give(parameters, grads)
        bucket.begin()
        bucket.copy_in(bucket.batch(range(early)), FACTOR)
        assert [each.grad is None for each in parameters[:early]] == [True] * min(early, len(parameters))
        assert bucket.fill(FACTOR, None) == []
        assert all(each.grad is None for each in parameters)
        for view, grad in zip(bucket.views, grads.values(), strict=True):
            torch.testing.assert_close(view, FACTOR * grad)
        bucket.tail.fill_(7)
        bucket.gradients.mul_(8)
        bucket.set_grads()
        assert_grads(parameters, {slot: 2 * grad for slot, grad in grads.items()})
        assert all(each.grad.stride() == each.stride() for each in parameters)
        assert bucket.tail.tolist() == [7, 7]


def test_gradients_are_in_the_storage_in_the_order_of_the_slots() -> None:
    parameters = random_parameters(*MIXED)
    grads = random_grads(parameters)
    give(parameters, grads)
    bucket = dense(parameters, tail=3)
    bucket.fill(FACTOR, None)
    flat = torch.cat([grad.flatten() for grad in grads.values()])
    torch.testing.assert_close(bucket.storage[:-3], FACTOR * flat)
    assert bucket.storage.numel() == flat.numel() + 3


def test_complex_gradients_travel_as_twice_as_many_reals() -> None:
    parameters = random_parameters(3, dtype=torch.complex64)
    bucket = dense(parameters, tail=2)
    assert bucket.storage.dtype == torch.float32
    assert bucket.storage.numel() == 8
    bucket.tail.fill_(1)
    bucket.storage[:-2] = torch.arange(6.0)
    assert bucket.gradients.tolist() == [1j, 2 + 3j, 4 + 5j]
    bucket.scale(2)
    assert bucket.storage.tolist() == [0, 2, 4, 6, 8, 10, 1, 1]


@VIEWS
def test_averages_are_parts_of_the_storage(as_views: bool) -> None:
    parameters = random_parameters(*MIXED)
    give(parameters, random_grads(parameters))
    bucket = dense(parameters, as_views=as_views)
    bucket.fill(1.0, None)
    bucket.set_grads()
    pointer = bucket.storage.untyped_storage().data_ptr()
    assert {each.grad.untyped_storage().data_ptr() for each in parameters} == {pointer}
    assert [each.grad._is_view() for each in parameters] == [as_views] * 5


@KINDS
def test_more_of_a_gradient_before_the_launch_is_added(kind: str) -> None:
    parameters = PARAMETERS[kind]()
    first, more = random_grads(parameters), random_grads(parameters)
    bucket = dense(parameters)
    give(parameters, first)
    bucket.copy_in(bucket.batch(range(len(parameters))), FACTOR)
    give(parameters, more)
    bucket.fill(FACTOR, [1] * len(parameters))
    bucket.set_grads()
    assert_grads(parameters, {slot: FACTOR * (first[slot] + more[slot]) for slot in first})


def test_copying_twice_copies_once() -> None:
    parameters = random_parameters(*MIXED)
    give(parameters, grads := random_grads(parameters))
    bucket = dense(parameters)
    bucket.copy_in(bucket.batch([0, 1]), FACTOR)
    bucket.copy_in(bucket.batch([0, 1, 2]), FACTOR)
    bucket.fill(FACTOR, None)
    bucket.set_grads()
    assert_grads(parameters, {slot: FACTOR * grad for slot, grad in grads.items()})


def test_a_sparse_gradient_in_a_dense_bucket_becomes_dense() -> None:
    parameters = random_parameters(3, (4, 2), 2)
    grads = random_grads(parameters)
    give(parameters, grads)
    parameters[1].grad = grads[1].to_sparse(1)
    bucket = dense(parameters)
    bucket.copy_in(bucket.batch(range(3)), FACTOR)
    assert bucket.fill(FACTOR, None) == []
    bucket.set_grads()
    assert_grads(parameters, {slot: FACTOR * grad for slot, grad in grads.items()})


@pytest.mark.parametrize("used", [None, [1, 1, 1, 1, 0]])
def test_slots_said_to_be_used_that_have_no_gradient_are_told(used: list[int] | None) -> None:
    parameters = random_parameters(*MIXED)
    give(parameters, random_grads(parameters, 0, 3))
    bucket = dense(parameters)
    bucket.copy_in(bucket.batch(range(5)), 1.0)
    assert sorted(bucket.fill(1.0, used)) == ([1, 2, 4] if used is None else [1, 2])
    assert not bucket.views[1].any()
    assert not bucket.views[2].any()
    assert not bucket.views[4].any()


@VIEWS
@pytest.mark.parametrize("numel", [3, LARGE_NUMEL])
def test_a_slot_that_is_unused_here_is_decided_when_others_are_known(as_views: bool, numel: int) -> None:
    parameters = random_parameters(numel, numel, numel, numel)
    used = random_grads(parameters, 0)
    give(parameters, used)
    old = parameters[2].grad = torch.ones_like(parameters[2])
    bucket = dense(parameters, as_views=as_views)
    bucket.fill(FACTOR, [1, 0, 0, 0])
    for at, view in enumerate(bucket.views):
        view.fill_(at + 1.0)  # what the reduction brought
    bucket.set_grads()
    assert [each.grad is None for each in parameters] == [False, True, True, True]
    bucket.set_unused_grads([1, 2, 0, 0])
    assert parameters[2].grad is old
    ones = torch.ones(numel)
    assert_grads(parameters, {0: ones, 1: 2 * ones, 2: ones})


def test_an_old_gradient_that_others_add_to_goes_with_this_ranks_contribution() -> None:
    (parameter,) = parameters = random_parameters(3)
    parameter.grad = torch.ones_like(parameter)
    bucket = dense(parameters)
    bucket.fill(FACTOR, [0])
    assert bucket.gradients.tolist() == [FACTOR] * 3
    bucket.gradients.add_(1)
    bucket.set_grads()
    bucket.set_unused_grads([1])
    assert_grads(parameters, {0: torch.full((3,), 1 + FACTOR)})


@pytest.mark.parametrize("travels", [torch.bfloat16, torch.float32])
@VIEWS
def test_gradients_that_travel_in_another_type_come_out_in_their_own(
    travels: torch.dtype, as_views: bool
) -> None:
    parameters = random_parameters(*MIXED)
    bucket = dense(parameters, dtype=travels, as_views=as_views)
    held = []
    for _ in range(2):
        grads = random_grads(parameters)
        give(parameters, grads)
        bucket.begin()
        bucket.copy_in(bucket.batch([0, 1]), FACTOR)
        bucket.fill(FACTOR, [1, 1, 1, 1, 0])
        assert bucket.storage.dtype == travels
        bucket.set_grads()
        bucket.set_unused_grads([1] * 5)
        for slot, grad in grads.items():
            found = parameters[slot].grad
            torch.testing.assert_close(found, (FACTOR * grad).to(travels).double(), rtol=1e-2, atol=1e-6)
            assert found.untyped_storage().data_ptr() != bucket.storage.untyped_storage().data_ptr()
        held.append([(each.grad, each.grad.clone()) for each in parameters])
    assert all(grad.equal(then) for step in held for grad, then in step)


@pytest.mark.parametrize("travels", [None, torch.float32], ids=["held", "another type"])
def test_averages_for_gradients_that_somebody_holds_are_copied_together(
    monkeypatch: pytest.MonkeyPatch, travels: torch.dtype | None
) -> None:
    parameters = random_parameters(*MIXED)
    bucket = dense(parameters, dtype=travels)
    give(parameters, random_grads(parameters))
    held = [each.grad for each in parameters]
    bucket.copy_in(bucket.batch(range(5)), 1.0)
    bucket.fill(1.0, None)
    copied: list[int] = []

    def copy(into: list[Tensor], views: list[Tensor]) -> None:
        copied.append(len(into))
        torch_private.foreach_copy_(into, views)

    monkeypatch.setattr(dense_bucket, "foreach_copy_", copy)
    bucket.gradients.fill_(2.0)
    bucket.set_grads()
    assert copied == [5]
    assert all(each.grad is own and own.eq(2).all() for each, own in zip(parameters, held, strict=True))


def test_complex_gradients_do_not_travel_in_another_type() -> None:
    bucket = dense(random_parameters(3, dtype=torch.complex64), dtype=torch.bfloat16)
    assert bucket.storage.dtype == torch.float32
    assert bucket.gradients.dtype == torch.complex64


def test_zeros_are_in_new_storage() -> None:
    parameters = random_parameters(3, 2)
    give(parameters, grads := random_grads(parameters))
    bucket = dense(parameters, tail=2)
    bucket.fill(1.0, None)
    bucket.set_grads()
    bucket.zero()
    assert bucket.storage.tolist() == [0] * 7
    assert_grads(parameters, grads)


def test_a_part_has_some_of_the_slots_in_ordinary_memory() -> None:
    parameters = random_parameters(3, LARGE_NUMEL, 2)
    bucket = dense(parameters, tail=4, dtype=torch.float32)
    part = bucket.part([0, 2])
    assert [slot.name for slot in part.slots] == ["p0", "p2"]
    assert [id(each) for each in part.parameters] == [id(parameters[0]), id(parameters[2])]
    assert part.storage.numel() == 5
    assert part.storage.dtype == torch.float32
    part.storage.fill_(2)
    assert bucket.storage.isnan().all()
    assert [view.tolist() for view in part.views] == [[2, 2, 2], [2, 2]]


def test_a_result_from_outside_is_taken_over_unless_it_is_the_storage() -> None:
    bucket = dense(random_parameters((2, 2)))
    bucket.receive(torch.arange(4.0).double().view(2, 2))
    assert bucket.gradients.tolist() == [0, 1, 2, 3]
    bucket.receive(bucket.gradients)
    assert bucket.gradients.tolist() == [0, 1, 2, 3]


def test_a_second_reduction_is_added_to_gradients() -> None:
    parameters = random_parameters(3, 2)
    give(parameters, grads := random_grads(parameters, 1))
    more = dense(parameters)
    more.storage.fill_(1)
    dense(parameters).add_to_grads(more)
    assert_grads(parameters, {1: grads[1] + 1})


def test_a_converted_module_gets_storage_of_its_new_type() -> None:
    parameters = random_parameters(3, dtype=torch.float32)
    bucket = dense(parameters)
    before = bucket.storage
    bucket.begin()
    assert bucket.storage is before
    parameters[0].data = parameters[0].data.double()
    bucket.begin()
    assert bucket.storage.dtype == torch.float64


def test_a_bucket_without_slots_has_only_a_tail() -> None:
    bucket = dense([], tail=3)
    assert bucket.fill(FACTOR, None) == []
    bucket.tail.fill_(1)
    bucket.set_grads()
    bucket.set_unused_grads([])
    assert bucket.storage.tolist() == [1, 1, 1]


def sparse_bucket(dtype: torch.dtype | None = None) -> tuple[SparseBucket, nn.Parameter]:
    (parameter,) = random_parameters((5, 2))
    return SparseBucket(slots_of([parameter], sparse=[0])[0], parameter, dtype), parameter


def touched(*rows: int) -> Tensor:
    grad = torch.zeros(5, 2, dtype=torch.double)
    grad[list(rows)] = torch.randn(len(rows), 2, dtype=torch.double)
    return grad


@pytest.mark.parametrize("given", ["sparse", "dense"])
def test_of_a_sparse_gradient_only_touched_rows_travel(given: str) -> None:
    bucket, parameter = sparse_bucket()
    grad = touched(1, 3)
    parameter.grad = grad.to_sparse(1) if given == "sparse" else grad.clone()
    bucket.begin()
    bucket.copy_in(bucket.batch([0]), FACTOR)
    assert parameter.grad is not None
    assert bucket.fill(FACTOR, None) == []
    assert parameter.grad is None
    assert bucket.storage._nnz() == 2
    bucket.receive(bucket.storage + touched(4).to_sparse(1) * 0)
    bucket.scale(2)
    bucket.set_grads()
    bucket.set_unused_grads([1])
    assert parameter.grad.is_sparse
    torch.testing.assert_close(parameter.grad.to_dense(), 2 * FACTOR * grad)


@pytest.mark.parametrize("said", [0, 1])
@pytest.mark.parametrize("elsewhere", [0, 1])
def test_an_unused_sparse_slot_sends_no_rows(said: int, elsewhere: int) -> None:
    bucket, parameter = sparse_bucket()
    assert bucket.fill(FACTOR, [said]) == [0] * said
    assert bucket.gradients._nnz() == 0
    assert bucket.views[0].shape == (5, 2)
    bucket.receive(theirs := touched(2).to_sparse(1))
    bucket.set_grads()
    assert parameter.grad is None
    bucket.set_unused_grads([elsewhere])
    if elsewhere:
        assert parameter.grad.to_dense().equal(theirs.to_dense())
    else:
        assert parameter.grad is None


def test_a_sparse_gradient_that_no_rank_added_to_stays() -> None:
    bucket, parameter = sparse_bucket()
    old = parameter.grad = touched(0).to_sparse(1)
    bucket.fill(FACTOR, [0])
    bucket.set_grads()
    bucket.set_unused_grads([0])
    assert parameter.grad is old


def test_a_sparse_gradient_may_travel_in_another_type() -> None:
    bucket, parameter = sparse_bucket(torch.bfloat16)
    parameter.grad = (grad := touched(1)).to_sparse(1)
    bucket.fill(1.0, None)
    assert bucket.storage.dtype == torch.bfloat16
    bucket.set_grads()
    torch.testing.assert_close(parameter.grad.to_dense(), grad.bfloat16().double())
    bucket.zero()
    assert bucket.storage.dtype == torch.bfloat16


def test_a_second_reduction_is_added_to_a_sparse_gradient() -> None:
    bucket, parameter = sparse_bucket()
    parameter.grad = (first := touched(1)).to_sparse(1)
    more, _ = sparse_bucket()
    more.receive((second := touched(1, 2)).to_sparse(1))
    bucket.add_to_grads(more)
    torch.testing.assert_close(parameter.grad.to_dense(), first + second)


def bucket_set(parameters: list[nn.Parameter], *plan: tuple[int, ...], **options: Any) -> BucketSet:
    settings = {
        "report_numel": 4,
        "report_in_bucket": True,
        "options": BucketOptions(),
        "empty": memory,
        **options,
    }
    return BucketSet(BucketPlan(plan), slots_of(parameters, sparse=[2]), parameters, **settings)


def test_a_set_has_a_bucket_for_each_of_the_plans() -> None:
    parameters = random_parameters(LARGE_NUMEL, 3, (LARGE_NUMEL, 1), 2)
    buckets = bucket_set(parameters, (2,), (1, 0))
    sparse, last = buckets.buckets
    assert isinstance(sparse, SparseBucket)
    assert isinstance(last, DenseBucket)
    assert [slot.index for slot in last.slots] == [1, 0]
    assert buckets.bucket_of == {2: sparse, 1: last, 0: last}
    assert [*buckets.is_large] == [1, 0, 0, 0]


def test_the_report_is_behind_the_last_buckets_gradients() -> None:
    parameters = random_parameters(5, 3, (2, 2))
    buckets = bucket_set(parameters, (1,), (0,))
    assert [bucket.storage.numel() for bucket in buckets.buckets] == [3, 5 + 4]
    buckets.report.fill_(1)
    assert buckets.buckets[1].storage[5:].tolist() == [1] * 4


def test_a_report_beside_the_buckets_stays_where_it_is() -> None:
    parameters = random_parameters(5, 3, (2, 2), dtype=torch.bfloat16)
    buckets = bucket_set(parameters, (1,), (0,), report_in_bucket=False)
    assert [bucket.storage.numel() for bucket in buckets.buckets] == [3, 5]
    buckets.report.fill_(1)
    assert buckets.report.tolist() == [1] * 4
    assert buckets.report.dtype == torch.float32


def test_where_all_is_sparse_the_report_has_a_bucket_for_itself() -> None:
    parameters = random_parameters(5, 3, (2, 2))
    buckets = bucket_set(parameters, (2,), ())
    assert buckets.report.numel() == buckets.buckets[1].storage.numel() == 4


def test_further_buckets_have_memory_of_their_own_and_no_report() -> None:
    parameters = random_parameters(5, 3, (2, 2))
    buckets = bucket_set(parameters, (1,), (0,))
    another, outside = buckets.another(1), buckets.for_slots([2])
    assert [slot.index for slot in another.slots] == [0]
    assert another.storage.numel() == 5
    assert another.storage.data_ptr() != buckets.buckets[1].storage.data_ptr()
    assert isinstance(outside, SparseBucket)
    assert 2 not in buckets.bucket_of
