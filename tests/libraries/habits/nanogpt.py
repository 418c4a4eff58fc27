"""nanoGPT's habits: compiled before it is wrapped, resumed with the prefix that compiling adds, a flag of the
wrapper switched in the accumulation loop instead of ``no_sync``, evaluation through it on rank 0 alone.

    nanogpt.py FOLDER [--steps N] [--resume] [--compile]
"""

import argparse
import os
from pathlib import Path

import torch
from tiny_gpt import LENGTH, TinyGPT, text
from torch import Tensor
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--compile", action="store_true")
options = parser.parse_args()
accumulated, eval_every, rate = 4, 3, 1e-2

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert accumulated % world == 0
    accumulated //= world
else:
    rank = 0
is_master = rank == 0
torch.manual_seed(1337 + rank)
data = {"train": text(400), "val": text(500)[400:]}


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data[split]) - LENGTH, (4,))
    rows = torch.stack([data[split][start : start + LENGTH + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


model = TinyGPT()
step, best = 0, 1e9
checkpoint = torch.load(options.folder / "ckpt.pt") if options.resume else None
if checkpoint is not None:
    state = checkpoint["model"]
    for name in [*state]:
        if name.startswith("_orig_mod."):
            state[name.removeprefix("_orig_mod.")] = state.pop(name)
    model.load_state_dict(state)
    step, best = checkpoint["step"], checkpoint["best"]
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.optimizer(rate)
if checkpoint is not None:
    optimizer.load_state_dict(checkpoint["optimizer"])
checkpoint = None
if options.compile:
    model = torch.compile(model, backend="aot_eager")  # without a compiler; what is wrapped is the same
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    model.eval()
    found = {split: sum(model(*get_batch(split))[1].item() for _ in range(2)) / 2 for split in data}
    model.train()
    return found


batch = get_batch("train")
while True:
    for group in optimizer.param_groups:
        group["lr"] = rate * 0.9**step
    if step % eval_every == 0 and is_master:
        best = min(best, estimate_loss()["val"])
        saved = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "best": best,
        }
        torch.save(saved, options.folder / "ckpt.pt")
    if step == options.steps:
        break
    for micro_step in range(accumulated):
        if ddp:
            model.require_backward_grad_sync = micro_step == accumulated - 1
        _, loss = model(*batch)
        batch = get_batch("train")  # while the backward of an accelerator would run
        scaler.scale(loss / accumulated).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    step += 1
if ddp:
    destroy_process_group()
