"""The c10d backend "paceline": every collective, for every type of element, against arithmetic and gloo."""

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

from paceline.testing import RankPool
from paceline.torch_private import all_gather_single, reduce_scatter_single

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SMALL_INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32]
INTEGERS = [torch.bool, *SMALL_INTEGERS, torch.int64, torch.uint64]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
ONLY_COPIED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
NOT_GLOOS = [torch.int16, torch.uint16, torch.uint32, torch.uint64, *ONLY_COPIED]

# Nothing, one, an odd number.
SIZES = [0, 1, 7]
# More than every rank adds up by itself.
MORE = 33_001
# In several chunks, the last of them short.
LONG = 1_100_001


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def sharing(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, timeout=60.0, backend="paceline") as pool:
        yield pool


@functools.cache
def gloo() -> Any:
    return distributed.new_group(backend="gloo")


def world() -> int:
    return distributed.get_world_size()


def some(dtype: torch.dtype, numel: int, rank: int, salt: int = 0) -> Tensor:
    """A rank's elements, which every rank can tell."""
    generator = torch.Generator().manual_seed(100 * numel + 10 * salt + rank)
    if dtype in INTEGERS:
        # Bytes at random: every sign, and every overflow.
        noise = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return noise.lt(128) if dtype is torch.bool else noise.view(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(torch.randn(numel, 2, generator=generator, dtype=dtype.to_real()))
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def with_gaps(tensor: Tensor) -> Tensor:
    """The same elements, not next to each other."""
    wide = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    wide[::2] = tensor
    return wide[::2]


LAYOUTS: list[Callable[[Tensor], Tensor]] = [lambda tensor: tensor.clone(), with_gaps]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def assert_bits(actual: Tensor, wanted: Tensor, what: object) -> None:
    assert torch.equal(bits(actual), bits(wanted)), f"{what}: {actual} is not {wanted}"


class Digest:
    """What a rank saw, for comparison with the others."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tensor: Tensor) -> None:
        self._hash.update(bytes(bits(tensor).numpy()))

    def __str__(self) -> str:
        return self._hash.hexdigest()


def both_ways(call: Callable[..., Any]) -> Iterator[Callable[..., None]]:
    """A call that is waited for, and one whose work is."""

    def later(*args: Any, **kwargs: Any) -> None:
        assert call(*args, **kwargs, async_op=True).wait()

    yield call
    yield later


# Reductions.


def defined(dtype: torch.dtype) -> list[Any]:
    if dtype in INTEGERS:
        everywhere = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
        return [*everywhere, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    if dtype.is_complex:
        return [ReduceOp.SUM, ReduceOp.AVG]
    return [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]


def combined(tensors: list[Tensor], op: Any) -> Tensor:
    """By Python's own numbers for integers, in double precision for others."""
    dtype = tensors[0].dtype
    if dtype not in INTEGERS:
        wide = torch.stack(
            [tensor.to(torch.complex128 if dtype.is_complex else torch.float64) for tensor in tensors]
        )
        folds = {
            ReduceOp.SUM: lambda: wide.sum(0),
            ReduceOp.AVG: lambda: wide.mean(0),
            ReduceOp.PRODUCT: lambda: wide.prod(0),
            ReduceOp.MIN: lambda: wide.amin(0),
            ReduceOp.MAX: lambda: wide.amax(0),
        }
        return folds[op]()
    steps = {
        ReduceOp.SUM: (lambda a, b: a | b) if dtype is torch.bool else (lambda a, b: a + b),
        ReduceOp.PRODUCT: lambda a, b: a * b,
        ReduceOp.MIN: min,
        ReduceOp.MAX: max,
        ReduceOp.BAND: lambda a, b: a & b,
        ReduceOp.BOR: lambda a, b: a | b,
        ReduceOp.BXOR: lambda a, b: a ^ b,
    }
    columns = zip(*(tensor.tolist() for tensor in tensors), strict=True)
    return torch.tensor(
        [wrapped(functools.reduce(steps[op], column), dtype) for column in columns], dtype=dtype
    )


def wrapped(number: int, dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return bool(number)
    low, span = torch.iinfo(dtype).min, 256**dtype.itemsize
    return (number - low) % span + low


def assert_combined(actual: Tensor, tensors: list[Tensor], op: Any, what: object) -> None:
    wanted = combined(tensors, op)
    if actual.dtype in INTEGERS:
        assert_bits(actual, wanted, what)
    else:
        real = actual.dtype.to_real() if actual.dtype.is_complex else actual.dtype
        room = 4 * torch.finfo(real).eps
        scale = max((tensor.abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)
        torch.testing.assert_close(
            actual.to(wanted.dtype), wanted, rtol=room, atol=room * scale, msg=lambda text: f"{what}: {text}"
        )


def assert_as_gloos(actual: Tensor, run: Callable[..., None], start: Tensor, what: object) -> None:
    """gloo takes no notice of strides, so it gets its own contiguous tensor."""
    if start.dtype not in NOT_GLOOS:
        theirs = start.clone()
        run(theirs, group=gloo())
        if actual.dtype in INTEGERS:
            assert_bits(actual, theirs, f"{what}, against gloo")
        else:
            torch.testing.assert_close(actual.contiguous(), theirs, rtol=2e-2, atol=2e-2)


def reduced(rank: int, dtype: torch.dtype) -> str:
    digest = Digest()
    for op in defined(dtype):
        for number, size in enumerate([*SIZES, MORE] if dtype is torch.float32 else SIZES):
            everyone = [some(dtype, size, other) for other in range(world())]
            run = functools.partial(distributed.all_reduce, op=op)
            for layout in LAYOUTS:
                for call in both_ways(run):
                    own, what = layout(everyone[rank]), (dtype, op, size)
                    call(own)
                    assert_combined(own, everyone, op, what)
                    digest.add(own)
            assert_as_gloos(own, run, everyone[rank], what)
            root = number % world()
            own = with_gaps(everyone[rank])
            distributed.reduce(own, root, op)
            if rank == root:
                assert_combined(own, everyone, op, ("reduce", *what))
            else:
                assert_bits(own, everyone[rank], "reduce changes nothing elsewhere")
    return str(digest)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
def test_reductions_are_right_and_the_same_on_every_rank(sharing: RankPool, dtype: torch.dtype) -> None:
    assert len(set(sharing.run(reduced, dtype))) == 1


def reduced_and_scattered(rank: int, dtype: torch.dtype) -> None:
    for op in defined(dtype):
        for size in [*SIZES, MORE] if dtype is torch.float32 else SIZES:
            sent = [[some(dtype, size, other, to) for to in range(world())] for other in range(world())]
            wanted = [sent[other][rank] for other in range(world())]
            for layout in LAYOUTS:
                for call in both_ways(functools.partial(distributed.reduce_scatter, op=op)):
                    own = layout(torch.zeros(size, dtype=dtype))
                    call(own, [layout(tensor) for tensor in sent[rank]])
                    assert_combined(own, wanted, op, ("reduce_scatter", dtype, op, size))
                for call in both_ways(functools.partial(reduce_scatter_single, op=op)):
                    own = layout(torch.zeros(size, dtype=dtype))
                    call(own, layout(torch.cat(sent[rank])))
                    assert_combined(own, wanted, op, ("reduce_scatter_single", dtype, op, size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint16], ids=str)
def test_reductions_are_scattered(sharing: RankPool, dtype: torch.dtype) -> None:
    sharing.run(reduced_and_scattered, dtype)


def long_ones(rank: int) -> str:
    digest = Digest()
    everyone = [some(torch.float32, LONG, other) for other in range(world())]
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        own = everyone[rank].clone()
        distributed.all_reduce(own, op)
        assert_combined(own, everyone, op, op)
        digest.add(own)
    gathered = torch.empty(world() * LONG)
    all_gather_single(gathered, some(torch.float32, LONG, rank))
    part = torch.empty(LONG)
    reduce_scatter_single(part, gathered)
    assert_bits(part, world() * some(torch.float32, LONG, rank), "gathered and scattered")
    digest.add(gathered)
    distributed.broadcast(part, 1)
    digest.add(part)
    return str(digest)


def test_long_tensors_go_in_chunks(sharing: RankPool) -> None:
    assert len(set(sharing.run(long_ones))) == 1


def multiplied_before(rank: int) -> None:
    own = with_gaps(torch.full((5,), rank + 1.0))
    distributed.all_reduce(own, distributed._make_nccl_premul_sum(2.0 + rank))
    assert own.tolist() == [sum((r + 1.0) * (2.0 + r) for r in range(world()))] * 5


def test_a_factor_of_each_ranks_own(sharing: RankPool) -> None:
    sharing.run(multiplied_before)


def undefined(_: int) -> None:
    for dtype, op in [
        (torch.int32, ReduceOp.AVG),
        (torch.float32, ReduceOp.BAND),
        (torch.float8_e5m2, ReduceOp.SUM),
    ]:
        with pytest.raises(RuntimeError):
            distributed.all_reduce(torch.zeros(4).to(dtype), op)
    distributed.barrier()


def test_what_is_defined_nowhere_raises_as_gloo_does(sharing: RankPool) -> None:
    sharing.run(undefined)


# Copies.


def copied(rank: int, dtype: torch.dtype) -> None:
    size = world()
    for numel in [*SIZES, MORE] if dtype is torch.int8 else SIZES:
        everyone = [some(dtype, numel, other) for other in range(size)]
        parts = [[some(dtype, numel, other, to) for to in range(size)] for other in range(size)]
        root = numel % size
        for layout in LAYOUTS:

            def blanks(count: int = size, make: Any = layout, numel: int = numel) -> list[Tensor]:
                return [make(torch.zeros(numel, dtype=torch.uint8).to(dtype)) for _ in range(count)]

            own = layout(everyone[rank])
            for call in both_ways(distributed.broadcast):
                [got] = [layout(everyone[rank])]
                call(got, root)
                assert_bits(got, everyone[root], ("broadcast", dtype, numel))
            for call in both_ways(distributed.all_gather):
                got = blanks()
                call(got, own)
                assert_bits(torch.stack(got), torch.stack(everyone), ("all_gather", dtype, numel))
            for call in both_ways(all_gather_single):
                got = layout(torch.cat(blanks()))
                call(got, own)
                assert_bits(got, torch.cat(everyone), ("all_gather_single", dtype, numel))
            for call in both_ways(distributed.gather):
                got = blanks()
                call(own, got if rank == root else None, root)
                if rank == root:
                    assert_bits(torch.stack(got), torch.stack(everyone), ("gather", dtype, numel))
            for call in both_ways(distributed.scatter):
                [got] = blanks(1)
                call(got, [layout(part) for part in parts[root]] if rank == root else None, root)
                assert_bits(got, parts[root][rank], ("scatter", dtype, numel))
            wanted = torch.stack([parts[other][rank] for other in range(size)])
            for call in both_ways(distributed.all_to_all):
                got = blanks()
                call(got, [layout(part) for part in parts[rank]])
                assert_bits(torch.stack(got), wanted, ("all_to_all", dtype, numel))
            for call in both_ways(distributed.all_to_all_single):
                got = layout(torch.cat(blanks()))
                call(got, layout(torch.cat(parts[rank])))
                assert_bits(got, wanted, ("all_to_all_single", dtype, numel))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX, *ONLY_COPIED], ids=str)
def test_copies_are_exact(sharing: RankPool, dtype: torch.dtype) -> None:
    sharing.run(copied, dtype)


def uneven(rank: int) -> None:
    size = world()
    # Rank r sends (r + 2 * to) rows to a rank; rank 0 sends nothing to itself.
    counts = [[r + 2 * to for to in range(size)] for r in range(size)]
    sent = [torch.full((sum(counts[r]), 3), float(r)) for r in range(size)]
    theirs = [counts[other][rank] for other in range(size)]
    wanted = torch.cat([torch.full((count, 3), float(other)) for other, count in enumerate(theirs)])
    for call in both_ways(distributed.all_to_all_single):
        got = torch.zeros(sum(theirs), 3)
        call(got, sent[rank], theirs, counts[rank])
        assert_bits(got, wanted, "with split sizes")
    for call in both_ways(distributed.all_to_all):
        got = [torch.zeros(count, 3) for count in theirs]
        call(got, list(sent[rank].split(counts[rank])))
        assert_bits(torch.cat(got), wanted, "of lists")


def test_ranks_send_as_much_as_they_like(sharing: RankPool) -> None:
    sharing.run(uneven)


def coalesced(rank: int) -> None:
    numbers = [torch.full((n,), rank + 1.0) for n in (1, 0, 5)]
    total = sum(range(1, world() + 1))
    with distributed._coalescing_manager(async_ops=True) as manager:
        for tensor in numbers:
            distributed.all_reduce(tensor)
    manager.wait()
    assert [tensor.tolist() for tensor in numbers] == [[total] * n for n in (1, 0, 5)]
    gathered = [torch.zeros(world() * n) for n in (1, 5)]
    with distributed._coalescing_manager():
        for out, n in zip(gathered, (1, 5), strict=True):
            all_gather_single(out, torch.full((n,), float(rank)))
    for out, n in zip(gathered, (1, 5), strict=True):
        assert out.view(world(), n)[:, 0].tolist() == list(range(world()))
    parts = [torch.zeros(n) for n in (1, 5)]
    with distributed._coalescing_manager():
        for out, whole in zip(parts, gathered, strict=True):
            reduce_scatter_single(out, whole)
    assert [part[0].item() for part in parts] == [rank * world()] * 2


def test_several_in_one_call(sharing: RankPool) -> None:
    sharing.run(coalesced)
