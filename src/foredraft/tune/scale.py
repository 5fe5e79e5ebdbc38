"""Models inflated in width, for timing a search at the cost of a larger model."""

from __future__ import annotations

from dataclasses import replace

from foredraft.errors import ConfigError
from foredraft.loading.info import Loaded
from foredraft.loading.models import load_model
from foredraft.model.execution.rounding import DEQUANTIZED, STORED, check_quantization, check_weights
from foredraft.testing.inflation import inflate

SCALES = {"none": None, "100m": (1024, 4096)}
"""Hidden and intermediate sizes of the target, by name; "100m" makes 98.6 M parameters of zoo:tiny."""


def sizes(scale: str) -> tuple[int, int] | None:
    """Return the hidden and intermediate size of a scale: a name of `SCALES`, or HIDDENxFFN. None means no inflation.

    Raises: ConfigError for any other scale.
    """
    if scale in SCALES:
        return SCALES[scale]
    hidden, by, ffn = scale.partition("x")
    if not (by and hidden.isdigit() and ffn.isdigit()):
        raise ConfigError(f"scale is {scale!r}; use {', '.join(SCALES)} or HIDDENxFFN, such as 1024x4096")
    return int(hidden), int(ffn)


def load_scaled(
    model: str, scale: str, *, dtype: str, quantization: str | None, weights: str | None
) -> tuple[Loaded, Loaded]:
    """Load a target, and return it as it is and inflated. Only the inflated copy is quantised.

    Raises: CheckpointError, ConfigError.
    """
    if sizes(scale) is None:
        loaded = load_model(model, dtype=dtype, quantization=quantization, weights=weights)
        return loaded, loaded
    check_quantization(quantization)
    check_weights(weights, quantization)
    if weights == STORED:
        raise ConfigError(
            f"weights='stored' uses the weights as stored in the file, but scale={scale!r} makes a wider model; "
            "leave one of the two out"
        )
    loaded = replace(load_model(model, dtype=dtype, weights=DEQUANTIZED), quantization=quantization)
    return loaded, inflated(loaded, scale)


def inflated(loaded: Loaded, scale: str) -> Loaded:
    """Return the model inflated to a scale, or the model itself for the scale "none"; see `sizes`."""
    wanted = sizes(scale)
    if wanted is None:
        return loaded
    grown = inflate(loaded.model, hidden_size=wanted[0], intermediate_size=wanted[1])
    return Loaded.of(grown, f"{loaded.name}, inflated", True, loaded.tokenizer, quantization=loaded.quantization)
