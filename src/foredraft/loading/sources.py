"""Resolution of model names: a directory, a hub id, an entry of the zoo, or a GGUF file."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from foredraft import zoo
from foredraft.config.speculative import SpeculativeConfig
from foredraft.errors import CheckpointError, ConfigError
from foredraft.gguf.header import is_gguf, part_names
from foredraft.model.support import READABLE

logger = logging.getLogger("foredraft")

ZOO = zoo.PREFIX
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


@dataclass(frozen=True)
class Source:
    """Location of a model.

    Args:
      location: a directory, a hub id, or a GGUF file.
      name: name in messages.
      revision: branch, tag or commit of a hub id.
      trust_remote_code: run modelling code from the checkpoint.
      gguf_file: name of a GGUF file at a hub id, which is downloaded.
    """

    location: str
    name: str
    revision: str | None = None
    trust_remote_code: bool = False
    gguf_file: str | None = None

    @property
    def is_local(self) -> bool:
        return os.path.exists(self.location)

    @property
    def is_gguf(self) -> bool:
        return self.gguf_file is not None or os.path.isfile(self.location)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for every ``from_pretrained``."""
        return {
            "revision": self.revision or "main",
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": self.is_local,
        }


def resolve(
    model: str | os.PathLike[str],
    *,
    part: str = "target",
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
) -> Source:
    """Find the source that a model name refers to.

    Raises: CheckpointError for a path that does not exist, and for a file that is not GGUF; ConfigError for a value
      that is not a name, and for a directory with several GGUF files if ``gguf_file`` selects none of them.
    """
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise ConfigError(f"model is {model!r}; give a directory, a hub id, zoo:NAME or a loaded PreTrainedModel")
    name = os.fspath(model)
    if gguf_file is not None and (name.startswith(ZOO) or os.path.isfile(os.path.expanduser(name))):
        raise ConfigError(
            f"gguf_file is {gguf_file!r}, but {name} is a single model already; give it with a directory or hub id"
        )
    if name.startswith(ZOO):
        if part == "draft" and not zoo.includes(name, part):  # the model itself is to be the drafter
            part = "target"
        source = Source(str(zoo.path(name, part)), name if part == "target" else f"{name} ({part})")
        READABLE[source.location] = source.name
        return source
    location = os.path.expanduser(name)
    if os.path.isfile(location):
        if not location.endswith(".gguf") and not is_gguf(location):
            raise CheckpointError(
                f"{name} is a file; give the directory that contains config.json and the weights, or a GGUF file"
            )
        return Source(location, name)
    if os.path.isdir(location):
        is_enough = part == "tokenizer" and gguf_file is None and has_tokenizer(location)
        file = None if is_enough else _gguf_in(location, name, gguf_file)
        return Source(location, name, revision, trust_remote_code) if file is None else Source(file, name)
    check_exists(name)
    if not _is_cached(name, revision):
        logger.info("%s is not a local directory, so it is looked up on the hub", name)
    return Source(location, name, revision, trust_remote_code, gguf_file)


def check_exists(model: object) -> None:
    """Raise CheckpointError for a name that can only be a path and does not exist."""
    if not isinstance(model, (str, os.PathLike)):
        return
    name = os.fspath(model)
    is_path = isinstance(name, str) and (_looks_like_path(name) or name.endswith(".gguf"))
    if is_path and not os.path.exists(os.path.expanduser(name)):
        raise CheckpointError(
            f"{name} does not exist; {nearby(name)}give a directory, a hub id (owner/name) or zoo:NAME"
        )


def check_parts(config: SpeculativeConfig) -> None:
    """Raise CheckpointError or ConfigError if the model or a file of a drafter does not exist. Loads nothing."""
    for part in config.parts:
        check_exists(part.model)
        part.options.check_paths()


def _gguf_in(directory: str, name: str, wanted: str | None) -> str | None:
    """Return the GGUF file to read in a directory: the named one, or the only one if there is no other model."""
    if wanted is not None:
        file = os.path.join(directory, wanted)
        if os.path.isfile(file):
            return file
        raise CheckpointError(f"{name} has no file {wanted!r}{_listed(directory)}; check gguf_file")
    if os.path.exists(os.path.join(directory, "config.json")):
        return None
    files = _gguf_files(directory)
    if len(files) > 1:
        raise ConfigError(f"{name} is a directory with {len(files)} models{_listed(directory)}; choose one: gguf_file")
    return os.path.join(directory, files[0]) if files else None


def _gguf_files(directory: str) -> list[str]:
    """Return the names of GGUF files in a directory; of models in several files, the first one."""
    files = {part_names(file)[0] for file in os.listdir(directory) if file.endswith(".gguf")}
    return sorted(files)


def _listed(directory: str) -> str:
    files = _gguf_files(directory)
    return f" ({', '.join(files[:6])}{', ...' if len(files) > 6 else ''})" if files else ""


def nearby(name: str) -> str:
    """Suggest a directory with a name similar to that of a missing path; empty if there is none."""
    parent, wanted = os.path.split(name)
    try:
        found = [each.name for each in os.scandir(parent or ".") if each.is_dir()]
    except OSError:
        return ""
    near = get_close_matches(wanted, found, n=1)
    return f"did you mean {os.path.join(parent, near[0])}? " if near else ""


def _is_cached(name: str, revision: str | None) -> bool:
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except ValueError:  # not a valid hub id
        return False


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or (os.sep != "/" and os.sep in name)


def has_tokenizer(directory: str) -> bool:
    """Whether a directory contains a tokenizer."""
    return any((Path(directory) / file).exists() for file in TOKENIZER_FILES)
