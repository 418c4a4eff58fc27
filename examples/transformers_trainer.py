"""Train a small language model with transformers' Trainer; nothing in here is specific to paceline.

paceline run --patch -n 2 examples/transformers_trainer.py [--save FILE]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORDS = 64


def texts(count: int) -> list[dict[str, Tensor]]:
    """Texts that count up from a random word."""
    first = torch.randint(WORDS, (count, 1), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": text, "labels": text} for text in (first + torch.arange(16)) % WORDS]


def trainer(folder: str, epochs: int) -> Trainer:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=WORDS, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=texts(128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(";")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="save the model's parameters here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        training = trainer(folder, arguments.epochs)
        training.train()
    if arguments.save and training.is_world_process_zero():
        torch.save(training.model.state_dict(), arguments.save)


if __name__ == "__main__":
    main()
