"""The toy target of tests that need any one, and what drafts beside it."""

from __future__ import annotations

from atexit import register
from collections.abc import Sequence
from functools import cache
from shutil import rmtree
from tempfile import mkdtemp

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.model.lm import CausalLM
from foredraft.retrieval.build import from_tokens
from foredraft.retrieval.datastore import Datastore
from foredraft.testing import perturbed, strengthen, toy_model

VOCAB_SIZE = 64


@cache
def target() -> CausalLM:
    return CausalLM(toy_model(VOCAB_SIZE), execution="eager")


@cache
def small(scale: float = 0.1) -> CausalLM:
    """The target with noise on its weights, so that some of what it drafts is right."""
    return CausalLM(perturbed(toy_model(VOCAB_SIZE), scale, seed=2), execution="eager")


def deep(num_layers: int = 5) -> CausalLM:
    """A target whose layers differ in how much they add, so that some are better left out than others."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = strengthen(LlamaForCausalLM(config)).double().eval()
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.mul_(0.1 if index == 1 else 1.0)
            layer.mlp.down_proj.weight.mul_(0.1 if index == 2 else 1.0)
    return CausalLM(model, execution="eager")


def datastore_of(texts: Sequence[Sequence[int]], vocab_size: int = VOCAB_SIZE, **options: int) -> Datastore:
    """These texts in a folder that is removed at the end."""
    folder = mkdtemp()
    register(rmtree, folder)
    from_tokens(texts, folder, vocab_size=vocab_size, **options)
    return Datastore.open(folder)
