"""Train EAGLE-3's head for SmolLM2 on millions of tokens of its answers, many sequences at a time, on a GPU.

The loss is that of `foredraft train eagle3`: soft cross entropy against the target's distribution at several steps of a
draft. Features are computed by a bare forward pass of the target in the step that needs them. The learning rate follows
the clock, so that training uses the given time completely. The head is written at every measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from answers import EOS, LAYER, Weights, forward, rows_of
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from foredraft import zoo
from foredraft.heads.checkpoint import write_checkpoint
from foredraft.heads.eagle import EagleHead, EagleShape, default_streams
from foredraft.heads.eagle_layouts import write_eagle
from foredraft.heads.layers import LayerShape
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.train.examples import Example
from foredraft.train.head_recipes import unrolled
from foredraft.train.losses import DistilledOutput
from foredraft.train.recipe import TargetParts, Texts
from foredraft.train.start import begin_as

VOCABULARY_SIZE = 49_152


@dataclass(frozen=True)
class Text:
    token_ids: list[int]
    first: int
    temperature: float

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.first + 2]

    @property
    def num_drafts(self) -> int:
        return len(self.token_ids) - 2 - self.first

    @property
    def example(self) -> Example:
        return Example(tuple(self.token_ids), self.first + 2, "")


class Training:
    """A head, the target whose drafts it learns, and losses of batches."""

    def __init__(self, head: EagleHead, weights: Weights, num_steps: int, decay: float, autocast: bool) -> None:
        self.head, self.weights, self.num_steps, self.decay, self.autocast = head, weights, num_steps, decay, autocast
        device = weights.norm.device
        vocabulary = head.vocabulary or DraftVocabulary.full(VOCABULARY_SIZE)
        self.kept = vocabulary.rows_of_layer(weights.embedding)
        self.t2d = vocabulary.t2d.to(device)

    def losses(self, batch: list[Text]) -> tuple[Tensor, Tensor, list[Tensor], Texts]:
        """Loss by draft of the first step, sums of losses by step, by step whether every draft was right, and which."""
        device = self.weights.norm.device
        texts = Texts.of([text.example for text in batch], self.num_steps, device)
        assert texts is not None  # all have four drafts or more
        with torch.no_grad():
            positions = torch.arange(texts.token_ids.shape[1], device=device).expand(len(batch), -1)
            last, layers = forward(self.weights, texts.token_ids, positions, wanted=self.head.shape.layer_inputs)
            last = F.rms_norm(last, self.weights.norm.shape, self.weights.norm, self.weights.eps)
            target_logits = texts.after(last, 1)[texts.places[0]] @ self.kept.T
            embedded = F.embedding(texts.token_ids, self.weights.embedding)
            streams = torch.cat([layers[layer] for layer in self.head.shape.streams], dim=-1)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            fused = self.head.features(streams.to(self.head.dtype))
            steps = unrolled(self.head, fused, embedded.to(self.head.dtype), texts.entries, self.num_steps)
            parts = [self.head.before_output(out[places]) for out, places in zip(steps, texts.places, strict=True)]
            by_place, is_right = DistilledOutput.apply(
                torch.cat(parts), self.kept, target_logits, torch.cat(texts.target_rows)
            )
        is_drafted = self.t2d[torch.cat(texts.tokens)]
        by_step = [part.sum() for part in (by_place * is_drafted).split(texts.counts)]
        right = list((is_right & is_drafted).split(texts.counts))
        loss = sum(self.decay**step * part for step, part in enumerate(by_step)) / texts.counts[0]
        return loss, torch.stack([part.detach() for part in by_step]), right, texts


def as_chain(batch: Texts, right: list[Tensor]) -> list[int]:
    """How many drafts of the first step were right up to each depth."""
    held = torch.zeros(batch.entries.numel(), dtype=torch.bool, device=batch.entries.device)
    found = []
    for step, (places, hits) in enumerate(zip(batch.places, right, strict=True)):
        now = torch.zeros_like(held)
        now[places] = hits
        held = now if step == 0 else held & now
        found.append(int(held.sum()))
    return found


def target_parts(path: Path) -> TargetParts:
    found = load_file(path / "model.safetensors")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    layers = [
        {name: found[f"model.layers.{number}.{name}.weight"] for name in LAYER}
        for number in range(config.num_hidden_layers)
    ]
    embedding = found["model.embed_tokens.weight"]
    return TargetParts(
        name="zoo:smollm2",
        embedding=embedding,
        output=embedding,
        norm=found["model.norm.weight"],
        num_layers=config.num_hidden_layers,
        layer=LayerShape.of(config),
        eos_token_ids=(EOS,),
        layer_tensors=layers.__getitem__,
        context=config.max_position_embeddings,
    )


def new_head(options: argparse.Namespace, texts: list[Text], target: TargetParts) -> EagleHead:
    counts = Counter(token for text in texts for token in text.token_ids[text.first + 2 :])
    vocabulary = DraftVocabulary.most_frequent(counts, options.vocabulary, VOCABULARY_SIZE, always=(EOS,))
    covered = sum(counts[token] for token in vocabulary.target_ids.tolist()) / sum(counts.values())
    print(f"{len(vocabulary)} tokens that can be drafted are {covered:.4f} of those of the answers", flush=True)
    shape = EagleShape(
        generation=3,
        layer=replace(target.layer, intermediate_size=options.intermediate),
        target_size=target.hidden_size,
        streams=tuple(options.streams) if options.streams else default_streams(target.num_layers),
        num_layers_of_target=target.num_layers,
        num_layers=options.num_layers,
        shares_output=True,
    )
    head = EagleHead(shape, vocabulary)
    begin_as(head, target)
    return head


def is_held_out(prompt: list[int]) -> bool:
    """One prompt in 128, by its tokens."""
    return hash(tuple(prompt[:-2])) % 128 == 0


def texts_of(file: Path) -> list[Text]:
    data = np.load(file)
    found = []
    for prompt, answer, heat in zip(
        rows_of(data, "prompt"), rows_of(data, "answer"), data["temperatures"], strict=True
    ):
        text = Text(prompt + answer, len(prompt) - 2, float(heat))
        if text.num_drafts >= 4:
            found.append(text)
    return found


def batches(texts: list[Text], size: int, rng: random.Random) -> Iterator[list[Text]]:
    """Batches of about so many drafts, of texts of like lengths, without an end."""
    while True:
        order = list(texts)
        rng.shuffle(order)
        ready = []
        for start in range(0, len(order), 8192):
            pool = sorted(order[start : start + 8192], key=lambda text: (len(text.token_ids) // 96, text.num_drafts))
            batch: list[Text] = []
            for text in pool:
                batch.append(text)
                longest = max(len(one.token_ids) for one in batch) * len(batch)
                if sum(one.num_drafts for one in batch) >= size or longest >= 4 * size:
                    ready.append(batch)
                    batch = []
            if batch:
                ready.append(batch)
        rng.shuffle(ready)
        yield from ready


def measured(training: Training, held_out: list[list[Text]]) -> dict[str, Any]:
    """Agreement by depth on held-out texts; as a chain on greedy ones, with the tokens of a step."""
    losses, hits, counts, chain, drafts = (torch.zeros(training.num_steps, dtype=torch.float64) for _ in range(5))
    with torch.no_grad():
        for texts in held_out:
            _, by_step, right, batch = training.losses(texts)
            losses += by_step.double().cpu()
            hits += torch.tensor([float(part.sum()) for part in right])
            counts += torch.tensor([float(len(part)) for part in right])
            if texts[0].temperature == 0:
                chain += torch.tensor([float(count) for count in as_chain(batch, right)])
                drafts += sum(text.num_drafts for text in texts)
    return {
        "loss_by_depth": [round(x, 4) for x in (losses / counts).tolist()],
        "agreement_by_depth": [round(x, 4) for x in (hits / counts).tolist()],
        "greedy_chain": [round(x, 4) for x in (chain / drafts).tolist()],
        "tokens_per_step": round(1 + float((chain / drafts).sum()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--answers", type=Path, required=True, help="of answers.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of training; the rate falls to their end")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--num-layers", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--decay", type=float, default=0.8)
    parser.add_argument("--streams", type=int, nargs="*", default=())
    parser.add_argument("--batch", type=int, default=8192, help="drafts of a step")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=float, default=0.03)
    parser.add_argument("--floor", type=float, default=0.01)
    parser.add_argument("--measurements", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    texts = texts_of(options.answers)
    kept_out = [text for text in texts if is_held_out(text.prompt)]
    texts = [text for text in texts if not is_held_out(text.prompt)]
    held_out = [
        part[i : i + 16]
        for part in ([t for t in kept_out if t.temperature == 0], [t for t in kept_out if t.temperature > 0])
        for i in range(0, len(part), 16)
    ]
    path = Path(zoo.path("smollm2"))
    weights = Weights.load(device, torch.bfloat16)
    head = new_head(options, texts, target_parts(path)).to(device)
    training = Training(head, weights, options.num_steps, options.decay, autocast=True)
    parameters = list(head.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.01},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=options.rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    print(
        f"{len(texts)} texts, {sum(t.num_drafts for t in texts)} drafts, {head.num_parameters} parameters", flush=True
    )
    begun, num_drafts, history = time.monotonic(), 0, []
    due = 1 / options.measurements
    for num_steps, batch_texts in enumerate(batches(texts, options.batch, rng)):
        share = (time.monotonic() - begun) / options.seconds
        if share >= due or share >= 1:
            entry = {"seconds": round(time.monotonic() - begun, 1), "steps": num_steps, "drafts": num_drafts}
            entry |= measured(training, held_out)
            history.append(entry)
            print(json.dumps(entry), flush=True)
            save(options, head, history)
            due += 1 / options.measurements
            if share >= 1:
                break
        rate = options.rate * min(1.0, max(share, 1e-3) / options.warmup)
        if share > options.warmup:
            left = (1 - share) / (1 - options.warmup)
            rate = options.rate * (options.floor + (1 - options.floor) * (1 - math.cos(math.pi * left)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, *_ = training.losses(batch_texts)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_drafts += sum(text.num_drafts for text in batch_texts)
        if num_steps % 200 == 199 and not math.isfinite(float(loss.detach())):
            raise SystemExit(f"the loss is {float(loss.detach())} at step {num_steps}")


def save(options: argparse.Namespace, head: EagleHead, history: list[dict[str, Any]]) -> None:
    config, tensors = write_eagle(head, "zoo:smollm2")
    halved = {key: value.bfloat16() if value.is_floating_point() else value for key, value in tensors.items()}
    facts = {"first_token_acceptance": round(history[-1]["agreement_by_depth"][0], 2)}
    write_checkpoint(options.out, {**config, **facts}, {key: value.cpu().contiguous() for key, value in halved.items()})
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    (options.out / "history.json").write_text(json.dumps({"settings": settings, "history": history}, indent=1) + "\n")


if __name__ == "__main__":
    main()
