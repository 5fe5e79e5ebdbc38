"""Where a text leaves the one that was expected, and how close the law puts the two tokens there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from foretoken.beginnings import shared_length
from foretoken.config.sampling import SamplingParams
from foretoken.model.lm import CausalLM
from foretoken.testing.divergence import token_gap
from foretoken.verify.subjects import Answer, Sample
from foretoken.verify.verdict import Finding, Status

NEVER = float("inf")
"""The gap where one text has ended and the other goes on: no rounding does that."""


@dataclass(frozen=True)
class Difference:
    """The first token at which a sample differs from that of plain decoding.

    Args:
      prompt, sample: which one.
      position: index in the output.
      found, expected: token ids there, or text where the tokens are the same; "(end)" where one has ended.
      gap: by how much the law prefers one to the other, as `foretoken.testing.Divergence` has it.
    """

    prompt: int
    sample: int
    position: int
    found: int | str
    expected: int | str
    gap: float


class Differences:
    """Compares samples over one model.

    Args:
      target: whose law measures gaps.
      tokenizer: for subjects that return text alone.
    """

    def __init__(self, target: CausalLM, tokenizer: Any, prompts: Seq[Seq[int]]) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._prompts = prompts

    def between(self, prompt: int, sample: int, params: SamplingParams, got: Sample, want: Sample) -> Difference | None:
        """The first difference; None where the samples are the same."""
        expected, text = list(want.token_ids or ()), want.text or ""
        found: Seq[int]
        if got.token_ids is None:
            if got.text == text:
                return None
            found = self._tokens_of(got.text or "", text, expected)
        else:
            found = got.token_ids
        position = shared_length(list(found), expected)
        if position < min(len(found), len(expected)):
            tokens = found[position], expected[position]
            context = self._prompts[prompt], expected[:position]
            gap = token_gap(self._target, *context, params, sample, tokens)
            return Difference(prompt, sample, position, *tokens, gap=gap)
        if len(found) != len(expected):
            one, other = (each[position] if position < len(each) else "(end)" for each in (found, expected))
            return Difference(prompt, sample, position, one, other, NEVER)
        if got.text is not None and got.text != text:
            return Difference(prompt, sample, len(found), got.text, text, NEVER)
        return None

    def _tokens_of(self, text: str, expected_text: str, expected: list[int]) -> list[int]:
        """Tokens of a text that came without any: the expected ones as far as the two texts agree."""
        if self._tokenizer is None:
            return []
        agree = shared_length(text, expected_text)
        kept = 0
        while kept < len(expected) and len(self._tokenizer.decode(expected[: kept + 1])) <= agree:
            kept += 1
        rest = text[len(self._tokenizer.decode(expected[:kept])) if kept else 0 :]
        return [*expected[:kept], *self._tokenizer(rest, add_special_tokens=False)["input_ids"]]


def token_finding(
    name: str, num_samples: int, num_tokens: int, differences: Seq[Difference], near_tie: float
) -> Finding:
    """What comparing texts has shown.

    Args:
      differences: those of the texts that are not equal.
      near_tie: gap up to which rounding explains one; 0 where the same bits are promised.
    """
    numbers = {"num_samples": num_samples, "num_tokens": num_tokens, "differences": list(map(asdict, differences))}
    if not differences:
        return Finding(name, "tokens", "holds", f"{num_samples} of {num_samples} texts equal", numbers)
    worst = max(differences, key=lambda one: one.gap)
    said = (
        f"{len(differences)} of {num_samples} texts differ, by a gap of {worst.gap:.3g} at most (rounding explains "
        f"{near_tie:g}): in prompt {worst.prompt} token {worst.position} is {worst.found!r} instead of "
        f"{worst.expected!r}"
    )
    return Finding(name, "tokens", "undecided" if 0.0 < near_tie >= worst.gap else "broken", said, numbers)


def logprob_finding(name: str, found: Seq[Answer], wanted: Seq[Answer], limit: float) -> Finding:
    """What comparing log-probabilities of equal texts has shown, those behind rejected drafts included.

    Args:
      limit: difference up to which rounding explains one; 0 where the same bits are promised.
    """
    largest, num_tokens = 0.0, 0
    for answer, plain in zip(found, wanted, strict=True):
        for got, want in zip(answer.samples, plain.samples, strict=True):
            if got.logprobs is None:
                continue
            tokens = want.token_ids or ()
            for place, token in enumerate(tokens):
                own = got.logprobs[place] if place < len(got.logprobs) else {}
                num_tokens += 1
                if token not in own:
                    largest = NEVER
                for each, value in (want.logprobs or ())[place].items():
                    if each in own and own[each] != value:
                        apart = abs(own[each] - value)
                        largest = max(largest, apart if apart == apart else NEVER)
    said = "equal to the bit" if largest == 0.0 else f"up to {largest:.2g} apart"
    if largest == NEVER:
        said = "some without one, or with none that is a number"
    numbers = {"num_tokens": num_tokens, "largest_difference": largest, "limit": limit}
    status: Status = "holds" if largest <= limit else "broken"
    return Finding(name, "log-probabilities", status, f"of {num_tokens} tokens, {said}", numbers)
