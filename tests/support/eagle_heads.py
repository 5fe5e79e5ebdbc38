"""Heads of EAGLE that were overfitted to a toy target within seconds, so that drafts are accepted at every depth."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.heads.eagle import EagleHead, EagleShape, default_streams
from foredraft.heads.layers import AttentionContext, LayerShape
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, decode, toy_model
from trained import trained_once

VOCAB_SIZE, HIDDEN = 64, 32
NUM_UNROLLED = 6
LAYER = LayerShape(
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope={"rope_type": "default", "rope_theta": 10000.0},
)


@cache
def model() -> torch.nn.Module:
    return toy_model(VOCAB_SIZE)


@cache
def target() -> CausalLM:
    return CausalLM(model(), execution="eager")


@cache
def texts() -> tuple[tuple[int, ...], ...]:
    """Prompts with what plain decoding makes of them, greedy and sampled."""
    found = []
    for params in (GREEDY, SAMPLED):
        outputs = decode(target(), EmptyDrafter(), [(prompt, replace(params, max_tokens=24)) for prompt in PROMPTS])
        found += [(*PROMPTS[int(key.split(".")[0])], *output) for key, output in outputs.outputs.items()]
    return tuple(found)


class Unrolled:
    """Keys and values of steps of training, one block of columns after the other, with their gradients."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        if layer_idx in self.states:
            above = self.states[layer_idx]
            keys, values = torch.cat([above[0], keys], dim=2), torch.cat([above[1], values], dim=2)
        self.states[layer_idx] = keys, values
        return keys, values


def block_mask(size: int, step: int) -> Tensor:
    """What row t of a step of training sees: rows up to t of the first step, and itself of every later one."""
    first = torch.ones(size, size, dtype=torch.bool).tril()
    return torch.cat([first, *[torch.eye(size, dtype=torch.bool)] * step], dim=1)[None, None]


def streams_of(ids: Tensor, head: EagleHead, dtype: torch.dtype) -> Tensor:
    """What the head reads of the target after every token: (B, S, streams * H)."""
    with torch.no_grad():
        out = model().model(input_ids=ids, output_hidden_states=True, use_cache=False)
    parts = [
        out.last_hidden_state if layer == head.shape.num_layers_of_target else out.hidden_states[layer]
        for layer in head.shape.streams
    ]
    return torch.cat(parts, dim=-1).to(dtype)


def unrolled_outputs(head: EagleHead, ids: Tensor, num_steps: int, streams: Tensor | None = None) -> list[Tensor]:
    """Outputs (B, S, H) of steps 0, 1, ..: row t of step j is fed token t + 1 + j, at position t + j.

    Args:
      streams: see `streams_of`, where they are known.
    """
    rows, size = ids.shape
    dtype = head.dtype
    embedding = model().get_input_embeddings().weight.to(dtype)
    features = head.features(streams_of(ids, head, dtype) if streams is None else streams)
    cache = Unrolled()
    outputs = []
    for step in range(num_steps):
        shifted = torch.nn.functional.pad(ids[:, 1 + step :], (0, 1 + step))
        positions = torch.arange(size).expand(rows, -1) + step
        placed = AttentionContext(*head.place(positions), block_mask(size, step), cache)
        features = head(torch.nn.functional.embedding(shifted, embedding), features, placed)
        outputs.append(features)
    return outputs


def logits_of(head: EagleHead, outputs: Tensor) -> Tensor:
    if head.lm_head is not None:
        return head.lm_head(head.before_output(outputs))
    weight = model().get_output_embeddings().weight.to(outputs.dtype)
    return head.before_output(outputs) @ weight.T


def overfit(head: EagleHead, num_updates: int) -> None:
    """Train on the texts, several steps unrolled: each step sees what the one before has predicted."""
    longest = max(map(len, texts()))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts()])
    is_real = torch.tensor([[i < len(text) for i in range(longest)] for text in texts()])
    rows_of = torch.arange(VOCAB_SIZE) if head.vocabulary is None else head.vocabulary.rows_of(torch.arange(VOCAB_SIZE))
    labels = torch.where(is_real, rows_of[ids], -1)
    optimizer = torch.optim.Adam(head.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, num_updates)
    streams = streams_of(ids, head, head.dtype)
    for _ in range(num_updates):
        loss = torch.zeros(())
        for step, outputs in enumerate(unrolled_outputs(head, ids, NUM_UNROLLED, streams)):
            wanted = torch.nn.functional.pad(labels[:, 2 + step :], (0, 2 + step), value=-1)
            found = logits_of(head, outputs)
            loss = loss + torch.nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def shape_of(generation: int, **others: object) -> EagleShape:
    """Of a head for the toy target."""
    num_layers = target().num_layers
    streams = default_streams(num_layers) if generation == 3 else (num_layers,)
    given = {"layer": LAYER, "target_size": HIDDEN, "streams": streams, "num_layers_of_target": num_layers, **others}
    return EagleShape(generation=generation, **given)


def kept_vocabulary() -> DraftVocabulary:
    """All tokens that the texts hold, but for a few."""
    counts: dict[int, int] = {}
    for text in texts():
        for token in text:
            counts[token] = counts.get(token, 0) + 1
    return DraftVocabulary.most_frequent(counts, 52, VOCAB_SIZE)


def random_head(generation: int, **others: object) -> EagleHead:
    """A head with strong random weights, in float64."""
    torch.manual_seed(7)
    head = EagleHead(shape_of(generation, **others), kept_vocabulary() if generation == 3 else None).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return head.eval()


@cache
def trained(generation: int) -> EagleHead:
    """A head in float64 that knows the texts nearly by heart; shared, so not to be changed."""
    torch.manual_seed(1)
    head = EagleHead(shape_of(generation), kept_vocabulary() if generation == 3 else None)
    trained_once(head, lambda: overfit(head, 120), model(), texts())
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    return head.double().eval()


class HandsOn(EmptyDrafter):
    """Hands every verb to another drafter but those that a subclass answers itself."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.facts = drafter, drafter.facts

    def __getattribute__(self, name: str) -> Any:
        is_verb = name in ("needs", "start", "propose", "observe")
        own = getattr(type(self), name, None)
        is_handed_on = is_verb and own is getattr(EmptyDrafter, name)
        return getattr(self.drafter, name) if is_handed_on else super().__getattribute__(name)
