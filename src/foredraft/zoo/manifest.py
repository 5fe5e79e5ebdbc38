"""Facts about a zoo model that are known before it is loaded, read from the ``manifest.json`` beside its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError

MANIFEST = "manifest.json"
HEADS = ("medusa", "hydra", "hydra++", "eagle", "eagle3")
"""Heads that a model may include. The heads are beside the manifest, even if the weights are elsewhere."""
ASSETS = ("target", "tokenizer", "draft", "datastore", "layer_set", "candidates", *HEADS)
"""Parts and extra files that a model may include."""


@dataclass(frozen=True)
class Package:
    """Weights in another distribution, as one GGUF file.

    Args:
      distribution, version: the distribution and the version that was tested.
      file: path inside the distribution.
      num_bytes, sha256: size and hash of that file.
      weights_sha256: hash of the converted weights (`foredraft.zoo.conversion.weights_digest`).
      converted_bytes: approximate size of the converted model on disk.
      install: command that installs the distribution.
    """

    distribution: str
    version: str
    file: str
    num_bytes: int
    sha256: str
    weights_sha256: str
    converted_bytes: int
    install: str


@dataclass(frozen=True)
class Manifest:
    """Description of a model of the zoo.

    Args:
      name: name without ``zoo:``.
      title: description in one line.
      is_instruct: whether the model answers through a chat template; a base model continues text.
      is_toy: whether the model only serves to show and test drafting, and is too small to be useful.
      licence, source: licence and origin of the weights.
      stored_dtype: dtype of the weights on disk.
      assets: files or folders that this model includes, by their names in `ASSETS`.
      notes: notes for readers of its figures.
      package: the distribution with the weights, if they do not ship with foredraft.
    """

    name: str
    title: str
    is_instruct: bool
    is_toy: bool
    licence: str
    source: str
    stored_dtype: str
    assets: Mapping[str, str]
    notes: tuple[str, ...] = ()
    package: Package | None = None

    def notes_about(self, methods: Iterable[str]) -> tuple[str, ...]:
        """Return the notes that name any of these methods."""
        named = set(methods)
        return tuple(note for note in self.notes if named & set(re.findall(r"\w+", note)))


def root() -> Path:
    """Return the folder that contains one folder per model."""
    return Path(str(resources.files("foredraft.zoo")))


def names() -> list[str]:
    """Return the names of all models with a manifest, sorted.

    Example:
        >>> names()
        ['smollm2', 'tiny']
    """
    return sorted(entry.parent.name for entry in root().glob(f"*/{MANIFEST}"))


@lru_cache
def read_manifest(file: Path) -> Manifest:
    """Read and check one manifest. The name of its folder is the name of the model.

    Raises: CheckpointError for a key that is missing, unknown or of another type.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); reinstall foredraft") from None
    package = entries.pop("package", None) if isinstance(entries, dict) else None
    checked = _checked(Manifest, entries, file)
    unknown = sorted(set(checked["assets"]) - set(ASSETS))
    if unknown or not {"target", "tokenizer"} <= set(checked["assets"]):
        raise CheckpointError(
            f"{file}: assets is {sorted(checked['assets'])}; it needs target and tokenizer, and may contain "
            f"{', '.join(ASSETS[2:])}"
        )
    if package is not None:
        checked["package"] = Package(**_checked(Package, package, file))
    return Manifest(name=file.parent.name, **checked)


_TYPES: dict[str, type] = {"str": str, "bool": bool, "int": int}


def _checked(kind: type, entries: Any, file: Path) -> dict[str, Any]:
    """Check the entries and return them as arguments of ``kind``.

    Raises: CheckpointError.
    """
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: {entries!r} is not an object")
    kinds = {field.name: str(field.type) for field in fields(kind) if field.name not in ("name", "package")}
    wrong = sorted((kinds.keys() - {"notes"}) ^ (entries.keys() - {"notes"}))
    if wrong:
        raise CheckpointError(f"{file}: the key {wrong[0]!r} is {'missing' if wrong[0] in kinds else 'unknown'}")
    for key, value in entries.items():
        if key == "notes":
            is_right = isinstance(value, list) and all(isinstance(note, str) for note in value)
        elif key == "assets":
            is_right = isinstance(value, dict) and all(isinstance(place, str) for place in value.values())
        else:
            is_right = type(value) is _TYPES[kinds[key]]
        if not is_right:
            raise CheckpointError(f"{file}: {key} is {value!r}, which is not of type {kinds[key]}")
    return {**entries, "notes": tuple(entries["notes"])} if "notes" in entries else dict(entries)
