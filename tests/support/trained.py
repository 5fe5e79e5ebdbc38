"""Modules that are trained once per machine for all processes that test with them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import foredraft
from foredraft.folders import cache_folder

SOURCES = (*Path(__file__).parent.glob("*_heads.py"), *(Path(foredraft.__file__).parent / "heads").glob("*.py"))


def trained_once(module: nn.Module, train: Callable[[], None], target: nn.Module, data: Any) -> None:
    """Train a module, or load the weights that another process has trained.

    Weights are kept for this source code, version of torch, beginning of the module, target and data.
    """
    digest = hashlib.sha256(repr((torch.__version__, data)).encode())
    for source in sorted(SOURCES):
        digest.update(source.read_bytes())
    for part in (module, target):
        for name, tensor in part.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
    kept = cache_folder("tests", f"heads-{digest.hexdigest()[:24]}.pt")
    if kept.exists():
        module.load_state_dict(torch.load(kept, weights_only=True))
        return
    train()
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    torch.save(module.state_dict(), part)
    part.replace(kept)
