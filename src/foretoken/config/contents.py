"""What lies in a folder, as far as names tell: the config, and the names of tensors. Nothing is loaded for it."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foretoken.folders import parsed_json

_NAMES = re.compile(rb"[A-Za-z_][\w.]*\.(?:weight|bias)|d2t|t2d")
_MAX_HEADER_BYTES = 1 << 26


@dataclass(frozen=True)
class Contents:
    """What lies in a folder.

    Args:
      config: the content of config.json.
      names: of tensors, as far as they can be had without reading these; empty where they cannot.
    """

    config: Mapping[str, Any]
    names: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, model: object) -> Contents | None:
        """Of a folder, or of a hub id that has been fetched before; None for anything else. Asks no hub."""
        if not isinstance(model, (str, os.PathLike)):
            return None
        folder = _folder(os.fspath(model))
        if folder is None:
            return None
        config = _json(folder / "config.json")
        if not isinstance(config, Mapping):
            return None
        names: set[str] = set()
        for file in sorted(folder.iterdir()):
            names |= _names_in(file)
        return cls(config, frozenset(names))


def _folder(name: str) -> Path | None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder if (folder / "config.json").is_file() else None
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not the form of a hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _names_in(file: Path) -> set[str]:
    """Names of tensors in a file of weights, or in the index of several."""
    if file.name.endswith(".index.json"):
        index = _json(file)
        files = index.get("weight_map") if isinstance(index, Mapping) else None
        return set(files) if isinstance(files, Mapping) else set()
    try:
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = parsed_json(stream.read(size)) if size <= _MAX_HEADER_BYTES else {}
            return set(header) - {"__metadata__"}
        if file.suffix in (".bin", ".pt") and zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                pickled = [name for name in archive.namelist() if name.endswith("data.pkl")]
                text = b"".join(archive.read(name) for name in pickled)
            return {name.decode() for name in _NAMES.findall(text)}  # read as text, never unpickled
    except (OSError, ValueError, TypeError, zipfile.BadZipFile):
        return set()
    return set()


def _json(file: Path) -> Any:
    try:
        return parsed_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
