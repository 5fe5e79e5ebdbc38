"""Architectures whose layers run compiled."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from architectures import ARCHITECTURES

FAST = ("llama", "gemma3", "gpt2", "phi")  # grouped heads, windows, learned positions, parallel branches
UNCOMPILED = {  # and why
    "qwen3-moe": "its experts are not compiled",
    "mixtral": "its experts are not compiled",
    "deepseek-v3": "does not read the cache",
    "falcon": "its own attention code",
    "falcon-multi-query": "its own attention code",
    "gemma2": "its own attention code",
    "gpt-oss": "its own attention code",
}
ALL = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.full)
    for name in ARCHITECTURES
    if name not in UNCOMPILED
]


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    architecture = ARCHITECTURES[name]
    return architecture.build(architecture.attention[0], dtype)
