"""A language model of the kind that nanoGPT and minGPT train, and text for it; small enough for a test."""

import torch
from torch import Tensor, nn

WORDS, LENGTH, WIDTH, HEADS = 32, 12, 24, 2


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class TinyGPT(nn.Module):
    """Its word embedding is also its last layer, as in nanoGPT."""

    def __init__(self, *, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, text: Tensor, wanted: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.words(text) + self.positions(torch.arange(text.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        if wanted is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        """Weights decay, vectors do not."""
        parameters = [*self.parameters()]
        groups = [
            {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def text(length: int) -> Tensor:
    """Words that follow each other by a rule, most of the time."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randint(WORDS, (length,), generator=generator)
    ruled = (torch.arange(length) * 5) % WORDS
    return torch.where(torch.rand(length, generator=generator) < 0.2, noise, ruled)
