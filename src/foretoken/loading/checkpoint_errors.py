"""Errors of loading: everything that loaders raise, with where, what and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from safetensors import SafetensorError

from foretoken.errors import CheckpointError, ForetokenError
from foretoken.loading.sources import Source, nearby


@contextmanager
def as_checkpoint_error(source: Source, what: str, method: str = "") -> Iterator[None]:
    """Everything that loaders raise becomes a CheckpointError that says where, what and what to do.

    Args:
      what: is loaded.
      method: by what the weights are quantised that transformers has to read; empty where they are not.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, ForetokenError):
        raise
    except Exception as error:
        detail = " ".join(str(error).split())
        raise CheckpointError(
            f"the {what} of {source.name} cannot be loaded ({type(error).__name__}: {detail[:300]}); "
            f"{_remedy(source, error, method)}"
        ) from error


def _remedy(source: Source, error: Exception, method: str) -> str:
    if source.is_gguf and source.is_local:
        return (
            f"transformers {transformers.__version__} cannot read this GGUF file; load the original model, try a newer "
            "transformers, or download the file again if it may be damaged"
        )
    if method and isinstance(error, ImportError):
        return (
            f"its weights have the layout of {method}, which foretoken leaves to transformers and a package of its "
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
