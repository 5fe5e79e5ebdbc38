"""Files with the learned state of drafters: tensors, a format name and metadata."""

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
    """Check that a state file can be written.

    Raises: CheckpointError if its directory does not exist or is not writable.
    """
    if not os.access(file.parent, os.W_OK):
        raise CheckpointError(
            f"state_file {file} cannot be written; check that its directory exists and that you may write to it"
        )


@contextmanager
def warned() -> Iterator[None]:
    """Turn an error while saving a state into a warning, because the generated text is worth more than the state."""
    try:
        yield
    except (CheckpointError, DatastoreError) as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def save_state(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], about: Mapping[str, object]) -> None:
    """Write a safetensors file atomically.

    Args:
      path: file to write.
      tensors: arrays by name.
      about: metadata, including the format name.

    Raises: CheckpointError if the file cannot be written.
    """
    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        with replacing(target, part):
            save_file(dict(tensors), part, {name: str(value) for name, value in about.items()})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{target} cannot be written: {error}; check the directory and its space") from None


def read_state(path: str | os.PathLike[str], form: str, name: str) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Read the metadata and the tensors that `save_state` wrote.

    Args:
      path: file to read.
      form: expected format name.
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
