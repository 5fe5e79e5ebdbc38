"""Drafters that are included with a model. Method ``auto`` uses them in addition to `suffix`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft import zoo
from foredraft.methods import recognized

HEADS = ("eagle3", "hydra++", "hydra", "medusa", "eagle")
"""Methods that draft with a head, in order of preference."""


def drafters_beside(model: object) -> list[dict[str, Any]]:
    """Return configs of the drafters that are included with a model: a draft model, and the best head.

    Args:
      model: ``zoo:NAME``, or the directory of a model. A directory may contain a head in a subfolder, as
        ``foredraft train --out MODEL/eagle3`` writes it. Other models have no included drafters.

    Example:
        >>> drafters_beside("zoo:smollm2")
        [{'method': 'eagle3'}]
    """
    if isinstance(model, str) and model.startswith(zoo.PREFIX):
        heads = [method for method in HEADS if zoo.includes(model, method)]
        names = [*(["draft_model"] if zoo.includes(model, "draft") else []), *heads[:1]]
        return [{"method": name} for name in names]
    found = sorted(_heads_inside(model), key=lambda head: HEADS.index(head[0]))
    return [{"method": method, "model": str(folder)} for method, folder in found[:1]]


def _heads_inside(model: object) -> Iterator[tuple[str, Path]]:
    """Yield methods and folders of heads in the subfolders of a model's directory."""
    if not isinstance(model, (str, os.PathLike)) or not Path(model).expanduser().is_dir():
        return
    for folder in sorted(Path(model).expanduser().iterdir()):
        method = recognized(folder) if folder.is_dir() else None
        if method is not None and method.name in HEADS:
            yield method.name, folder
