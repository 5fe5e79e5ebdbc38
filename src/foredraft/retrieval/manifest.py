"""The manifest of a datastore, and the checks that it is complete and belongs to the tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import DatastoreError, TokenizerMismatchError, described
from foredraft.folders import is_no_room, not_ours, sha256_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "foredraft-datastore"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """One shard: two files, and how much they hold."""

    tokens: FileRecord
    index: FileRecord
    num_tokens: int
    num_documents: int


@dataclass(frozen=True)
class DatastoreManifest:
    """A finished datastore.

    Args:
      vocab_size: ids are smaller.
      width: bytes per id.
      fingerprint: of the tokenizer that made the ids.
      tokenizer: how it was called.
      shards: oldest first.
      sources: the files that were read, with their bytes.
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
        """Replace the manifest in one step: readers see the old one or the new one."""
        write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> DatastoreManifest:
        """Raises: DatastoreError when there is none, or it was not written by foredraft."""
        path = folder / MANIFEST
        if not path.is_file():
            unfinished = "an unfinished build" if (folder / "build.json").exists() else "no datastore"
            raise DatastoreError(f"{folder} holds {unfinished} ({MANIFEST} is missing); run foredraft datastore build")
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
            raise DatastoreError(f"{path} is damaged ({described(error)}); copy it again") from None

    def check_files(self, folder: Path, *, checksums: bool = True) -> None:
        """Raises: DatastoreError for the first file that is missing, truncated or changed."""
        for record in (file for shard in self.shards for file in (shard.tokens, shard.index)):
            path = folder / record.name
            if not path.is_file():
                raise DatastoreError(f"{path} is missing; copy the datastore again")
            size = path.stat().st_size
            if size != record.num_bytes:
                raise DatastoreError(
                    f"{path} has {size} bytes instead of {record.num_bytes}: truncated or foreign; copy it again"
                )
            if checksums and sha256_of(path) != record.sha256:
                raise DatastoreError(f"{path} is damaged (its checksum differs); copy it again")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None) -> None:
        """Raises: TokenizerMismatchError unless the ids mean the same to the model that will read them."""
        if tokenizer is not None and fingerprint_of(tokenizer) != self.fingerprint:
            raise TokenizerMismatchError(
                f"the datastore was built with the tokenizer of {self.tokenizer} (fingerprint "
                f"{self.fingerprint[:12]}), the model's has {fingerprint_of(tokenizer)[:12]}; build one with "
                "foredraft datastore build --tokenizer MODEL"
            )
        if vocab_size is not None and self.vocab_size > vocab_size:
            raise TokenizerMismatchError(
                f"the datastore holds ids up to {self.vocab_size - 1}, the model has {vocab_size}; build one with the "
                "model's tokenizer"
            )


def shard_record(data: dict[str, Any]) -> ShardRecord:
    """From plain data."""
    files = {name: FileRecord(**data[name]) for name in ("tokens", "index")}
    return ShardRecord(**files, num_tokens=data["num_tokens"], num_documents=data["num_documents"])


def fingerprint_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of the vocabulary: two tokenizers with the same one give every id the same text."""
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{token_id}\0{token}\0".encode())
    return digest.hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Write beside the file, then rename: a crash leaves the old content or the new, never half of it."""
    beside = path.with_name(path.name + ".partial")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a DatastoreError that says what to do."""
    try:
        yield
    except DatastoreError:
        raise
    except OSError as error:
        remedy = "choose a directory that you may write to"
        if is_no_room(error):
            remedy = "make room and run the same command again; it goes on where it stopped"
        raise DatastoreError(f"{folder} cannot be written: {error.strerror or error}; {remedy}") from None
