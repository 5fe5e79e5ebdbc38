"""Files in which drafters keep what they have learned: tensors with a format and a few words about them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from foredraft.errors import CheckpointError, DatastoreError
from foredraft.folders import not_ours, replacing


def check_writable(file: Path) -> None:
    """Raises: CheckpointError for a state file in a directory that is not there, or is not ours."""
    if not os.access(file.parent, os.W_OK):
        raise CheckpointError(f"state_file {file} cannot be written; check that its directory exists and is yours")


@contextmanager
def warned() -> Iterator[None]:
    """Turn a state that cannot be saved into a warning: what was generated is worth more than what was learned."""
    try:
        yield
    except (CheckpointError, DatastoreError) as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def save_state(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], about: Mapping[str, object]) -> None:
    """Write a safetensors file, whole or not at all.

    Args:
      about: its format, and what else is to be known.

    Raises: CheckpointError where that is not possible.
    """
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        with replacing(target, part):
            save_file(dict(tensors), part, {name: str(value) for name, value in about.items()})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}; check the directory and its space") from None


def read_state(path: str | os.PathLike[str], form: str, name: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """What `save_state` wrote: words about it, and the tensors.

    Args:
      form: its format.
      name: kind of file, for messages.

    Raises: CheckpointError for a file that is missing, truncated or of another kind.
    """
    try:
        with safe_open(path, framework="np") as file:
            about = file.metadata() or {}
            if about.get("format") != form:
                raise CheckpointError(not_ours(path, name, "a state_file of another name"))
            return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}; check the path, or save it again") from None
