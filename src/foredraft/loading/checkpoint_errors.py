"""Faults of a checkpoint: told by its index and the names of tensors, which `transformers` follows
wherever they lead, or by what its loader raised."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from foredraft.errors import CheckpointError, ForedraftError, is_panic
from foredraft.heads.checkpoint import INDEX, read_json, weight_map
from foredraft.loading.sources import Source, nearby


@contextmanager
def as_checkpoint_error(source: Source, what: str, method: str = "") -> Iterator[None]:
    """Everything that loaders raise becomes a CheckpointError that says where, what and what to do.

    Args:
      what: is loaded.
      method: by what the weights are quantised that transformers has to read; empty where they are not.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, ForedraftError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        detail = " ".join(str(error).split())
        raise CheckpointError(
            f"the {what} of {source.name} cannot be loaded ({type(error).__name__}: {detail[:300]}); "
            f"{_remedy(source, error, method)}"
        ) from error


def _remedy(source: Source, error: BaseException, method: str) -> str:
    if source.is_gguf and source.is_local:
        return (
            f"transformers {transformers.__version__} cannot read this GGUF file; load the original model, try a newer "
            "transformers, or download the file again if it may be damaged"
        )
    if method and isinstance(error, ImportError):
        return (
            f"its weights have the layout of {method}, which foredraft leaves to transformers and a package of its "
            "own: install that, or load the model that it was made from, with quantization='int8' or 'int4'"
        )
    if not source.is_local:
        return (
            f"{nearby(source.name)}it is not a directory here and could not be fetched as a hub id: check the spelling "
            "and the network, or give a directory or zoo:tiny"
        )
    if isinstance(error, SafetensorError):
        return "a weight file is truncated or damaged: download or copy it again"
    return "the directory needs config.json and the weights as save_pretrained writes them"


_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Names of files of weights, in the order in which `transformers` looks for them, each before its index."""


def check_shards(source: Source, config: Any) -> None:
    """Check a plain checkpoint as far as its configuration, its index and the names of its tensors tell.

    Raises: CheckpointError for an index that is damaged or names files outside of its folder, for a tensor in two files
      of which another than that of the index would be read, and as `check_layers`.
    """
    check_layers(source.name, config, len(_names_in(source)))


def check_layers(name: str, config: Any, num_tensors: int) -> None:
    """Raises: CheckpointError for more layers than there are tensors: modules would be made of each first.

    Args:
      name: of the checkpoint.
      num_tensors: 0 where it is not known.
    """
    num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(num_layers, int) and (num_layers < 1 or 0 < num_tensors < num_layers):
        held = f", and its files hold {num_tensors} tensors" if num_tensors else ""
        raise CheckpointError(
            f"config.json of {name} states {num_layers} layers (num_hidden_layers){held}; download or save the "
            "checkpoint again"
        )


def _names_in(source: Source) -> set[str]:
    """Names of all tensors, as far as they are known without reading them."""
    for weights in _WEIGHTS:
        whole = _found(source, weights, fetch=False)
        if whole is not None:
            return set(_names(whole))
        index = _found(source, weights + INDEX)
        if index is not None:
            return _split_names(index, is_local=source.is_local)
    return set()


def _split_names(index: Path, *, is_local: bool) -> set[str]:
    files = weight_map(index)
    if not isinstance(read_json(index).get("metadata"), dict):
        raise CheckpointError(
            f"{index} has no object named metadata, without which transformers {transformers.__version__} reads no "
            'split weights; write "metadata": {} into it, beside weight_map'
        )
    last: dict[str, str] = {}
    for file in sorted(set(files.values())):  # the order in which they are read
        if is_local and not os.path.isfile(index.parent / file):  # also of a name that is too long
            raise CheckpointError(
                f"{index} names {file[:100]!r}, which is not there; download or copy the checkpoint again"
            )
        for name in _names(index.parent / file):
            if name in last and files.get(name) != file:
                raise CheckpointError(
                    f"{index.parent} holds {name} in {last[name]} and in {file}, of which the latter would be read, "
                    f"and the index names {files.get(name, 'neither')}: one of them may be left of an earlier save; "
                    "download or save the checkpoint again"
                )
            last[name] = file
    return set(last)


def _names(file: Path) -> list[str]:
    """Names of the tensors in a file of safetensors; none for a damaged file, which loading reports."""
    if file.suffix != ".safetensors" or not file.is_file():
        return []
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError):
        return []


def _found(source: Source, name: str, *, fetch: bool = True) -> Path | None:
    """A file of a checkpoint; None where there is none, or it is not here and not to be fetched."""
    try:
        file = cached_file(
            source.location,
            name,
            revision=source.revision or "main",
            local_files_only=source.is_local or not fetch,
            _raise_exceptions_for_missing_entries=False,
        )
    except OSError:  # loading the weights will say what is wrong
        return None
    return None if file is None else Path(file)
