"""Gradient accumulation over sequences of different lengths, in which every token has the same weight.

paceline run -n 2 examples/token_weights.py

A step has several micro-batches per rank, each padded to its longest sequence. The loss of a micro-batch is
the mean over its tokens, so it is weighed by their number. Only the last backward of a step communicates. The
gradients are those of one process with the tokens of all ranks in one batch. For comparison, the plain mean
over micro-batches and ranks is shown too: in it, tokens of short sequences weigh more. All in float64, so
that only rounding differs.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from paceline import DistributedDataParallel

TOKENS = 50
PADDING = -1
MICRO_BATCHES = 4
SEQUENCES = 3  # per micro-batch


class NextToken(nn.Module):
    """Predicts the next token of a sequence from the tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(TOKENS, 16)
        self.memory = nn.GRU(16, 32, batch_first=True)
        self.guess = nn.Linear(32, TOKENS)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.memory(self.embedding(tokens.clamp_min(0)))
        guesses: Tensor = self.guess(states)
        return guesses


def sequences_of(rank: int) -> list[Tensor]:
    """The sequences of one rank in one step, of very different lengths."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(2, 40, (MICRO_BATCHES * SEQUENCES,), generator=generator)
    return [torch.randint(TOKENS, (int(length),), generator=generator) for length in lengths]


def mean_loss(model: nn.Module, sequences: list[Tensor]) -> tuple[Tensor, int]:
    """The mean loss over all tokens that are not padding, and their number."""
    padded = pad_sequence(sequences, batch_first=True, padding_value=PADDING)
    wanted = padded[:, 1:]
    guesses = model(padded[:, :-1])
    loss = nn.functional.cross_entropy(guesses.flatten(0, 1), wanted.flatten(), ignore_index=PADDING)
    return loss, int((wanted != PADDING).sum())


def accumulate(model: DistributedDataParallel, sequences: list[Tensor], *, by_tokens: bool) -> None:
    micro_batches = [sequences[at : at + SEQUENCES] for at in range(0, len(sequences), SEQUENCES)]
    for number, micro_batch in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        with nullcontext() if is_last else model.no_sync():
            loss, tokens = mean_loss(model, micro_batch)
            if by_tokens:
                model.backward(loss, weight=tokens)
            else:
                (loss / len(micro_batches)).backward()


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weighed, plain = (DistributedDataParallel(NextToken()) for _ in range(2))
    accumulate(weighed, sequences_of(rank), by_tokens=True)
    accumulate(plain, sequences_of(rank), by_tokens=False)
    alone = NextToken()
    loss, tokens = mean_loss(alone, [each for number in range(ranks) for each in sequences_of(number)])
    loss.backward()
    if rank == 0:
        right = gradient(alone)
        print(f"{tokens} tokens in {MICRO_BATCHES} micro-batches on each of {ranks} ranks")
        for name, model in (("weighed by tokens", weighed), ("plain mean", plain)):
            off = float((gradient(model) - right).norm() / right.norm())
            print(f"{name}: gradients are off those of one process by {off:.1e} of their norm")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
