"""Who holds a gradient, and what its bucket's storage does about it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_steps import CPU, random_grads, random_parameters, slots_of
from torch import Tensor, nn

from paceline.ddp.buckets.dense import LARGE_NUMEL, DenseBucket
from paceline.ddp.buckets.lending import Lent, held


def _in_a_graph(grad: Tensor) -> Tensor:
    return torch.ones_like(grad).requires_grad_() * grad


def _of_another_parameter(grad: Tensor) -> nn.Parameter:
    other = nn.Parameter(torch.zeros_like(grad))
    other.grad = grad
    return other


def _in_a_closure(grad: Tensor) -> Callable[[], Tensor]:
    return lambda: grad


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a variable": lambda grad: grad,
    "a list": lambda grad: [grad],
    "a closure": _in_a_closure,
    "an autograd graph": _in_a_graph,
    "another parameter": _of_another_parameter,
    "a slice": lambda grad: grad[:1],
    "a flat view": lambda grad: grad.view(-1),
    "a numpy array": lambda grad: grad.numpy(),
    "a detached tensor": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "its storage": lambda grad: grad.untyped_storage(),
}
# These do not hold the tensor itself. Of a gradient that autograd has just made there are none.
OF_STORAGE = ("a slice", "a flat view", "a numpy array", "a detached tensor", "data", "its storage")
EACH = pytest.mark.parametrize("holder", HOLDERS)


def fresh(*, added_to: bool) -> list[Tensor]:
    """Gradients that are in this list alone."""
    grads = [torch.ones(4, dtype=torch.double) for _ in range(3)]
    if added_to:
        torch._foreach_add_(grads, 1)
    return grads


@pytest.mark.parametrize("added_to", [True, False])
def test_what_is_in_the_list_alone_is_held_by_nobody(added_to: bool) -> None:
    assert held(fresh(added_to=added_to)) == []


@EACH
def test_a_gradient_is_held_by(holder: str) -> None:
    grads = fresh(added_to=holder in OF_STORAGE)
    keep = HOLDERS[holder](grads[1])
    assert held(grads) == [1]
    del keep
    assert held(grads) == []


def test_a_sparse_gradient_may_be_held() -> None:
    grads = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse()]
    keep = grads[0]
    assert held(grads) == [0]
    del keep
    grads[1].mul_(2)
    assert held(grads) == []


def lent_views() -> tuple[list[Tensor], list[nn.Parameter]]:
    storage = torch.zeros(10, dtype=torch.double)
    views = [storage[:4].data, storage[4:].data]
    return views, random_parameters(4, 6)


def test_views_that_nobody_has_may_be_written_to() -> None:
    views, parameters = lent_views()
    assert Lent(views).as_gradients(parameters, anyone_may_hold=False) == set()


def test_views_that_are_gradients_are_told() -> None:
    views, parameters = lent_views()
    lent = Lent(views)
    parameters[1].grad = views[1]
    assert lent.as_gradients(parameters, anyone_may_hold=False) == {1}
    parameters[0].grad = views[0]
    assert lent.as_gradients(parameters, anyone_may_hold=False) == {0, 1}


@EACH
def test_a_view_that_is_no_gradient_is_lent_to(holder: str) -> None:
    views, parameters = lent_views()
    lent = Lent(views)
    parameters[1].grad = views[1]
    keep = HOLDERS[holder](views[0])
    assert lent.as_gradients(parameters, anyone_may_hold=False) is None
    assert lent.as_gradients(parameters, anyone_may_hold=True) == set()
    del keep
    assert lent.as_gradients(parameters, anyone_may_hold=False) == {1}


@EACH
def test_whoever_holds_a_gradient_sees_autograd_add_to_it_anyhow(holder: str) -> None:
    views, parameters = lent_views()
    lent = Lent(views)
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    del view
    keep = HOLDERS[holder](views[0])
    assert lent.as_gradients(parameters, anyone_may_hold=False) == {0, 1}
    del keep


@pytest.mark.parametrize("anyone", [True, False])
def test_a_view_that_was_given_other_data_is_not_written_to(anyone: bool) -> None:
    views, parameters = lent_views()
    lent = Lent(views)
    views[1].data = torch.ones(6, dtype=torch.double)
    assert lent.as_gradients(parameters, anyone_may_hold=anyone) is None
    assert lent.is_whole(0)
    assert not lent.is_whole(1)


def bucket_of(parameters: list[nn.Parameter], *, as_views: bool = False) -> DenseBucket:
    def empty(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    return DenseBucket(slots_of(parameters), parameters, device=CPU, as_views=as_views, empty=empty)


def run_step(bucket: DenseBucket, *, clear: bool = True) -> int:
    """A step whose average is this rank's gradient; returns the address of the storage."""
    grads = random_grads([*bucket.parameters])
    for slot, parameter in enumerate(bucket.parameters):
        if clear or parameter.grad is None:
            parameter.grad = grads[slot].clone()
        else:
            parameter.grad += grads[slot]
    bucket.begin()
    bucket.fill(1.0, None)
    bucket.set_grads()
    bucket.set_unused_grads([1] * len(grads))
    return bucket.storage.data_ptr()


@pytest.mark.parametrize("clear", [True, False])
def test_storage_that_nobody_holds_is_used_again(clear: bool) -> None:
    bucket = bucket_of(random_parameters((2, 2), LARGE_NUMEL))
    assert len({run_step(bucket, clear=clear) for _ in range(3)}) == 1


@EACH
@pytest.mark.parametrize("slot", [0, 1])
def test_held_gradients_stay_as_they_were_and_the_bucket_takes_new_storage(holder: str, slot: int) -> None:
    bucket = bucket_of(random_parameters((2, 2), LARGE_NUMEL))
    first = run_step(bucket)
    then = bucket.parameters[slot].grad.clone()
    keep = HOLDERS[holder](bucket.parameters[slot].grad)
    old = torch.frombuffer(memoryview(bucket.storage.numpy()), dtype=torch.double)
    offset = bucket.parameters[slot].grad.storage_offset()
    second = run_step(bucket)
    assert second != first
    assert old[offset : offset + then.numel()].equal(then.flatten())
    del keep
    assert run_step(bucket) == second


def test_with_views_it_does_not_matter_who_holds_them() -> None:
    bucket = bucket_of(random_parameters(3), as_views=True)
    first = run_step(bucket)
    keep = bucket.parameters[0].grad
    assert run_step(bucket) == first
    assert keep.data_ptr() == first


@pytest.mark.parametrize("numel", [3, LARGE_NUMEL])
def test_a_gradient_that_is_held_when_it_is_copied_gets_the_average(numel: int) -> None:
    """As in accumulation, where a user keeps gradients in memory of their own."""
    (parameter,) = parameters = random_parameters(numel)
    own = parameter.grad = torch.ones_like(parameter)
    bucket = bucket_of(parameters)
    bucket.fill(0.5, None)
    assert parameter.grad is None
    bucket.gradients.mul_(3)
    bucket.set_grads()
    assert parameter.grad is own
    assert own.unique().tolist() == [1.5]


@pytest.mark.parametrize("numel", [3, LARGE_NUMEL])
def test_an_accumulated_gradient_that_nobody_holds_makes_way_for_a_lent_one(numel: int) -> None:
    (parameter,) = parameters = random_parameters(numel)
    parameter.grad = torch.ones_like(parameter)
    parameter.grad += 1
    bucket = bucket_of(parameters)
    bucket.fill(0.5, None)
    bucket.set_grads()
    assert parameter.grad.data_ptr() == bucket.storage.data_ptr()
    assert parameter.grad.unique().tolist() == [1]


def test_a_gradient_that_is_to_be_differentiated_again_is_not_written_to() -> None:
    (parameter,) = parameters = random_parameters(3)
    own = parameter.grad = _in_a_graph(torch.ones(3, dtype=torch.double))
    bucket = bucket_of(parameters)
    with torch.no_grad():
        bucket.fill(0.5, None)
        bucket.set_grads()
    assert own.tolist() == [1, 1, 1]
    assert parameter.grad.tolist() == [0.5] * 3


def test_a_gradient_that_is_let_go_in_the_midst_of_a_step_stays_as_it_was() -> None:
    parameters = random_parameters(3, LARGE_NUMEL)
    bucket = bucket_of(parameters)
    run_step(bucket)
    average = parameters[0].grad
    then = average.clone()
    parameters[1].grad += 1
    bucket.begin()
    bucket.copy_in(bucket.batch([1]), 1.0)
    parameters[0].grad = torch.full_like(parameters[0], 5)  # a hook put it there
    bucket.fill(1.0, None)
    bucket.set_grads()
    assert average.equal(then)
    assert parameters[0].grad.tolist() == [5, 5, 5]
