"""Train a small Llama on texts, with the trainer of foredraft: the target of zoo:tiny, or one of its shape.

    python examples/tiny_pair/target.py --texts TEXTS --init TARGET_DIR --out RUN --tokens 25000000

The texts are made by ``texts.py``. Started again with the same ``--out``, training continues from the newest checkpoint
and ends with the weights of an uninterrupted run. ``--from-scratch`` uses only the shape of ``--init``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

from foredraft.train.examples import Example
from foredraft.train.features import Streams
from foredraft.train.losses import Part, hard
from foredraft.train.trainer import Schedule, Trainer

MIXTURE = {
    "dialogue": 0.26,
    "gsm8k": 0.20,
    "books": 0.20,
    "tldr": 0.14,
    "stories": 0.08,
    "python": 0.07,
    "factbook": 0.05,
}
"""Share of blocks by source, so that the small sources see more passes."""


def no_features(examples: Sequence[Example]) -> list[Streams]:
    """A language model reads no target."""
    return [{} for _ in examples]


class LanguageModelRecipe:
    """Cross entropy against the next token of the text."""

    method = "language_model"

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.module: nn.Module = model
        self.layers: tuple[int, ...] = ()
        self.weights: tuple[float, ...] = (1.0,)

    def parts(self, examples: Sequence[Example], streams: Sequence[Streams]) -> list[Part]:
        ids = torch.tensor([example.token_ids for example in examples])  # of one length
        logits = self.module(input_ids=ids[:, :-1], use_cache=False).logits
        return [hard(logits.flatten(0, 1), ids[:, 1:].flatten())]

    def save(self, folder: Path, facts: dict[str, Any]) -> None:
        """Write the model in bfloat16."""
        copy = LlamaForCausalLM(self.module.config)
        copy.load_state_dict(self.module.state_dict())
        copy.generation_config = self.module.generation_config
        copy.to(torch.bfloat16).save_pretrained(folder)


def blocks(file: Path, tokenizer: Any, length: int) -> list[Example]:
    """The texts of a file one after the other, cut into blocks."""
    texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf8").splitlines()]
    ids = [token for found in tokenizer(texts, add_special_tokens=False)["input_ids"] for token in found]
    starts = range(0, len(ids) - length + 1, length)
    return [Example(tuple(ids[start : start + length]), 1, f"{file.stem} {start}") for start in starts]


def read(folder: Path, split: str, tokenizer: Any, length: int) -> dict[str, list[Example]]:
    """Blocks by source."""
    files = sorted(folder.glob(f"*.{split}.jsonl"))
    return {file.name.split(".")[0]: blocks(file, tokenizer, length) for file in files}


def mixed(by_source: dict[str, list[Example]], weights: dict[str, float], seed: int) -> list[Example]:
    """As many blocks as there are, by weight: of large sources a seeded choice, of small ones some twice or more."""
    known = {source: found for source, found in by_source.items() if found and source in weights}
    number, total = sum(map(len, known.values())), sum(weights[source] for source in known)
    chosen: list[Example] = []
    for source, found in known.items():
        wanted = round(number * weights[source] / total)
        turns = (random.Random(f"{seed} {source} {turn}") for turn in range(-(-wanted // len(found))))
        rounds = [turn.sample(found, len(found)) for turn in turns]
        chosen += [block for turn in rounds for block in turn][:wanted]
    return chosen


@torch.no_grad()
def held_out_loss(model: nn.Module, by_source: dict[str, list[Example]], count: int) -> dict[str, float]:
    """Nats per token of the first blocks of every source."""
    recipe, losses = LanguageModelRecipe(model), {}  # type: ignore[arg-type]
    for source, found in by_source.items():
        parts = [recipe.parts([block], [{}])[0] for block in found[:count]]
        if parts:
            losses[source] = float(sum(part.loss for part in parts)) / sum(part.num_places for part in parts)
    return losses


def train(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Records of steps and of losses on held-out text; the model lies in ``out/model`` in the end."""
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM.from_pretrained(options.init, dtype=torch.float32)
    if options.from_scratch:
        generation = model.generation_config
        model = LlamaForCausalLM(model.config)
        model.generation_config = generation
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.init)
    texts = {split: read(options.texts, split, tokenizer, options.length) for split in ("train", "valid")}
    schedule = Schedule(options.tokens, options.batch_tokens, options.learning_rate, clip=1.0, seed=options.seed)
    recipe = LanguageModelRecipe(model)
    trainer = Trainer(recipe, no_features, mixed(texts["train"], MIXTURE, options.seed), schedule, options.out)
    trainer.resume()
    saved = time.monotonic()
    for step in trainer.steps():
        record = asdict(step)
        if trainer.is_done or step.step % options.evaluate_every == 0:
            record["held_out"] = held_out_loss(model, texts["valid"], options.held_out_blocks)
        if trainer.is_done or time.monotonic() - saved > options.save_seconds:
            trainer.save()
            saved = time.monotonic()
        yield record
    recipe.save(options.out / "model", {})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--init", type=Path, required=True, help="weights to start from, or the shape alone")
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=25_000_000)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps")
    parser.add_argument("--held-out-blocks", type=int, default=16, help="of every source")
    parser.add_argument("--save-seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for record in train(options):
        with (options.out / "metrics.jsonl").open("a", encoding="utf8") as lines:
            lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
