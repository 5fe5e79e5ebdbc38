"""Identity of the files of a model, by which a changed file is told without reading it whole."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from foredraft.loading.sources import Source

NUM_SAMPLES = 64
"""Number of places of a file that are read."""
SAMPLE_BYTES = 4096
RECENT_SECONDS = 2.0
"""Age of the last change from which a file's times tell the next change. The coarsest file systems count in steps of
this size."""

ADAPTER = "adapter_config.json"
"""File of a folder with an adapter of PEFT, whose base model lies elsewhere."""


def identity_of(files: Iterable[Path]) -> str | None:
    """Return a digest of names, sizes, times of change, and samples of the contents of files.

    The operating system sets the time of the last change of status (``ctime``), and programs cannot choose it. So every
    write, and every replacement by another file, gives another identity, also if size and time of modification stay.

    Returns: None without files, and if a file cannot be read or was changed less than `RECENT_SECONDS` ago.
    """
    found, every = hashlib.sha256(), sorted(files)
    for file in every:
        try:
            with file.open("rb") as stream:
                stat = os.fstat(stream.fileno())
                if max(stat.st_mtime, stat.st_ctime) > time.time() - RECENT_SECONDS:
                    return None
                found.update(repr((file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)).encode())
                for place in _places(stat.st_size):
                    stream.seek(place)
                    found.update(stream.read(SAMPLE_BYTES))
        except OSError:
            return None
    return found.hexdigest() if every else None


def _places(size: int) -> Iterator[int]:
    """Yield evenly spaced offsets, the first and the last bytes of a file included."""
    last = max(0, size - SAMPLE_BYTES)
    step = max(SAMPLE_BYTES, -(-last // (NUM_SAMPLES - 1)))
    yield from range(0, last, step)
    yield last


def files_of(source: Source) -> list[Path]:
    """Return the files of a model's folder, or its GGUF file; none for an adapter of PEFT, and if they are not known.

    Args:
      source: location of the model, whose files are on this machine.
    """
    place = Path(source.location)
    if not place.exists():
        found = try_to_load_from_cache(source.location, source.gguf_file or "config.json", revision=source.revision)
        if not isinstance(found, str):
            return []
        place = Path(found) if source.gguf_file else Path(found).parent
    if place.is_file():
        return [place]
    files = [file for file in place.iterdir() if file.is_file()]
    return [] if any(file.name == ADAPTER for file in files) else files
