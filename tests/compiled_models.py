"""Architectures whose layers run compiled, and small models that run by the library's own products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from architectures import ARCHITECTURES
from foretoken.model.execution import choices

FAST = ("llama", "gemma3", "gpt2", "phi")  # grouped heads, windows, learned positions, parallel branches
UNCOMPILED = {  # and why
    "qwen3-moe": "GuardOnDataDependentSymNode",
    "mixtral": "GuardOnDataDependentSymNode",
    "deepseek-v3": "does not read the cache",
    "falcon": "attention of its own",
    "falcon-multi-query": "attention of its own",
    "gemma2": "attention of its own",
    "gpt-oss": "attention of its own",
}
ALL = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.full)
    for name in ARCHITECTURES
    if name not in UNCOMPILED
]


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    architecture = ARCHITECTURES[name]
    return architecture.build(architecture.attention[0], dtype)


@contextmanager
def own_products(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let small models run by the library's own products, too."""
    patch.setattr(choices, "MIN_ELEMENTS", 0)
    patch.setattr(choices, "_is_faster", lambda *_: True)
    patch.setattr(choices._Choices, "add", lambda self, name, choice: self.known.update({name: choice}))
    choices._Choices.of.cache_clear()
    yield
    choices._Choices.of.cache_clear()
