"""Accelerate and transformers' Trainer with our class in the place of torch's, and beside it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from launched import as_torchrun_tells
from torch import Tensor, nn
from torch.utils.data import DataLoader
from wrappers import WRAPPERS, assert_equal_bits, everyones

from paceline import DistributedDataParallel
from paceline.testing import RankPool

# The libraries are imported in the ranks alone: they take seconds, and every test process would pay them.

TORCHS = nn.parallel.DistributedDataParallel


@contextlib.contextmanager
def started(rank: int, wrapper: str = "torch") -> Iterator[None]:
    """As a launcher starts a rank; with ``--patch`` if the wrapper is ours."""
    from accelerate.state import AcceleratorState

    as_torchrun_tells(rank)
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(nn.parallel, "DistributedDataParallel", WRAPPERS[wrapper]):
        yield


def values(network: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in network.parameters()]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def loader() -> DataLoader[Any]:
    return DataLoader(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]


def an_epoch(accelerator: Any, model: nn.Module, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def accelerated(rank: int, wrapper: str, hook: str, folder: Path) -> list[Tensor]:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType, extract_model_from_parallel

    with started(rank, wrapper):
        options = DistributedDataParallelKwargs(
            comm_hook=DDPCommunicationHookType[hook], gradient_as_bucket_view=True
        )
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[options])
        net = network()
        prepared = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.1), loader())
        model = prepared[0]
        assert type(model) is WRAPPERS[wrapper]
        an_epoch(accelerator, *prepared)
        accelerator.save_state(str(folder / wrapper))
        an_epoch(accelerator, *prepared)
        whole = values(net)
        accelerator.load_state(str(folder / wrapper))
        assert not torch.equal(values(net)[0], whole[0])
        an_epoch(accelerator, *prepared)
        assert_equal_bits(values(net), whole)
        with accelerator.no_sync(model):
            mine = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
            accelerator.backward(model(mine).square().mean())
        first, second = everyones(net[0].weight.grad.clone())
        assert not torch.equal(first, second)
        assert accelerator.unwrap_model(model) is extract_model_from_parallel(model) is net
        return whole


@pytest.mark.parametrize("hook", ["NO", "FP16"])
def test_accelerate_gives_the_same_parameters(pair: RankPool, hook: str, tmp_path: Path) -> None:
    theirs, ours = (pair.run(accelerated, wrapper, hook, tmp_path) for wrapper in ("torch", "paceline"))
    assert_equal_bits(ours[0], theirs[0])
    assert_equal_bits(ours[0], ours[1])


def wrapped_before(rank: int) -> None:
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

    found = []
    for wrapped in (False, True):
        with started(rank):
            accelerator = Accelerator(cpu=True)
            net = network()
            model = DistributedDataParallel(net) if wrapped else net
            assert isinstance(model, TORCHS) is wrapped
            prepared = accelerator.prepare(model, torch.optim.Adam(net.parameters(), lr=0.1), loader())
            an_epoch(accelerator, *prepared)
            assert accelerator.unwrap_model(prepared[0]) is extract_model_from_parallel(model) is net
            found.append(values(net))
    assert_equal_bits(*found)


def test_a_model_that_is_wrapped_already_can_be_prepared(pair: RankPool) -> None:
    pair.run(wrapped_before)


def triggered(rank: int, wrapper: str) -> list[list[Tensor]]:
    from accelerate import Accelerator

    with started(rank, wrapper):
        accelerator = Accelerator(cpu=True)
        net = network()
        model, batches = accelerator.prepare(net, loader())
        with accelerator.no_sync(model):
            first, second = (
                model(batch).square().mean() for batch, _ in zip(batches, range(2), strict=False)
            )
        accelerator.backward(first)
        found = [[parameter.grad.clone() for parameter in net.parameters()]]
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        return [*found, [parameter.grad.clone() for parameter in net.parameters()]]


def test_a_sync_can_be_triggered_in_the_last_backward(pair: RankPool) -> None:
    theirs, ours = (pair.run(triggered, wrapper) for wrapper in ("torch", "paceline"))
    for rank in range(2):
        assert_equal_bits(ours[rank][0], theirs[rank][0])
        assert_equal_bits(ours[rank][1], theirs[rank][1])
    assert not torch.equal(ours[0][0][0], ours[1][0][0])
    assert_equal_bits(ours[0][1], ours[1][1])


WORDS, TEXTS, ASKED = 16, 32, 13


def texts(count: int) -> list[dict[str, Tensor]]:
    drawn = torch.randint(WORDS, (count, 8), generator=torch.Generator().manual_seed(count))
    return [{"input_ids": text, "labels": text} for text in drawn]


def right(predicted: Any) -> dict[str, float]:
    """How many predictions were gathered, and how many are right."""
    found = predicted.predictions.argmax(-1) == predicted.label_ids
    return {"count": len(found), "right": float(found.mean())}


def trainer(folder: Path, *, lora: bool = False, **options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=16, n_positions=8, vocab_size=WORDS, bos_token_id=0, eos_token_id=0
        )
    )
    if lora:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()  # peft's advice for checkpointing of a frozen model
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return Trainer(
        model,
        TrainingArguments(**settings | options),
        train_dataset=texts(TEXTS),
        eval_dataset=texts(ASKED),
        compute_metrics=right,
    )


def trained(rank: int, wrapper: str, folder: Path) -> tuple[list[Tensor], dict[str, float]]:
    from transformers.modeling_utils import unwrap_model

    def saving() -> Any:
        return trainer(folder / wrapper, save_strategy="steps", save_steps=3)

    with started(rank, wrapper):
        whole = saving()
        whole.train()
        assert type(whole.model_wrapped) is WRAPPERS[wrapper]
        assert unwrap_model(whole.model_wrapped) is whole.model
        resumed = saving()
        resumed.train(resume_from_checkpoint=str(folder / wrapper / "checkpoint-3"))
        assert_equal_bits(values(resumed.model), values(whole.model))
        return values(whole.model), whole.evaluate()


def test_the_trainer_gives_the_same_parameters_and_predictions(pair: RankPool, tmp_path: Path) -> None:
    theirs, ours = (pair.run(trained, wrapper, tmp_path) for wrapper in ("torch", "paceline"))
    for (mine, asked), (other, answer) in zip(ours, theirs, strict=True):
        assert_equal_bits(mine, other)
        for name in ("eval_loss", "eval_right", "eval_count"):
            assert asked[name] == answer[name], name
        assert asked["eval_count"] == ASKED


CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True, "gradient_accumulation_steps": 1}
RE_ENTRANT = CHECKPOINTED | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
NOT_RE_ENTRANT = CHECKPOINTED | {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
VARIANTS: dict[str, dict[str, Any]] = {
    "in bfloat16": {"bf16": True},
    "checkpointed": NOT_RE_ENTRANT,
    "checkpointed, re-entrant": RE_ENTRANT,
    "the wrapper's options": {
        "ddp_find_unused_parameters": True,
        "ddp_bucket_cap_mb": 1,
        "ddp_broadcast_buffers": False,
    },
    "clipped, Adafactor, smoothed": {
        "max_grad_norm": 0.1,
        "optim": "adafactor",
        "label_smoothing_factor": 0.1,
    },
    "LoRA": {"lora": True},
    "LoRA, checkpointed": NOT_RE_ENTRANT | {"lora": True},
}


def variant(rank: int, wrapper: str, folder: Path, options: dict[str, Any]) -> list[Tensor]:
    with started(rank, wrapper):
        found = trainer(folder, **options)
        before = values(found.model)
        found.train()
        assert type(found.model_wrapped) is WRAPPERS[wrapper]
        assert any(not torch.equal(*pair) for pair in zip(before, values(found.model), strict=True))
        return values(found.model)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_of_the_trainer_gives_the_same_parameters(
    pair: RankPool, name: str, tmp_path: Path
) -> None:
    theirs, ours = (pair.run(variant, wrapper, tmp_path, VARIANTS[name]) for wrapper in ("torch", "paceline"))
    assert_equal_bits(ours[0], theirs[0])
    assert_equal_bits(ours[1], ours[0])


def test_lora_with_re_entrant_checkpoints_needs_no_flag(pair: RankPool, tmp_path: Path) -> None:
    options = RE_ENTRANT | {"lora": True}
    # Without it, torch's wrapper raises that a parameter has been marked as ready twice.
    flag = {"ddp_find_unused_parameters": False}
    theirs = pair.run(variant, "torch", tmp_path, options | flag)
    ours = pair.run(variant, "paceline", tmp_path, options)
    assert_equal_bits(ours[0], theirs[0])
    assert_equal_bits(ours[1], ours[0])
