"""Lightning's Trainer and Fabric with paceline's strategies: what "ddp" gives, and what it does not."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import as_torchrun_tells
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from wrappers import assert_equal_bits, equal_on_all

from paceline import MixedPrecision
from paceline.errors import MissingPackageError
from paceline.testing import RankPool

# Lightning is imported in the ranks alone: it takes seconds, and every test process would pay them.


def as_ddp(rank: int, net: str, strategy: str, options: dict[str, Any]) -> None:
    as_torchrun_tells(rank)
    import lightning_nets as nets

    theirs, ours = (
        nets.fit(rank, chosen, getattr(nets, net)(), **options) for chosen in (strategy, "paceline")
    )
    assert (theirs.wrapper, ours.wrapper) == ("torch.nn.parallel.distributed", "paceline.ddp.wrapper")
    assert_equal_bits(ours.values(), theirs.values())
    assert equal_on_all(ours.values())
    start = getattr(nets, net)().values()
    assert not torch.equal(ours.values()[0], start[0])


@pytest.mark.parametrize(
    ("net", "strategy", "options"),
    [
        ("Net", "ddp", {}),
        ("Net", "ddp", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        ("ByHand", "ddp", {}),
        ("Adversaries", "ddp_find_unused_parameters_true", {}),
        ("Net", "ddp", {"callback": "SWA", "max_epochs": 3}),
        ("Net", "ddp", {"callback": "EMA"}),
        ("Net", "ddp", {"precision": "bf16-mixed"}),
        ("Normed", "ddp", {}),
    ],
    ids=[
        "plain",
        "accumulated and clipped",
        "backward by hand",
        "GAN",
        "SWA",
        "EMA",
        "bfloat16",
        "batch norm",
    ],
)
def test_parameters_are_those_of_ddp(
    pair: RankPool, net: str, strategy: str, options: dict[str, Any]
) -> None:
    pair.run(as_ddp, net, strategy, options)


def with_a_spare_layer(rank: int) -> None:
    as_torchrun_tells(rank)
    import lightning_nets as nets

    with pytest.raises(RuntimeError, match="not used in producing the loss"):
        nets.fit(rank, "ddp", nets.Net(spare=True))
    plain, spare = nets.fit(rank, "paceline", nets.Net()), nets.fit(rank, "paceline", nets.Net(spare=True))
    assert_equal_bits(spare.values()[:4], plain.values())


def test_a_layer_that_is_not_used_needs_no_flag(pair: RankPool) -> None:
    pair.run(with_a_spare_layer)


ROWS = [[2, 5, 1, 4], [6, 1, 3, 2]]


def weighed(rank: int) -> list[Tensor]:
    as_torchrun_tells(rank)
    import lightning_nets as nets

    from paceline.integrations.lightning import PacelineStrategy

    strategy = PacelineStrategy(weigh=len, transport="c10d")
    return nets.fit(rank, strategy, nets.Net(), ROWS[rank], accumulate_grad_batches=2).values()


def of_one_process(_: int) -> list[Tensor]:
    import lightning_nets as nets

    net = nets.Net()
    optimizer = net.configure_optimizers()
    data = [nets.Batches(rank, rows).batches for rank, rows in enumerate(ROWS)]
    for step in range(2):
        optimizer.zero_grad()
        net.layers(
            torch.cat([batch for rank in data for batch in rank[2 * step : 2 * step + 2]])
        ).square().mean().backward()
        optimizer.step()
    return net.values()


def test_weighed_batches_count_by_their_rows(pair: RankPool) -> None:
    ours, wanted = pair.run(weighed)[0], pair.run(of_one_process)[0]
    for mine, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def with_options(rank: int) -> None:
    as_torchrun_tells(rank)
    import lightning_nets as nets

    from paceline.integrations.lightning import PacelineStrategy

    plain = nets.fit(rank, "paceline", nets.Net()).values()
    for options in (
        {"ddp_comm_hook": fp16_compress_hook},
        {"mixed_precision": MixedPrecision(param_dtype=torch.float32)},
    ):
        lower = nets.fit(rank, PacelineStrategy(**options), nets.Net()).values()
        assert not torch.equal(lower[0], plain[0]), options
        torch.testing.assert_close(lower, plain, rtol=0.01, atol=0.01)

    by_hand = [
        nets.fit(rank, PacelineStrategy(static_graph=static), nets.ByHand()) for static in (False, True)
    ]
    assert_equal_bits(*(net.values() for net in by_hand))


def test_options_reach_the_wrapper(pair: RankPool) -> None:
    pair.run(with_options)


def resumed(rank: int, folder: Path) -> None:
    as_torchrun_tells(rank)
    import lightning_nets as nets
    from torch.utils.data import DataLoader

    whole = nets.fit(rank, "paceline", nets.Net(), max_epochs=2).values()
    for first, second in (("paceline", "ddp"), ("ddp", "paceline")):
        half = nets.trainer(first)
        half.fit(nets.Net(), DataLoader(nets.Batches(rank, [3] * nets.BATCHES), batch_size=None))
        half.save_checkpoint(folder / f"{first}.ckpt")
        net = nets.fit(rank, second, nets.Net(), max_epochs=2, resume=folder / f"{first}.ckpt")
        assert_equal_bits(net.values(), whole)


def test_a_checkpoint_is_resumed_by_either_strategy(pair: RankPool, tmp_path: Path) -> None:
    pair.run(resumed, tmp_path)


def with_fabric(rank: int, strategy: str, folder: Path) -> list[Tensor]:
    as_torchrun_tells(rank)
    import lightning
    import lightning_nets as nets

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    network = nets.Net().layers
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.1))
    name = type(model._forward_module).__module__
    assert name == ("paceline.ddp.wrapper" if strategy == "paceline" else "torch.nn.parallel.distributed")
    for number, batch in enumerate(nets.Batches(rank, [3] * nets.BATCHES).batches):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(model(batch).square().mean())
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        if number == 3:
            fabric.save(folder / strategy, {"model": model, "optimizer": optimizer})
    values = [parameter.detach().clone() for parameter in network.parameters()]
    with torch.no_grad():
        network[0].weight.zero_()
    fabric.load(folder / strategy, {"model": model, "optimizer": optimizer})
    assert network[0].weight.any()
    return values


def test_fabric_gives_the_parameters_of_ddp(pair: RankPool, tmp_path: Path) -> None:
    theirs, ours = (pair.run(with_fabric, strategy, tmp_path) for strategy in ("ddp", "paceline"))
    assert_equal_bits(ours[0], theirs[0])
    assert_equal_bits(ours[1], ours[0])
    saved = [torch.load(tmp_path / strategy)["model"] for strategy in ("ddp", "paceline")]
    assert_equal_bits([*saved[1].values()], [*saved[0].values()])


def weighed_with_fabric(rank: int) -> None:
    as_torchrun_tells(rank)
    import lightning
    import lightning_nets as nets

    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="paceline")
    fabric.launch()
    network, alone = nets.Net().layers, nets.Net().layers
    model = fabric.setup_module(network)
    batches = [nets.Batches(each, [each + 1]).batches[0] for each in range(2)]
    with fabric.strategy.weigh(model, len(batches[rank])):
        fabric.backward(model(batches[rank]).square().mean())
    alone(torch.cat(batches)).square().mean().backward()
    torch.testing.assert_close(
        [parameter.grad for parameter in network.parameters()],
        [parameter.grad for parameter in alone.parameters()],
    )
    with pytest.raises(ValueError, match="model must be what fabric"):
        fabric.strategy.weigh(nn.Linear(1, 1), 2)


def test_fabric_weighs_too(pair: RankPool) -> None:
    pair.run(weighed_with_fabric)


@pytest.mark.timeout(200)  # a launch that imports the library, on a busy machine
def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "paceline.integrations.lightning", raising=False)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'paceline\[libraries\]'"):
        import paceline.integrations.lightning  # noqa: F401
