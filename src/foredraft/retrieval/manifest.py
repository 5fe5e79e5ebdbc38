"""The manifest of a datastore, and checks that its files are complete and belong to the tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import DatastoreError, TokenizerMismatchError, error_text
from foredraft.folders import is_no_room, not_ours, sha256_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "foredraft-datastore"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """Name, size and checksum of a file."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """One shard: its two files, and the numbers of tokens and documents in them."""

    tokens: FileRecord
    index: FileRecord
    num_tokens: int
    num_documents: int


@dataclass(frozen=True)
class DatastoreManifest:
    """A finished datastore.

    Args:
      vocab_size: vocabulary size; all ids are smaller.
      width: bytes per id.
      fingerprint: fingerprint of the tokenizer that made the ids.
      tokenizer: name of that tokenizer.
      shards: records of the shards, oldest first.
      sources: paths and sizes in bytes of the files that were read.
    """

    vocab_size: int
    width: int
    fingerprint: str
    tokenizer: str
    shards: tuple[ShardRecord, ...]
    sources: tuple[tuple[str, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.tokens.num_bytes + shard.index.num_bytes for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Replace the manifest atomically: readers see the old one or the new one."""
        write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> DatastoreManifest:
        """Read the manifest of a datastore. Raises DatastoreError if there is no manifest, or if foredraft did not
        write it."""
        path = folder / MANIFEST
        if not path.is_file():
            unfinished = "an unfinished build" if (folder / "build.json").exists() else "no datastore"
            raise DatastoreError(
                f"{folder} contains {unfinished} ({MANIFEST} is missing); run foredraft datastore build"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            kind, version = data.pop("format", None), data.pop("version", None)
            if kind != FORMAT or version != VERSION:
                raise DatastoreError(not_ours(path, "datastore", "foredraft datastore build"))
            shards = tuple(shard_record(shard) for shard in data.pop("shards"))
            sources = tuple((str(name), int(size)) for name, size in data.pop("sources"))
            return cls(shards=shards, sources=sources, **data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, DatastoreError):
                raise
            raise DatastoreError(f"{path} is damaged ({error_text(error)}); copy it again") from None

    def check_files(self, folder: Path, *, checksums: bool = True) -> None:
        """Raise DatastoreError for the first file that is missing, truncated or changed."""
        for record in (file for shard in self.shards for file in (shard.tokens, shard.index)):
            path = folder / record.name
            if not path.is_file():
                raise DatastoreError(f"{path} is missing; copy the datastore again")
            size = path.stat().st_size
            if size != record.num_bytes:
                raise DatastoreError(
                    f"{path} has {size} bytes instead of {record.num_bytes}: truncated or replaced; copy it again"
                )
            if checksums and sha256_of(path) != record.sha256:
                raise DatastoreError(f"{path} is damaged (its checksum differs); copy it again")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None) -> None:
        """Raise TokenizerMismatchError if ids mean something else to the model that will use the datastore."""
        if tokenizer is not None and fingerprint_of(tokenizer) != self.fingerprint:
            raise TokenizerMismatchError(
                f"the datastore was built with the tokenizer of {self.tokenizer} (fingerprint "
                f"{self.fingerprint[:12]}), but the tokenizer of the model has {fingerprint_of(tokenizer)[:12]}; build "
                "one with foredraft datastore build --tokenizer MODEL"
            )
        if vocab_size is not None and self.vocab_size > vocab_size:
            raise TokenizerMismatchError(
                f"the datastore contains ids up to {self.vocab_size - 1}, but the vocabulary of the model has "
                f"{vocab_size} tokens; build one with the model's tokenizer"
            )


def shard_record(data: dict[str, Any]) -> ShardRecord:
    """Return the record of a shard from plain data."""
    files = {name: FileRecord(**data[name]) for name in ("tokens", "index")}
    return ShardRecord(**files, num_tokens=data["num_tokens"], num_documents=data["num_documents"])


def fingerprint_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the vocabulary. Tokenizers with equal digests map every id to the same text."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}\0{token}\0".encode())
    return digest.hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Write to a temporary file and rename it, so that a crash leaves the old content or the new."""
    beside = path.with_name(path.name + ".partial")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert errors of the operating system to DatastoreError with a remedy."""
    try:
        yield
    except DatastoreError:
        raise
    except OSError as error:
        remedy = "choose a directory that you may write to"
        if is_no_room(error):
            remedy = "make room and run the same command again; it continues where it stopped"
        raise DatastoreError(f"{folder} cannot be written: {error.strerror or error}; {remedy}") from None
