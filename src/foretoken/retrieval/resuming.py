"""What an interrupted build leaves on disk, so that the same call goes on where it was."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretoken.errors import DatastoreError
from foretoken.retrieval.manifest import ShardRecord, shard_record, write_json

STATE = "build.json"


@dataclass
class State:
    """How far a build has come. On disk it is never ahead of the token file.

    Args:
      settings: what has to be the same when a build goes on.
      file, piece: the next piece to read.
      shards: finished ones.
      open_bytes, open_documents: of the shard that is being written.
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
            raise DatastoreError(f"{path} is damaged ({error}); start over with --restart") from None
