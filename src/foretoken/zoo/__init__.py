"""The small trained models that ship with the package: real text and real acceptance, offline, on any machine.

A model of the zoo is a directory beside this file:

    tiny/target/   the target, with the tokenizer that all parts share
    tiny/draft/    its drafter
    tiny/README.md provenance, licence, measured figures
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from foretoken.engine.errors import CheckpointError, ConfigError

__all__ = ["load", "names", "path"]

_FOLDERS = {"target": "target", "draft": "draft", "tokenizer": "target"}


def _root() -> Path:
    return Path(str(resources.files(__name__)))


def names() -> list[str]:
    """The names that `load` knows, sorted.

    Example:
        >>> names()
        ['tiny']
    """
    return sorted(entry.name for entry in _root().iterdir() if (entry / "target" / "config.json").is_file())


def path(name: str, part: str = "target") -> Path:
    """The directory of one part, in the layout that ``from_pretrained`` reads.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.
        part: ``"target"``, ``"draft"`` or ``"tokenizer"`` (which lies in the target's directory).

    Raises:
        ConfigError: no such model or part; the message names the nearest one.
        CheckpointError: the package was installed without its data.
    """
    name = _known(name.removeprefix("zoo:"), names(), "model of the zoo")
    folder = _root() / name / _FOLDERS[_known(part, sorted(_FOLDERS), f"part of zoo:{name}")]
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing: foretoken was installed without its data; reinstall it")
    return folder


def asset(name: str, file: str) -> Path:
    """A file or folder beside a model of the zoo, such as the layer set that ``layer_skip`` starts from.

    Raises:
        ConfigError: no such model.
        CheckpointError: the package was installed without its data.
    """
    found = _root() / _known(name.removeprefix("zoo:"), names(), "model of the zoo") / file
    if not found.exists():
        raise CheckpointError(f"{found} is missing: foretoken was installed without its data; reinstall it")
    return found


def load(name: str = "tiny", *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Load a pair as plain transformers objects: ``(target, drafter, tokenizer)``.

    Nothing is downloaded. Both models are in evaluation mode on the CPU and belong to the caller.

    Args:
        name: one of `names()`; a leading ``zoo:`` is allowed.
        dtype: of both models' weights. They are stored in bfloat16, which float32 holds exactly.

    Raises:
        ConfigError: no such model; the message names the nearest one.
        CheckpointError: the package was installed without its data.
    """
    with _quiet():
        target, drafter = (
            AutoModelForCausalLM.from_pretrained(path(name, part), dtype=dtype, local_files_only=True).eval()
            for part in ("target", "draft")
        )
        tokenizer = AutoTokenizer.from_pretrained(path(name, "tokenizer"), local_files_only=True)
    return target, drafter, tokenizer


def _known(value: str, allowed: list[str], what: str) -> str:
    if value in allowed:
        return value
    nearest = difflib.get_close_matches(value, allowed, n=1, cutoff=0.0)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(f"{value!r} is no {what}{hint} Known: {', '.join(allowed) or 'none'}.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Two small files need no progress bar; the user's setting is put back."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
