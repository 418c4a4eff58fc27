"""A small language model on text made on the spot: what a training between hosts is measured with."""

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

CONTEXT = 64
BATCH = 8
WIDTH = 128
_LETTERS = "abcdefghijklmnopqrstuvwxyz .,\n"


def make_text(characters: int, *, seed: int) -> str:
    """Sentences of made-up words, of which some are much more frequent than others."""
    words = _words(random.Random(0))  # noqa: S311 - the language is the same for every seed
    draw = random.Random(seed)  # noqa: S311
    weights = [1 / (rank + 1) for rank in range(len(words))]
    text: list[str] = []
    length = 0
    while length < characters:
        chosen = draw.choices(words, weights, k=draw.randint(4, 12))
        # A word follows another that begins like it ends more often, so that there is something to learn.
        chosen.sort(key=lambda word: (word[0], draw.random()) if draw.random() < 0.5 else ("", draw.random()))
        sentence = " ".join(chosen) + draw.choice([". ", ".\n", ", "])
        text.append(sentence)
        length += len(sentence)
    return "".join(text)[:characters]


def _words(draw: random.Random) -> list[str]:
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    return ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(300)]


def encode(text: str) -> Tensor:
    """Each character as a number."""
    numbers = {letter: number for number, letter in enumerate(_LETTERS)}
    return torch.tensor([numbers[letter] for letter in text])


class LanguageModel(nn.Module):
    """A transformer that says which character comes next."""

    def __init__(self, layers: int = 2, width: int = WIDTH) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(_LETTERS), width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(_LETTERS))
        mask = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, letters: Tensor) -> Tensor:
        hidden = self.letters(letters) + self.places.weight
        result: Tensor = self.out(self.body(hidden, mask=self.mask, is_causal=True))
        return result


def batches(text: Tensor, *, seed: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A rank's batches, without end."""
    generator = torch.Generator().manual_seed(1_000 * seed + rank)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def test_loss(model: nn.Module, text: Tensor) -> float:
    """The mean loss over a text."""
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    losses = [loss_of(model, part[:, :-1], part[:, 1:]) * len(part) for part in rows.split(64)]
    return float(sum(losses)) / len(rows)
