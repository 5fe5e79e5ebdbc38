"""Construction of models of `transformers` from a configuration and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foredraft.progress import no_progress_bars


def without_weights(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build the modules of a model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def build(
    kind: type, config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[Any, list[str], list[str]]:
    """Build a model from its tensors. The model uses the tensors without a copy.

    Args:
      kind: class of the model.
      config: configuration of the model, without quantisation settings.
      state: tensors of this dtype by name. Of tied weights, one is enough.
      dtype: dtype of the model.

    Returns: the model in evaluation mode; the names of its weights that are missing in ``state``, which have random
      values; and the names in ``state`` that the model does not have.
    """
    with no_progress_bars():
        model, report = kind.from_pretrained(  # type: ignore[attr-defined]
            None, config=config, state_dict=dict(state), dtype=dtype, output_loading_info=True
        )
    for name, weight in model.named_parameters(remove_duplicate=False):
        given = state.get(name)
        if given is not None and weight.data_ptr() != given.data_ptr():
            weight.data = given  # transformers copies tensors whose rows share memory
    return model.eval(), sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
