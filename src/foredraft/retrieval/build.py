"""Builds a datastore from corpora: resumable, in shards, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from foredraft.errors import ConfigError, DatastoreError
from foredraft.folders import only_user, sha256_of
from foredraft.retrieval.corpus import PIECE_CHARACTERS, CorpusFile, TextPiece, batches, find_files
from foredraft.retrieval.manifest import (
    MANIFEST,
    DatastoreManifest,
    FileRecord,
    ShardRecord,
    fingerprint_of,
    shard_record,
    write_json,
    writing,
)
from foredraft.retrieval.shard import BYTES_PER_TOKEN_BYTE, PADDING, encode, tokens_within, width_of, write_suffix_array

STATE = "build.json"


@dataclass
class State:
    """Progress of building a datastore. On disk, it never counts tokens that a shard's token file lacks.

    Args:
      settings: settings that must be equal for a build to be resumed.
      file, piece: indices of the next file and piece to read.
      shards: finished shards.
      open_bytes, open_documents: bytes and documents in the shard that is being written.
    """

    settings: dict[str, Any]
    file: int = 0
    piece: int = 0
    shards: list[ShardRecord] = field(default_factory=list)
    open_bytes: int = 0
    open_documents: int = 0

    def write(self, folder: Path) -> None:
        write_json(folder / STATE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> State | None:
        path = folder / STATE
        if not path.is_file():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**data, "shards": [shard_record(shard) for shard in data["shards"]]})
        except (ValueError, KeyError, TypeError) as error:
            raise DatastoreError(
                f"{path} is damaged ({error}); build the datastore from the beginning with --restart"
            ) from None


LOCK = ".lock"
MEMORY_BYTES = 2 * 10**9
"""Default memory limit of a build. Sorting a shard takes 5 bytes per byte of token ids; the rest is for Python."""

_BASE_MEMORY = 600 * 10**6  # interpreter, torch, tokenizer
CHECKPOINT_BYTES = 8 << 20
"""Bytes of tokens after which the state on disk is brought up to date."""

Progress = Callable[[str, int, int], None]
"""Function of the current activity, the amount done, and the total amount."""


def shard_tokens(width: int, memory_bytes: int = MEMORY_BYTES) -> int:
    """Return the number of tokens of the largest shard that can be sorted within a memory limit of the whole process.

    Args:
      width: bytes per token.

    Raises: ConfigError if the limit leaves no memory for tokens.
    """
    limit = tokens_within(memory_bytes - _BASE_MEMORY, width) - PIECE_CHARACTERS
    if limit < 1:
        least = _BASE_MEMORY + BYTES_PER_TOKEN_BYTE * width * (PIECE_CHARACTERS + 2)
        raise ConfigError(
            f"a memory limit of {memory_bytes} bytes is too small: the program needs {_BASE_MEMORY}; use {least} "
            "or more"
        )
    return limit


def build(
    corpora: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    *,
    tokenizer_name: str | None = None,
    field: str = "text",
    memory_bytes: int = MEMORY_BYTES,
    max_shard_tokens: int | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> DatastoreManifest:
    """Write a datastore of everything in ``corpora`` to the directory ``out``.

    After an interruption (even by ``kill -9``) the same call resumes the build.

    Args:
      corpora: files and directories. A text file is one document; JSONL and Parquet files have a document per record.
      tokenizer: tokenizer of the model that will use the datastore.
      tokenizer_name: name of the tokenizer in the datastore; by default the name it was loaded by.
      field: name of the text in JSONL records and Parquet rows.
      memory_bytes: memory limit of the whole process while it sorts a shard.
      max_shard_tokens: smaller limit on tokens per shard. A shard may exceed it by one piece of text.
      restart: True to delete the datastore or unfinished build in ``out`` first.
      progress: function that is called with the progress.

    Raises: DatastoreError, ConfigError.
    """
    folder = Path(out).expanduser()
    files = find_files(corpora, field)
    if restart and folder.is_dir():
        _drop(folder)
    if (folder / MANIFEST).exists():
        raise DatastoreError(f"{folder} already contains a datastore; append to it, or rebuild it with --restart")
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    base = DatastoreManifest(
        vocab_size=vocab_size,
        width=width_of(vocab_size),
        fingerprint=fingerprint_of(tokenizer),
        tokenizer=tokenizer_name or str(tokenizer.name_or_path),
        shards=(),
        sources=(),
    )
    return _Builder(folder, files, tokenizer, memory_bytes, max_shard_tokens, progress).run(base)


def append(
    folder: str | Path,
    corpora: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    field: str = "text",
    memory_bytes: int = MEMORY_BYTES,
    max_shard_tokens: int | None = None,
    progress: Progress | None = None,
) -> DatastoreManifest:
    """Add shards to a datastore. Readers see them once all are written. For the arguments see `build`.

    Raises: DatastoreError, TokenizerMismatchError.
    """
    folder = Path(folder).expanduser()
    manifest = DatastoreManifest.read(folder)
    manifest.check_tokenizer(tokenizer, None)
    files = find_files(corpora, field)
    return _Builder(folder, files, tokenizer, memory_bytes, max_shard_tokens, progress).run(manifest)


def _drop(folder: Path) -> None:
    """Delete the files of a build, and nothing else."""
    with writing(folder):
        for pattern in ("shard-*.tokens*", "shard-*.index*", STATE + "*", MANIFEST + "*"):
            for path in folder.glob(pattern):
                path.unlink()


class _Builder:
    """Writer of files as shards, which resumes an interrupted build with the same settings."""

    def __init__(
        self,
        folder: Path,
        files: list[CorpusFile],
        tokenizer: PreTrainedTokenizerBase,
        memory_bytes: int,
        max_shard_tokens: int | None,
        progress: Progress | None,
    ) -> None:
        self._folder, self._files, self._tokenizer = folder, files, tokenizer
        self._progress = progress or (lambda *_: None)
        self._width = width_of(max(tokenizer.get_vocab().values()) + 1)
        within = shard_tokens(self._width, memory_bytes)
        self._limit = within if max_shard_tokens is None else min(within, max_shard_tokens)
        self._settings: dict[str, Any] = {
            "fingerprint": fingerprint_of(tokenizer),
            "max_shard_tokens": self._limit,
            "sources": [[str(file.path.resolve()), file.num_bytes, file.field] for file in files],
        }

    def run(self, base: DatastoreManifest) -> DatastoreManifest:
        """Write all files as shards after those of ``base``."""
        with writing(self._folder), only_user(self._folder, LOCK):
            self._num_base = len(base.shards)
            self._state = self._resumed()
            self._take_files()
            if not self._state.shards:
                raise DatastoreError("the corpus is empty: its files contain no tokens; give a file with text")
            sources = tuple((str(file.path), file.num_bytes) for file in self._files)
            manifest = replace(base, shards=(*base.shards, *self._state.shards), sources=(*base.sources, *sources))
            manifest.write(self._folder)
            (self._folder / STATE).unlink()
        return manifest

    def _resumed(self) -> State:
        """Return the state of an interrupted build with the same settings, or a new one."""
        settings = {**self._settings, "num_base_shards": self._num_base}
        state = State.read(self._folder)
        if state is None:
            return State(settings)
        if state.settings != settings:
            differing = ", ".join(key for key, value in settings.items() if state.settings.get(key) != value)
            raise DatastoreError(
                f"{self._folder} contains an unfinished build with other settings ({differing}); finish that build, or "
                "delete it and build from the beginning with --restart"
            )
        return state

    # -- reading -------------------------------------------------------------------------------------------------

    def _take_files(self) -> None:
        """Read everything that is left. Afterwards all of it is in finished shards."""
        state, total = self._state, sum(file.num_bytes for file in self._files)
        before = sum(file.num_bytes for file in self._files[: state.file])
        self._saved_bytes = state.open_bytes
        self._tokens = self._reopened()
        try:
            for file in self._files[state.file :]:
                for batch in batches(islice(file.pieces(), state.piece, None)):
                    self._take(batch)
                    self._progress("reading", before + batch[-1].bytes_read, total)
                before += file.num_bytes
                state.file, state.piece = state.file + 1, 0
                self._progress("reading", before, total)
            if state.open_bytes:
                self._seal()
        finally:
            self._tokens.close()
        self._path("tokens").unlink()  # the empty file of the shard that would be next

    def _take(self, batch: Sequence[TextPiece]) -> None:
        texts = [piece.text for piece in batch]
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for piece, ids in zip(batch, encoded["input_ids"], strict=True):
            if self._state.open_bytes // self._width + len(ids) > self._limit and self._state.open_bytes:
                self._seal()
            self._write(encode(np.asarray(ids, np.int64), self._width))
            if piece.ends_document and self._is_in_document:
                self._write(self._separator)
                self._state.open_documents += 1
            self._state.piece += 1
        if self._state.open_bytes - self._saved_bytes >= CHECKPOINT_BYTES:
            self._checkpoint()

    # -- the open shard ------------------------------------------------------------------------------------------

    @property
    def _separator(self) -> bytes:
        return b"\xff" * self._width

    def _path(self, kind: str) -> Path:
        return self._folder / f"shard-{self._num_base + len(self._state.shards):05d}.{kind}"

    def _reopened(self) -> BinaryIO:
        """Open the token file of the current shard, cut to the length that the state on disk contains."""
        path = self._path("tokens")
        path.touch()
        file = path.open("r+b")
        if path.stat().st_size < self._state.open_bytes:
            file.close()
            raise DatastoreError(
                f"{path} is shorter than the unfinished build recorded; build from the beginning with --restart"
            )
        file.truncate(self._state.open_bytes)
        file.seek(max(0, self._state.open_bytes - self._width))
        self._is_in_document = file.read(self._width) not in (b"", self._separator)
        return file

    def _write(self, data: bytes) -> None:
        self._tokens.write(data)
        self._state.open_bytes += len(data)
        if data:
            self._is_in_document = data != self._separator

    def _checkpoint(self) -> None:
        """Write tokens first, then the state that counts them. If killed in between, the build resumes from the old
        state."""
        _flush(self._tokens)
        self._state.write(self._folder)
        self._saved_bytes = self._state.open_bytes

    def _seal(self) -> None:
        """Finish the current shard with separators, suffix array and checksums, and begin the next one."""
        state, width = self._state, self._width
        self._checkpoint()
        self._tokens.write(self._separator * (PADDING + 1))  # the first ends a document that the next shard continues
        _flush(self._tokens)
        self._tokens.close()
        num_tokens = state.open_bytes // width + 1
        self._progress("sorting", num_tokens, num_tokens)
        tokens, index = self._path("tokens"), self._path("index")
        state.shards.append(indexed(tokens, index, num_tokens, width, max(state.open_documents, 1)))
        state.open_bytes = state.open_documents = self._saved_bytes = 0
        state.write(self._folder)
        self._tokens = self._reopened()


def indexed(tokens: Path, index: Path, num_tokens: int, width: int, num_documents: int) -> ShardRecord:
    """Write the suffix array of a finished token file, and return the record of both files."""
    with index.open("wb") as file:
        write_suffix_array(tokens, num_tokens, width, file)
        _flush(file)
    return ShardRecord(_record(tokens), _record(index), num_tokens, num_documents)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _record(path: Path) -> FileRecord:
    return FileRecord(path.name, path.stat().st_size, sha256_of(path))


def from_tokens(
    documents: Iterable[Sequence[int] | npt.NDArray[np.integer[Any]]],
    out: str | Path,
    *,
    vocab_size: int,
    max_shard_tokens: int | None = None,
    num_tokens: int | None = None,
    progress: Progress | None = None,
) -> DatastoreManifest:
    """Write a datastore of documents that are token ids already. Such a datastore belongs to no tokenizer.

    Args:
      documents: documents, read one at a time, so that they need not fit into memory.
      max_shard_tokens: limit on tokens per shard; a shard may exceed it by one document. By default as many tokens as
        can be sorted in 2 GB of memory.
      num_tokens: total number of tokens if known; for ``progress`` only.

    Raises: DatastoreError, also if there is no token.
    """
    folder, width = Path(out), width_of(vocab_size)
    limit = max_shard_tokens or shard_tokens(width)
    report = progress or (lambda *_: None)
    shards: list[ShardRecord] = []
    remaining = filter(len, documents)
    done = 0
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        while (document := next(remaining, None)) is not None:
            tokens, index = (folder / f"shard-{len(shards):05d}.{kind}" for kind in ("tokens", "index"))
            size = count = 0
            separator = b"\xff" * width
            with tokens.open("wb") as file:
                while document is not None:
                    file.write(encode(document, width) + separator)
                    size, count = size + len(document) + 1, count + 1
                    report("reading", done + size, num_tokens or done + size)
                    document = next(remaining, None) if size - count < limit else None
                file.write(separator * PADDING)
            report("sorting", size, size)
            shards.append(indexed(tokens, index, size, width, count))
            done += size
        if not shards:
            raise DatastoreError("the corpus is empty: no document contains a token")
        manifest = DatastoreManifest(vocab_size, width, "", "", tuple(shards), ())
        manifest.write(folder)
    return manifest
