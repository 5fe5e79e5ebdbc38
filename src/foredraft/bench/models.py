"""The models that are measured: a pair from the zoo, grown in width until a forward costs what it does in practice."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from foredraft import zoo
from foredraft.engine.costs import CONTEXT, Forward, filled_cache, median_times
from foredraft.errors import ConfigError
from foredraft.loading.info import Loaded, eos_token_ids
from foredraft.loading.models import is_zoo, load_model
from foredraft.model.execution.rounding import ROUNDINGS, check_quantization, check_weights, round_weights
from foredraft.model.lm import CausalLM
from foredraft.testing.inflation import inflate, inflated_from

SCALES = {"none": None, "100m": (1024, 4096)}
"""Hidden and intermediate sizes of the target, by name; "100m" makes 98.6 M parameters of zoo:tiny."""

_WIDTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16)  # of an inflated drafter, as multiples of its own


@dataclass(frozen=True)
class Pair:
    """A target, its drafter (None where there is none) and their tokenizer, as transformers objects.

    Args:
      target: in its dtype, however this library reads its weights.
      zoo_name: of a target of the zoo, inflated or not.
      quantization: that this library rounds the target's linear layers by, or "stored".
      stored: the target once more, multiplying by the weights of its file.
    """

    target: Any
    drafter: Any
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    zoo_name: str | None = None
    quantization: str | None = None
    stored: Loaded | None = None

    def adapted(self, execution: str) -> CausalLM:
        """The target as this library decodes it."""
        if self.stored is not None:
            return CausalLM(self.stored.model, execution=execution, quantization=self.stored.quantization)
        return CausalLM(self.target, execution=execution, quantization=self.quantization)

    def reference(self) -> Any:
        """The same target for any other code: a copy that holds the rounded weights, where they are rounded."""
        if self.quantization not in ROUNDINGS:
            return self.target
        copied = copy.deepcopy(self.target)
        round_weights(copied, self.quantization)
        return copied

    @property
    def label(self) -> str:
        """For tables; says so when a model is inflated."""
        parts = [describe(self.target)]
        return " + ".join([*parts, describe(self.drafter)] if self.drafter is not None else parts)


def describe(model: Any) -> str:
    """Parameters and shape, and what an inflated model was before."""
    config = model.config
    layers = f"{config.num_hidden_layers} layer{'' if config.num_hidden_layers == 1 else 's'}"
    shape = f"hidden {config.hidden_size}, ffn {config.intermediate_size}, {layers}"
    old = inflated_from(model)
    grown = f"; inflated in width from hidden {old['hidden_size']}" if old else ""
    return f"{model.num_parameters() / 1e6:.1f} M ({shape}{grown})"


def load_pair(
    model: str, draft_model: str | None, dtype: str, *, quantization: str | None = None, weights: str | None = None
) -> Pair:
    """Load a target and its drafter; a model of the zoo may bring its own.

    Raises: CheckpointError, ConfigError.
    """
    check_quantization(quantization)
    check_weights(weights, quantization)
    target = load_model(model, dtype=dtype)
    is_dense = target.quantization is None  # else the checkpoint holds whole numbers, which are what both run
    stored = load_model(model, dtype=dtype, weights=weights) if weights is not None and is_dense else None
    zoo_name = model if is_zoo(model) else None
    name = draft_model or (zoo_name if zoo_name is not None and zoo.brings(zoo_name, "draft") else None)
    drafter = None if name is None else load_model(name, part="draft", dtype=target.model.dtype).model
    eos = tuple(eos_token_ids(target.model))
    return Pair(target.model, drafter, target.tokenizer, eos, zoo_name, quantization or target.quantization, stored)


def scaled(pair: Pair, scale: str, vocab_size: int | None = None) -> Pair:
    """The pair with its target inflated (width only), and both vocabularies padded where that is asked for.

    Raises: ConfigError for an unknown scale.
    """
    hidden, ffn = sizes(scale) or (0, 0)
    if not hidden and vocab_size is None:
        return pair
    _check_inflatable(scale, is_stored=pair.stored is not None)
    config = pair.target.config
    target = inflate(
        pair.target,
        hidden_size=hidden or config.hidden_size * 2,
        intermediate_size=ffn or config.intermediate_size,
        vocab_size=vocab_size,
    )
    drafter = pair.drafter
    if drafter is not None and vocab_size is not None:
        drafter = widened(drafter, 2, vocab_size)
    return replace(pair, target=target, drafter=drafter)


def sizes(scale: str) -> tuple[int, int] | None:
    """Hidden and intermediate size of a scale: a name of `SCALES`, or HIDDENxFFN.

    Raises: ConfigError.
    """
    if scale in SCALES:
        return SCALES[scale]
    hidden, by, ffn = scale.partition("x")
    if not (by and hidden.isdigit() and ffn.isdigit()):
        raise ConfigError(f"scale is {scale!r}; give {', '.join(SCALES)} or HIDDENxFFN, such as 1024x4096")
    return int(hidden), int(ffn)


def _check_inflatable(scale: str, *, is_stored: bool) -> None:
    if is_stored:
        raise ConfigError(
            f"weights='stored' multiplies by the numbers in the file, and scale={scale!r} makes a wider model, which "
            "no file holds; leave one of the two out"
        )


def load_scaled(
    model: str, scale: str, *, dtype: str, quantization: str | None, weights: str | None
) -> tuple[Loaded, Loaded]:
    """A target as it is, and inflated in width where that is asked for: such a one is rounded by its adapter.

    Raises: CheckpointError, ConfigError.
    """
    if sizes(scale) is None:
        loaded = load_model(model, dtype=dtype, quantization=quantization, weights=weights)
        return loaded, loaded
    check_quantization(quantization)
    check_weights(weights, quantization)
    _check_inflatable(scale, is_stored=weights is not None)
    loaded = replace(load_model(model, dtype=dtype), quantization=quantization)
    return loaded, inflated(loaded, scale)


def inflated(loaded: Loaded, scale: str) -> Loaded:
    """The model, inflated in width where that is asked for; see `sizes`."""
    wanted = sizes(scale)
    if wanted is None:
        return loaded
    grown = inflate(loaded.model, hidden_size=wanted[0], intermediate_size=wanted[1])
    return Loaded.of(grown, f"{loaded.name}, inflated", True, loaded.tokenizer, quantization=loaded.quantization)


def widened(model: Any, factor: int, vocab_size: int | None = None) -> Any:
    """A drafter inflated in width."""
    config = model.config
    if factor == 1 and vocab_size is None:
        return model
    return inflate(
        model,
        hidden_size=config.hidden_size * factor,
        intermediate_size=config.intermediate_size * factor,
        vocab_size=vocab_size,
    )


def drafter_of_cost(pair: Pair, target: CausalLM, cost: float) -> tuple[Any, float]:
    """The drafter inflated until one of its forwards costs about ``cost`` of the target's; and what it measures.

    The cost grows with the width, so the widths are bisected for the first that is expensive enough; of that one
    and its neighbour the nearer is taken.
    """
    low, high = 0, len(_WIDTHS) - 1
    measured: dict[int, tuple[Any, float]] = {}

    def at(index: int) -> tuple[Any, float]:
        if index not in measured:
            model = widened(pair.drafter, _WIDTHS[index])
            measured[index] = model, relative_cost(target, CausalLM(model))
        return measured[index]

    while low < high:
        middle = (low + high) // 2
        if at(middle)[1] < cost:
            low = middle + 1
        else:
            high = middle
    candidates = [at(index) for index in (low - 1, low) if index >= 0]
    return min(candidates, key=lambda candidate: abs(candidate[1] - cost))


def relative_cost(target: CausalLM, drafter: CausalLM, context: int = CONTEXT, repeats: int = 9) -> float:
    """Median seconds of a drafter's forward over one token, divided by the target's, interleaved."""
    forwards = [Forward(model, filled_cache(model, context, 1)[0]) for model in (target, drafter)]
    dear, cheap = median_times(forwards, repeats)
    return cheap / dear
