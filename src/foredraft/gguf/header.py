"""The header of a GGUF file: metadata and descriptions of tensors. Reading it requires no package but torch.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
INPUT = "token_embd.weight"
"""Name of the input embedding."""
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Dtypes of tensors without quantised blocks, by type number."""
_MOST_BYTES = 2**27
"""Limit on bytes of a header. Vocabularies take about 10 MB, and Python's lists several times the bytes of the file."""
_AT_A_TIME = 4096
"""Number of strings that are read at once."""


@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor in the file.

    Args:
      name: name of the tensor.
      shape: shape with the outermost dimension first, as in torch.
      type_id: number of the type of its elements or blocks.
      offset: byte offset relative to the beginning of the data.
      part: index of the file that contains it, for a model in several files.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    part: int = 0

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """Header of a GGUF file, or of a model in several files.

    Args:
      path: path of the file; of the first one of several.
      metadata: values by key.
      tensors: descriptions of the tensors, of all files.
      data_start: byte at which the tensor data begins.
      num_bytes: size of the whole file.
      alignment: alignment of tensors, in bytes.
      entries: byte ranges of the metadata entries in the file, by key.
      tensors_at: byte range of the descriptions of tensors.
      parts: headers of all files of a model in several files.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    num_bytes: int
    alignment: int
    entries: Mapping[str, tuple[int, int]]
    tensors_at: tuple[int, int]
    parts: tuple[Header, ...] = ()

    @property
    def files(self) -> tuple[Header, ...]:
        """The header of each file."""
        return self.parts or (self,)

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def of_architecture(self, key: str) -> Any:
        """Return the value of ``<architecture>.<key>``, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


def aligned(place: int, alignment: int) -> int:
    """Return the smallest multiple of the alignment that is at least ``place``.

    Example:
        >>> aligned(33, 32), aligned(64, 32)
        (64, 64)
    """
    return -(-place // alignment) * alignment


def is_gguf(file: Path | str) -> bool:
    """Whether a file begins like a GGUF file. Its name does not matter."""
    try:
        with open(file, "rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""End of the names of files that llama.cpp splits a model into."""


def part_names(name: str) -> list[str]:
    """Return the names of all files of a model, given one of them.

    Example:
        >>> part_names("big-00002-of-00002.gguf")
        ['big-00001-of-00002.gguf', 'big-00002-of-00002.gguf']
        >>> part_names("small.gguf")
        ['small.gguf']
    """
    found = _PART.search(name)
    if found is None:
        return [name]
    stem, count = name[: found.start()], int(found[2])
    return [f"{stem}-{number + 1:05}-of-{found[2]}.gguf" for number in range(count)]


def read_header(file: Path | str) -> Header:
    """Read and check the header of a file, without its tensors; of all files of a model in several.

    Raises: CheckpointError for a file that is not GGUF, is truncated, or has an unsupported version or type, and for a
      model that lacks a file.
    """
    path = Path(file)
    first = path.with_name(part_names(path.name)[0])
    header = _read_file(first if first.exists() else path)
    if (count := _num_parts(header)) > 1:
        header = _joined(header, count)
    _check_kind(header)
    return header


def _num_parts(header: Header) -> int:
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= _MOST_PARTS:
        raise CheckpointError(f"{header.path} is damaged in its header (split.count is {count!r}); download it again")
    return count


_MOST_PARTS = 10_000


def _joined(header: Header, count: int) -> Header:
    """Read the other files of a model, and return one header for all."""
    names = part_names(header.path.name)
    if len(names) != count:
        raise CheckpointError(
            f"{header.path} is one of {count} parts of a model, which are found by names that end in "
            f"-00001-of-{count:05}.gguf and so on; give the parts these names in one folder"
        )
    parts = []
    for number, name in enumerate(names):
        path = header.path.with_name(name)
        if not path.exists():
            raise CheckpointError(f"{header.path} has {count} parts, but {path} does not exist; download it as well")
        part = header if path == header.path else _read_file(path)
        if (part.metadata.get("split.no", 0), _num_parts(part)) != (number, count):
            raise CheckpointError(f"{path} is not part {number + 1} of {count} of a model; download the parts again")
        parts.append(part)
    tensors = tuple(replace(tensor, part=number) for number, part in enumerate(parts) for tensor in part.tensors)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise CheckpointError(f"parts of {parts[0].path} contain the same tensors; download the parts again")
    return replace(parts[0], tensors=tensors, parts=tuple(parts))


def _read_file(path: Path) -> Header:
    """Read the header of one file."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else nullcontext(b"") as data:
                header = _Reader(data, path).header()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged in its header ({error}); download or copy it again") from None
    return header


class _Reader:
    """Reader of values from the bytes of a file, in the order of the specification."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data, self.path, self.place = data, path, 0
        self.num_bytes = len(data)

    def header(self) -> Header:
        magic = bytes(self.data[:4])
        if magic != MAGIC:
            raise CheckpointError(
                f"{self.path} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}; download it again, or "
                "give the directory of a model saved with save_pretrained"
            )
        self.place = len(MAGIC)
        version = self.take("I")
        if version not in VERSIONS:
            kind = "is big-endian" if version >> 24 in VERSIONS else f"is of GGUF version {version}"
            raise CheckpointError(
                f"{self.path} {kind}; only little-endian files of versions 2 and 3 are supported. Convert it again "
                "with a current llama.cpp"
            )
        num_tensors, num_entries = self.take("Q"), self.take("Q")
        metadata, entries = {}, {}
        for _ in range(num_entries):
            first = self.place
            key = self.string()
            metadata[key] = self.value(self.take("I"))
            entries[key] = first, self.place
        first = self.place
        tensors = tuple(self.tensor() for _ in range(num_tensors))
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT)) or _DEFAULT_ALIGNMENT
        if alignment < 0:  # tensors would begin within the header
            raise ValueError(f"general.alignment is {alignment}")
        data_start = aligned(self.place, alignment)
        at = first, self.place
        return Header(self.path, metadata, tensors, data_start, self.num_bytes, alignment, entries, at)

    def tensor(self) -> TensorInfo:
        name, num_dimensions = self.string(), self.take("I")
        shape = tuple(reversed(self.many("Q", num_dimensions)))
        return TensorInfo(name, shape, self.take("I"), self.take("Q"))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.take("I"), self.take("Q")
            if element in _SCALARS:
                return list(self.many(_SCALARS[element], count))
            if element == _STRING:
                return self.strings(count)
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(
                f"{self.path} contains a metadata value of the unknown type {kind}; the file is damaged"
            )
        return self.take(_SCALARS[kind])

    def string(self) -> str:
        return self.read(self.take("Q")).decode("utf-8", errors="replace")

    def strings(self, count: int) -> list[str]:
        """Read many strings at once, since vocabularies have hundreds of thousands."""
        found = list[str]()
        while len(found) < count:
            short = self._short_strings(min(_AT_A_TIME, count - len(found)))
            found += short
            left = count - len(found)
            found += [self.string() for _ in range(min(left, 1 if short else _AT_A_TIME))]
        return found

    def _short_strings(self, count: int) -> list[str]:
        """Read up to ``count`` strings, those before the first that is empty, has more than 255 bytes or zeros.

        A length has eight bytes, of which the last seven are zeros here. What is between such zeros is a string and the
        first byte of the next length. If the lengths agree, so do the places.
        """
        data = self.data[self.place : min(self.num_bytes, _MOST_BYTES, self.place + 64 * count)]
        pieces = data.split(bytes(7), count)
        lengths = [piece[-1] if piece else 0 for piece in pieces[:-1]]
        if len(pieces) < 2 or len(pieces[0]) != 1:
            return []
        strings = [piece[:-1] for piece in pieces[1:-1]] + [pieces[-1][: lengths[-1]]]
        sizes, num_right = list(map(len, strings)), len(strings)
        if sizes != lengths or not all(lengths):
            num_right = next(i for i, size in enumerate(sizes) if size != lengths[i] or not size)
        found = b"\0".join(strings[:num_right]).decode("utf-8", errors="replace").split("\0")
        if not num_right or len(found) != num_right:
            return []
        self.place += 8 * num_right + sum(lengths[:num_right])
        return found

    def take(self, code: str) -> Any:
        return self.many(code, 1)[0]

    def many(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.read(count * struct.calcsize(f"<{code}")))

    def read(self, num_bytes: int) -> bytes:
        if num_bytes > self.num_bytes - self.place:
            raise CheckpointError(
                f"{self.path} ends after {self.num_bytes} bytes, within its header: it is truncated or damaged. "
                "Download or copy it again"
            )
        if num_bytes > _MOST_BYTES - self.place:
            raise CheckpointError(
                f"{self.path} states a header of more than {_MOST_BYTES >> 20} MiB: a length in it is damaged. "
                "Download or copy it again"
            )
        self.place += num_bytes
        return self.data[self.place - num_bytes : self.place]


def _check_kind(header: Header) -> None:
    if "general.architecture" not in header.metadata:
        raise CheckpointError(f"{header.path} names no architecture (general.architecture), so it is not a model")
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(
            f"{header.path} is of type {kind!r} and not a model; give the file of the whole language model"
        )
