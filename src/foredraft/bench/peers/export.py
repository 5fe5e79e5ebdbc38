"""What a race hands to other engines: checkpoints that all of them read, written once, and prompts as token ids."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft import zoo
from foredraft.bench.models import load_pair, scaled
from foredraft.bench.workload import BenchPrompt, prompts_of_kinds, read_questions
from foredraft.folders import cache_folder
from foredraft.loading.models import is_zoo, load_tokenizer

_FACTS = "facts.json"


@dataclass(frozen=True)
class Exported:
    """A folder with ``target`` and, where there is a second model, ``draft``: checkpoints in float32, which holds half
    precision exactly. Engines leave there what they convert them to.

    Args:
      models: for tables.
      dtype: that the checkpoint is computed in where nothing else is asked for.
    """

    folder: Path
    models: str
    dtype: str

    @property
    def has_draft(self) -> bool:
        return (self.folder / "draft").exists()


def export(model: str, draft_model: str | None, scale: str, say: Callable[[str], None] = lambda _: None) -> Exported:
    """The checkpoints of a model and of its drafter, where it has one; written where they are not there yet.

    Args:
      scale: width to inflate the target to; see `foredraft.bench.models.sizes`.

    Raises: CheckpointError, ConfigError.
    """
    folder = cache_folder("peers", "models", _name(model, draft_model, scale))
    facts = folder / _FACTS
    if not facts.exists():
        say(f"exporting {model} to {folder}")
        unfinished = folder.with_name(f"{folder.name}-unfinished-{os.getpid()}")
        try:
            _write(model, draft_model, scale, unfinished)
            unfinished.replace(folder)
        except OSError:
            if not facts.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(folder, **json.loads(facts.read_text(encoding="utf-8")))


def _write(model: str, draft_model: str | None, scale: str, out: Path) -> None:
    pair = load_pair(model, draft_model, "auto")
    dtype = str(pair.target.dtype).removeprefix("torch.")
    for part in (pair.target, pair.drafter):
        if part is not None:
            cast(part, torch.float32)
    big = scaled(pair, scale)
    for name, part in {"target": big.target, "draft": big.drafter}.items():
        if part is not None:
            part.save_pretrained(out / name)
            if pair.tokenizer is not None:
                pair.tokenizer.save_pretrained(out / name)
    facts = asdict(Exported(out, big.label, dtype))
    del facts["folder"]
    (out / _FACTS).write_text(json.dumps(facts), encoding="utf-8")  # last: its presence says that all is there


def cast(model: Any, dtype: torch.dtype) -> None:
    """The parameters in another dtype, in place; buffers, such as the frequencies of rotations, keep theirs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def _name(model: str, draft_model: str | None, scale: str) -> str:
    """Readable, and another one for other files under the same name."""
    parts = [model, *([] if draft_model is None else [draft_model]), scale]
    readable = re.sub(r"[^\w.-]+", "-", " ".join(Path(part).name for part in parts)).strip("-")
    files = [_files(part) for part in parts[:-1]]
    return f"{readable}-{hashlib.sha256(repr((parts, files)).encode()).hexdigest()[:10]}"


def _files(model: str) -> list[tuple[str, int, int]]:
    """What lies in the model's folder: names, sizes and times; nothing for a hub id."""
    folder = zoo.path(model) if is_zoo(model) else Path(model).expanduser()
    if folder.is_file():
        return [(folder.name, folder.stat().st_size, folder.stat().st_mtime_ns)]
    if not folder.is_dir():
        return []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]


def prompts_of(
    target: Path,
    kinds: tuple[str, ...] | None,
    prompts_file: Path | None,
    max_new_tokens: int,
    answer: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> Iterator[BenchPrompt]:
    """Prompts of the kinds in turn; those that leave no room for the output are left out.

    Args:
      target: the checkpoint.
      kinds, answer: as in `prompts_of_kinds`.

    Raises: ConfigError for a kind that no prompt has.
    """
    tokenizer: Any = load_tokenizer(target) if (target / "tokenizer_config.json").exists() else None
    context = json.loads((target / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    room = None if context is None else context - max_new_tokens
    return prompts_of_kinds(tokenizer, read_questions(prompts_file), kinds, room, answer)
