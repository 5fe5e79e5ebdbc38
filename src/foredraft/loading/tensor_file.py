"""Files of tensors with a JSON header. They are memory-mapped, and damage is detected on reading.

A file begins with a line with the format's name and the length and SHA-256 of the header. The header and the tensors
follow; each tensor begins at a multiple of the page size. The header contains a checksum for every two MiB of every
tensor, so that reading detects changed and truncated data.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from foredraft.folders import part_of, replacing

FORMAT = "foredraft tensors 1"
PAGE = 4096
CHUNK = 2**21
"""Bytes per checksum."""
LARGEST_HEAD = 2**28
READERS = 2
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class DamagedFileError(Exception):
    """A file differs from what was written. The message gives the difference without the name of the file."""


def write_tensors(file: Path, about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file atomically, so that readers see all of it or none. Missing folders are created.

    Args:
      file: path of the file.
      about: JSON values for the header.
      tensors: tensors by name.

    Raises: OSError, which leaves an existing file unchanged; KeyError for a dtype outside `DTYPES`.
    """
    entries, place = {}, 0
    raw = {name: _bytes_of(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"dtype": [*DTYPES][[*DTYPES].index(dtype)], "shape": list(tensor.shape), "at": place}
        entries[name]["sums"] = _sums(raw[name])
        place += -(-raw[name].numel() // PAGE) * PAGE
    head = json.dumps({"about": about, "tensors": entries, "bytes": place}).encode()
    first = f"{FORMAT} {len(head)} {hashlib.sha256(head).hexdigest()}\n".encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(file)
    with replacing(file, part), part.open("wb") as stream:
        stream.write(first + head)
        stream.write(bytes(-stream.tell() % PAGE))
        for each in raw.values():
            stream.write(each.numpy().data)
            stream.write(bytes(-stream.tell() % PAGE))


class TensorFile:
    """A file of `write_tensors`, opened for reading.

    Attributes:
      about: JSON values from the header.

    Raises: OSError; DamagedFileError if the header is damaged or the file is truncated.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with file.open("rb") as stream:
            head, self._begin = _head_of(stream)
            size = os.fstat(stream.fileno()).st_size
        self.about: dict[str, Any] = head["about"]
        self._entries: dict[str, dict[str, Any]] = head["tensors"]
        if size != self._begin + head["bytes"]:
            raise DamagedFileError(f"it has {size} of {self._begin + head['bytes']} bytes")

    def read(self) -> dict[str, torch.Tensor]:
        """Map all tensors from the file. Processes share the memory; their writes stay private (copy on write).

        Raises: OSError; DamagedFileError for a tensor with a wrong checksum.
        """
        with self._file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        found = {name: self._tensor(mapped, name, entry) for name, entry in self._entries.items()}
        names = list(found)
        with ThreadPoolExecutor(READERS) as readers:
            for done in [readers.submit(self._check, found, names[number::READERS]) for number in range(READERS)]:
                done.result()
        return found

    def _tensor(self, mapped: mmap.mmap, name: str, entry: Mapping[str, Any]) -> torch.Tensor:
        dtype, count, first = DTYPES[entry["dtype"]], math.prod(entry["shape"]), self._begin + entry["at"]
        if count == 0:
            return torch.empty(entry["shape"], dtype=dtype)
        if min(count, entry["at"]) < 0 or first + count * dtype.itemsize > len(mapped):
            raise DamagedFileError(f"{name} is cut off")
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=first).view(entry["shape"])

    def _check(self, found: Mapping[str, torch.Tensor], names: list[str]) -> None:
        for name in names:
            if _sums(_bytes_of(found[name])) != self._entries[name]["sums"]:
                raise DamagedFileError(f"the bytes of {name} are not those that were written")


def _head_of(stream: BinaryIO) -> tuple[dict[str, Any], int]:
    """Read the header, and return it with the offset of the first tensor."""
    line = stream.readline(256)
    name, _, rest = line.decode(errors="replace").rpartition(f"{FORMAT} ")
    length, _, digest = rest.strip().partition(" ")
    if name or not length.isdigit() or not 0 < int(length) <= LARGEST_HEAD:
        raise DamagedFileError("it is not a foredraft file of packed weights")
    head = stream.read(int(length))
    if hashlib.sha256(head).hexdigest() != digest:
        raise DamagedFileError("its header is damaged")
    found: dict[str, Any] = json.loads(head)
    return found, -(-(len(line) + len(head)) // PAGE) * PAGE


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, as a view if it is contiguous."""
    given = tensor.detach().contiguous()
    return given.view(-1).view(torch.uint8) if math.prod(given.shape) else torch.empty(0, dtype=torch.uint8)


def _sums(raw: torch.Tensor) -> list[int]:
    return [_sum(raw[place : place + CHUNK]) for place in range(0, raw.numel(), CHUNK)]


def _sum(raw: torch.Tensor) -> int:
    """Return the sum of all words of eight bytes plus the sum of the remaining bytes."""
    numbers, whole = raw.numpy(), raw.numel() // 8 * 8
    return int(numbers[:whole].view(np.int64).sum()) + int(numbers[whole:].sum(dtype=np.int64))
