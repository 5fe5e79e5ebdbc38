"""Settings for transformers' ``generate`` that give the same distribution as `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig

from foredraft.config.sampling import SamplingParams

NO_TOKEN = 2**31 - 1
"""An id outside every vocabulary. transformers warns about negative ids."""


def generation_config(
    params: SamplingParams, eos_token_ids: Sequence[int], options: Mapping[str, Any] | None = None
) -> GenerationConfig:
    """Return a config with which transformers' ``generate`` draws from the distribution of these parameters.

    Args:
      params: sampling parameters; temperature, top-k, top-p, min-p, typical-p, repetition penalty and length are
        used.
      eos_token_ids: tokens that end an output unless EOS is ignored. These tokens replace the EOS tokens of the model's
        own config.
      options: further keys of the generation config.
    """
    chosen: dict[str, Any] = {"do_sample": not params.is_greedy}
    if not params.is_greedy:
        chosen |= {name: getattr(params, name) for name in ("temperature", "top_p", "typical_p", "top_k")}
        chosen["min_p"] = params.min_p or None
    never = [NO_TOKEN]  # None would be replaced by the EOS tokens of the model's own config
    return GenerationConfig(
        max_new_tokens=params.max_tokens,
        eos_token_id=never if params.ignore_eos or not eos_token_ids else list(eos_token_ids),
        pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
        repetition_penalty=params.repetition_penalty,
        **chosen,
        **(options or {}),
    )
