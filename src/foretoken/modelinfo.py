"""What is known about a model in memory, for messages and for `foretoken info`."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foretoken.engine.model import CausalLM


@dataclass(frozen=True)
class Loaded:
    """A model in memory.

    Args:
      is_owned: the library loaded it, so nobody else holds its weights.
      num_parameters, weight_bytes: counted before any execution mode touches the weights; tied ones once.
    """

    model: PreTrainedModel
    name: str
    is_owned: bool
    tokenizer: PreTrainedTokenizerBase | None
    num_parameters: int
    weight_bytes: int

    @classmethod
    def of(
        cls, model: PreTrainedModel, name: str, is_owned: bool, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> Loaded:
        """Count, and keep."""
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        return cls(model, name, is_owned, tokenizer, sum(weight.numel() for weight in model.parameters()), size)


@dataclass(frozen=True)
class ModelInfo:
    """What is loaded, and how it runs.

    Args:
      num_parameters, weight_bytes: tied weights once, packed copies not counted.
      supports_trees: verdict of the probe; chains always pass, or the model is refused.
    """

    name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    dtype: str
    device: str
    execution: str
    supports_trees: bool
    vocab_size: int
    context_length: int | None


def describe(loaded: Loaded, lm: CausalLM) -> ModelInfo:
    """What there is to say about a model and its adapter."""
    return ModelInfo(
        name=loaded.name,
        architecture=type(loaded.model).__name__,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        dtype=str(lm.dtype).removeprefix("torch."),
        device=str(lm.device),
        execution=lm.execution.describe(),
        supports_trees=lm.supports_trees,
        vocab_size=lm.vocab_size,
        context_length=lm.context_length,
    )


def model_name(model: PreTrainedModel) -> str:
    """How a loaded model is called in messages."""
    path = str(getattr(model, "name_or_path", "") or "")
    return f"{type(model).__name__} ({path})" if path else type(model).__name__
