"""A user's communication hook instead of the plain average."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.pending import FuturePending, OnSlow, Pending
from paceline.comm.torch_distributed import is_grad_bucket_type
from paceline.ddp.buckets.bucket_set import Bucket
from paceline.ddp.exchange.exchange import Exchange
from paceline.errors import HookArgumentsError, HookError, HookSignatureError, HookTypeError
from paceline.hooks.grad_bucket import GradBucket
from paceline.torch_private import CppFuture

FutureHook = Callable[[Any, GradBucket], "torch.futures.Future[Any]"]


class FutureHookExchange(Exchange):
    """Passes each full bucket to a hook, which returns a future of the reduced gradients.

    The hook gets gradients that are not divided; averaging is up to the hook. Nobody else knows what it does
    to the bucket, so the step report travels in a small reduction of its own, once per step.

    Args:
        group: the ranks.
        state: passed to the hook.
        hook: called with the state and a bucket.
        name: its name in errors; by default the hook's own name.
        remake: makes the hook for another group, if it depends on the group.
    """

    # A hook may issue a collective when an earlier one is done. Those of two buckets would then follow each
    # other in another order on each rank.
    one_at_a_time = True

    def __init__(
        self,
        group: Group,
        state: Any,
        hook: FutureHook,
        *,
        name: str | None = None,
        remake: Callable[[Group], FutureHook] | None = None,
    ) -> None:
        super().__init__(group)
        self._remake = remake
        self._state = state
        self._hook = hook
        self.name = str(name or getattr(hook, "__qualname__", type(hook).__qualname__))

    @property
    def signature(self) -> str:
        """The same for all hooks of users: ranks may have given different names to one."""
        return "a hook that returns futures"

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of torch's built-in hooks, which are named by a type."""
        return self._remake is not None

    def call(self, given: Any) -> "torch.futures.Future[Any]":
        """Call the hook with its state and an argument."""
        return self._hook(self._state, given)

    def for_group(self, group: Group) -> "FutureHookExchange":
        """The same hook among other ranks."""
        hook = self._hook if self._remake is None else self._remake(group)
        return FutureHookExchange(group, self._state, hook, name=self.name, remake=self._remake)

    def launch(self, bucket: Bucket, number: int, *, is_last: bool) -> Pending:
        """Call the hook."""
        future = self.call(GradBucket(bucket, number, is_last=is_last))
        if not isinstance(future, CppFuture):
            raise HookError(
                f"callback must return a torch.futures.Future object, but got {type(future).__name__} "
                f"(hook: {self.name}, bucket: {number})"
            )
        return FuturePending(future)

    def wait(self, bucket: Bucket, number: int, pending: Pending, on_slow: OnSlow) -> None:
        """Wait for the hook's future and check what it holds."""
        result: Any = pending.wait(on_slow)
        if isinstance(result, list | tuple) and len(result) == 1:
            (result,) = result
        check_result(result, bucket, number, self.name)
        bucket.receive(result)


def check_result(result: Any, bucket: Bucket, number: int, name: object) -> None:
    """Refuse what cannot be a bucket's reduced gradients."""
    want = bucket.gradients
    if not isinstance(result, Tensor):
        given = type(result).__name__
    elif result.shape != want.shape and result.numel() != want.numel():
        given = f"{result.numel()} elements"
    elif (result.layout, result.device) != (want.layout, want.device) or not _is_as(result, want):
        given = f"{result.dtype}, {result.layout}, on {result.device}"
    else:
        return
    raise HookError(
        f"a hook must return a tensor like the bucket's buffer (hook: {name}, bucket: {number}, "
        f"wanted: {want.numel()} elements of {want.dtype}, got: {given})"
    )


def _is_as(result: Tensor, want: Tensor) -> bool:
    """Whether a result can be cast to the bucket's type; a hook that compresses may return what was sent."""
    return result.is_floating_point() == want.is_floating_point() and result.is_complex() == want.is_complex()


def check_hook(hook: Any) -> None:
    """Refuse what cannot be a communication hook, as torch does."""
    if not callable(hook):
        raise HookTypeError(f"Communication hook must be callable. (hook: {hook!r})")
    signature = inspect.signature(hook)
    _check_takes_two(signature, hook)
    empty = inspect.Parameter.empty
    bucket = signature.parameters.get("bucket")
    if (
        bucket is not None
        and bucket.annotation not in (empty, GradBucket)
        and not _names_bucket(bucket.annotation)
    ):
        raise HookSignatureError(
            "Communication hook: bucket annotation should be dist.GradBucket. "
            f"(annotated: {bucket.annotation!r})"
        )
    returned = signature.return_annotation
    if returned is not empty and returned != torch.futures.Future[torch.Tensor]:
        raise HookSignatureError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"(annotated: {returned!r})"
        )


def _check_takes_two(signature: inspect.Signature, hook: Any) -> None:
    try:
        signature.bind("state", "bucket")
    except TypeError as error:
        raise HookArgumentsError(
            "a communication hook is called with two positional arguments, a state and a bucket "
            f"(hook: {hook!r}, parameters: {signature}, {error})"
        ) from None


def _names_bucket(annotation: Any) -> bool:
    return is_grad_bucket_type(annotation) or annotation in ("dist.GradBucket", "GradBucket")
