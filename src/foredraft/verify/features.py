"""The sampling settings under which a decoder is checked. Some are derived from the plain output, such as stop
strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.config.sampling import SamplingParams
from foredraft.verify.subjects import Answer


@dataclass(frozen=True)
class Feature:
    """One sampling setting.

    Args:
      params: parameters of every prompt.
      is_alone: whether the subject gets the prompts one by one, while plain decoding gets them as one batch.
    """

    name: str
    params: tuple[SamplingParams, ...]
    is_alone: bool = False


NUM_FIRST = 2
"""Number of `features` that are checked before everything else."""

DISTRIBUTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sampled", {}),
    ("top-k 8, repetition penalty 1.3", {"top_k": 8, "repetition_penalty": 1.3}),
    ("top-p 0.9, temperature 0.8", {"top_p": 0.9, "temperature": 0.8}),
)
"""Settings whose distribution is enumerated. The control is tested under the first one."""

CONTROL = "broken acceptance"
"""Name of the control among the settings."""

DISTRIBUTIONS_UNKEYED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("min-p 0.1", {"min_p": 0.1}),
    ("typical-p 0.7", {"typical_p": 0.7}),
)
"""Additional settings whose distribution is enumerated if sampled tokens are not compared."""


def features(plain: Sequence[Answer], max_tokens: int, seed: int, *, is_keyed: bool = True) -> list[Feature]:
    """Return all settings, the plainest first. If samples are not compared, penalties of output tokens are tested
    greedily.

        Args:
          plain: greedy answers of plain decoding, from which stop strings and biases are made.
          seed: seed of the first prompt; prompt i has ``seed + i``.
    """

    def setting(name: str, *, temperature: float = 1.0, **keys: Any) -> Feature:
        """Return one setting. A list contains one value per prompt; any other value applies to all prompts."""
        return Feature(
            name,
            tuple(
                SamplingParams(
                    max_tokens=max_tokens,
                    seed=seed + place,
                    temperature=temperature,
                    **{key: value[place] if isinstance(value, list) else value for key, value in keys.items()},
                )
                for place in range(len(plain))
            ),
        )

    return [
        setting("greedy", temperature=0.0, logprobs=2),
        setting("sampled", logprobs=2),
        replace(setting("one prompt at a time", temperature=0.0), is_alone=True),
        setting("stop string", temperature=0.0, stop=[_inside(answer) for answer in plain]),
        setting("repetition penalty", temperature=0.0, repetition_penalty=1.2, logprobs=2),
        setting("samples of a prompt", n=3),
        setting("top-k", top_k=20),
        setting("top-p, temperature", top_p=0.9, temperature=0.8),
        setting("logit bias", temperature=0.0, logit_bias=[_bias(answer) for answer in plain], logprobs=2),
        setting(
            "presence and frequency penalties",
            temperature=1.0 if is_keyed else 0.0,
            presence_penalty=0.7,
            frequency_penalty=0.4,
        ),
        setting("min-p", min_p=0.1),
        setting("no repeated 3-gram", temperature=0.0, no_repeat_ngram_size=3),
        setting("typical-p", typical_p=0.9),
        setting("stop token", temperature=0.0, stop_token_ids=[_token(answer) for answer in plain]),
        setting("past the end", ignore_eos=True, temperature=0.0),
    ]


def _inside(answer: Answer) -> list[str]:
    """Return a stop string of three characters that occurs after the middle of the output."""
    text = answer.samples[0].text or ""
    start = len(text) // 2
    return [text[start : start + 3]] if text[start : start + 3].strip() else []


def _bias(answer: Answer) -> dict[int, float]:
    """Return a bias against the first tokens of the output."""
    return dict.fromkeys((answer.samples[0].token_ids or ())[:4], -4.0)


def _token(answer: Answer) -> list[int]:
    ids = answer.samples[0].token_ids or ()
    return [ids[len(ids) * 2 // 3]] if ids else []
