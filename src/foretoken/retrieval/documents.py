"""A datastore of documents that are token ids already."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretoken.errors import CorpusError
from foretoken.retrieval.build import Progress, ShardLimits, indexed
from foretoken.retrieval.manifest import DatastoreManifest, ShardRecord, writing
from foretoken.retrieval.shard import PADDING, encode, width_of


def from_tokens(
    documents: Iterable[Seq[int] | npt.NDArray[np.integer[Any]]],
    out: str | Path,
    *,
    vocab_size: int,
    max_shard_tokens: int | None = None,
    num_tokens: int | None = None,
    progress: Progress | None = None,
) -> DatastoreManifest:
    """Write a datastore of documents that are token ids already; it belongs to no tokenizer.

    Args:
      documents: taken one at a time, so they need not fit into memory.
      max_shard_tokens: exceeded by one document at most; by default what 2 GB of memory can sort.
      num_tokens: how many there will be, where that is known; for ``progress`` only.

    Raises: CorpusError when there is no token; DatastoreError.
    """
    folder, width = Path(out), width_of(vocab_size)
    limit = max_shard_tokens or ShardLimits().shard_tokens(width)
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
            raise CorpusError("the corpus is empty: no document holds a token")
        manifest = DatastoreManifest(vocab_size, width, "", "", tuple(shards), ())
        manifest.write(folder)
    return manifest
