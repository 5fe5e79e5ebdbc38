"""Detection and reporting of damaged checkpoints: checks of the index and tensor names, and errors of the loaders."""

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

from foredraft.errors import CheckpointError, ForedraftError, error_in_words, is_panic
from foredraft.heads.checkpoint import INDEX, read_json, weight_map
from foredraft.loading.sources import Source, nearby


@contextmanager
def as_checkpoint_error(source: Source, what: str, method: str = "") -> Iterator[None]:
    """Turn every exception of a loader into a CheckpointError with the source, the part, the reason and the remedy.

    Args:
      source: source of the checkpoint.
      what: part that is loaded, for the message.
      method: quantisation method of weights that transformers has to read; empty if they are not quantised.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, ForedraftError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise CheckpointError(
            f"the {what} of {source.name} cannot be loaded ({error_in_words(error)}); {_remedy(source, error, method)}"
        ) from error


def _remedy(source: Source, error: BaseException, method: str) -> str:
    if source.is_gguf and source.is_local:
        return (
            f"transformers {transformers.__version__} cannot read this GGUF file; load the original model, try a newer "
            "transformers, or download the file again if it may be damaged"
        )
    if method and isinstance(error, ImportError):
        return (
            f"its weights have the layout of {method}, which foredraft leaves to transformers and another package: "
            "install that, or load the original model with quantization='int8' or 'int4'"
        )
    if not source.is_local:
        return (
            f"{nearby(source.name)}it is not a local directory and could not be fetched as a hub id: check the spelling"
            " and the network, or give a directory or zoo:tiny"
        )
    if isinstance(error, SafetensorError):
        return "a weight file is truncated or damaged: download or copy it again"
    return "the directory needs config.json and the weights as save_pretrained writes them"


_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""File names of weights in the order in which `transformers` looks for them. It looks for each before its index."""


def check_shards(source: Source, config: Any) -> None:
    """Check an unquantised checkpoint by its configuration, its index and the names of its tensors.

    Raises: CheckpointError for a damaged index, for an index with files outside its folder, for a tensor in two files
      if the loader would not read it from the file in the index, and for the errors of `check_layers`.
    """
    check_layers(source.name, config, len(_names_in(source)))


def check_layers(name: str, config: Any, num_tensors: int) -> None:
    """Raise CheckpointError if the configuration states more layers than there are tensors.

    The loader would create the modules of every layer before it noticed.

    Args:
      name: name of the checkpoint.
      config: its configuration.
      num_tensors: number of tensors; 0 if it is not known.
    """
    num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(num_layers, int) and (num_layers < 1 or 0 < num_tensors < num_layers):
        held = f", but its files contain {num_tensors} tensors" if num_tensors else ""
        raise CheckpointError(
            f"config.json of {name} states {num_layers} layers (num_hidden_layers){held}; download or save the "
            "checkpoint again"
        )


def _names_in(source: Source) -> set[str]:
    """Return the names of all tensors that are known without reading the weights."""
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
            f"{index} has no object named metadata, without which transformers {transformers.__version__} cannot read "
            'split weights; add "metadata": {} next to weight_map'
        )
    last: dict[str, str] = {}
    for file in sorted(set(files.values())):  # the loader's order
        if is_local and not os.path.isfile(index.parent / file):  # isfile also covers names that are too long
            raise CheckpointError(
                f"{index} names {file[:100]!r}, which does not exist; download or copy the checkpoint again"
            )
        for name in _names(index.parent / file):
            if name in last and files.get(name) != file:
                raise CheckpointError(
                    f"{index.parent} contains {name} in {last[name]} and in {file}; the latter would be loaded, "
                    f"but the index names {files.get(name, 'neither')}. One file may be left from an earlier save; "
                    "download or save the checkpoint again"
                )
            last[name] = file
    return set(last)


def _names(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file; none for a damaged file, which loading reports later."""
    if file.suffix != ".safetensors" or not file.is_file():
        return []
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError):
        return []


def _found(source: Source, name: str, *, fetch: bool = True) -> Path | None:
    """Return a file of a checkpoint; None if it does not exist, or is not cached and must not be fetched."""
    try:
        file = cached_file(
            source.location,
            name,
            revision=source.revision or "main",
            local_files_only=source.is_local or not fetch,
            _raise_exceptions_for_missing_entries=False,
        )
    except OSError:  # loading the weights will report the reason
        return None
    return None if file is None else Path(file)
