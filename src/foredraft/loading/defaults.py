"""Default method of drafting for a model: the one place that decides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft import zoo
from foredraft.methods import recognized

WITHOUT_HEAD = "auto"
"""For models with neither a drafter nor a head: what is free, by measured cost."""

WITH_HEAD = "suffix+{method}"
"""Lookups in the text merged with drafts of the head, by their chance of acceptance."""

RULE = "the small model that a zoo model brings, else suffix+HEAD with a head on board or beside the model, else auto"
"""In words, for help texts."""

HEADS = ("eagle3", "hydra++", "hydra", "medusa", "eagle")
"""Methods with a head, the best first."""


def default_keys(model: object) -> dict[str, Any]:
    """Keys of the config for a model for which none was given.

    Args:
      model: as for `LLM`. A directory may hold a head in a folder of its own, as ``foredraft train`` writes it.

    Example:
        >>> default_keys("zoo:smollm2")
        {'method': 'suffix+eagle3'}
    """
    if isinstance(model, str) and model.startswith(zoo.PREFIX):
        if zoo.brings(model, "draft"):
            return {"method": "draft_model"}
        heads = [method for method in HEADS if zoo.brings(model, method)]
        return {"method": WITH_HEAD.format(method=heads[0]) if heads else WITHOUT_HEAD}
    found = sorted(_heads_beside(model), key=lambda head: HEADS.index(head[0]))
    if not found:
        return {"method": WITHOUT_HEAD}
    method, folder = found[0]
    return {"method": WITH_HEAD.format(method=method), "model": str(folder)}


def _heads_beside(model: object) -> Iterator[tuple[str, Path]]:
    """Methods and folders of heads inside the directory of a model."""
    if not isinstance(model, (str, os.PathLike)) or not Path(model).expanduser().is_dir():
        return
    for folder in sorted(Path(model).expanduser().iterdir()):
        method = recognized(folder) if folder.is_dir() else None
        if method is not None and method.name in HEADS:
            yield method.name, folder
