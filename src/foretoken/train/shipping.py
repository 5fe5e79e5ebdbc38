"""Checkpoints as they are shipped: in bfloat16, with facts of their training in the config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foretoken.heads.checkpoint import read_checkpoint, write_checkpoint
from foretoken.train.recipe import halved


@contextmanager
def shipped(folder: Path, facts: dict[str, Any]) -> Iterator[None]:
    """Halve what the block has written into the folder, and add facts to its config."""
    yield
    written = read_checkpoint(folder)
    write_checkpoint(folder, {**written.config, **facts}, halved(dict(written.tensors)))
