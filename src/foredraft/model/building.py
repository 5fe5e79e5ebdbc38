"""Construction of models of `transformers` from a configuration and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from foredraft.progress import no_progress_bars


class WithoutCompiler(TorchFunctionMode):
    """Mode in which models are built on the meta device without torch's compiler, whose import takes seconds.

    On the meta device, torch initialises weights, makes ranges and does arithmetic in code that belongs to its
    compiler. There is nothing to initialise, and ranges (of positions, of frequencies) are made on the CPU. A function
    of tensors on both devices is computed on the meta device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            on_meta = torch.device(kwargs.get("device") or "cpu").type == "meta"
            return func(*args, **{**kwargs, "device": "cpu"} if on_meta else kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if any(tensor.is_meta for tensor in given):
            if getattr(func, "__module__", None) == "torch.nn.init":
                return given[0]
            args = tuple(map(_on_meta, args))
            kwargs = {name: _on_meta(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    is_elsewhere = isinstance(value, torch.Tensor) and not value.is_meta and value.dim() > 0
    return value.to("meta") if is_elsewhere else value


def without_weights(config: Any, *, trust_remote_code: bool = False) -> Any:
    """Build the modules of a model on the meta device."""
    with WithoutCompiler(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def fill(structure: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> bool:
    """Give a model on the meta device its tensors, without a copy. It is in evaluation mode afterwards.

    transformers would first make a table of the weights' names in all of its models, which takes half a second.

    Args:
      structure: result of `without_weights`.
      state: tensors of this dtype by name. Of tied weights, one is enough.
      dtype: dtype of the model.

    Returns: False for a model with other buffers than rotary frequencies, which may depend on the dtype, and unless the
      state has every weight and no other. The model is unchanged then.
    """
    weights = dict(structure.named_parameters(remove_duplicate=False))
    given = {weight: state[name] for name, weight in weights.items() if name in state}
    is_plain = all(name.endswith("inv_freq") and not buffer.is_meta for name, buffer in structure.named_buffers())
    if not is_plain or not weights.keys() >= state.keys() or not given.keys() >= set(weights.values()):
        return False
    made = {weight: nn.Parameter(tensor, weight.requires_grad) for weight, tensor in given.items()}
    for name, weight in weights.items():
        owner, _, own = name.rpartition(".")
        setattr(structure.get_submodule(owner), own, made[weight])
    structure.config.dtype = dtype
    structure.eval()
    return True


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
    with no_progress_bars(), WithoutCompiler():
        model, report = kind.from_pretrained(  # type: ignore[attr-defined]
            None, config=config, state_dict=dict(state), dtype=dtype, output_loading_info=True
        )
    for name, weight in model.named_parameters(remove_duplicate=False):
        given = state.get(name)
        if given is not None and weight.data_ptr() != given.data_ptr():
            weight.data = given  # transformers copies tensors whose rows share memory
    return model.eval(), sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
