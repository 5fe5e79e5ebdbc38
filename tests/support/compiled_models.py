"""Architectures whose layers run compiled."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from architectures import ARCHITECTURES

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
