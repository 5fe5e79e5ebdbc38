"""What a model consists of, known before its weights are read: the dtype that it is loaded in depends on it."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foretoken.gguf import model as gguf_model
from foretoken.gguf.header import Header
from foretoken.loading.checkpoint_errors import as_checkpoint_error
from foretoken.loading.sources import Source


class Structure:
    """The modules of a model without weights, and the configuration that they are built from.

    Args:
      source: where it lies.
      front: its configuration, or the header of its GGUF file.

    Raises: CheckpointError, UnsupportedModelError.
    """

    def __init__(self, source: Source, front: Any) -> None:
        self._source, self._front = source, front

    def __call__(self) -> torch.nn.Module:
        config = copy.deepcopy(self.config)
        vars(config).pop("quantization_config", None)
        with as_checkpoint_error(self._source, "configuration"), torch.device("meta"):
            model: torch.nn.Module = AutoModelForCausalLM.from_config(
                config, trust_remote_code=self._source.trust_remote_code
            )
        return model

    @cached_property
    def config(self) -> Any:
        """As `transformers` has it; of a GGUF file it takes seconds to read."""
        if not isinstance(self._front, Header):
            return self._front
        with as_checkpoint_error(self._source, "model"):
            return gguf_model.config_of(self._front)
