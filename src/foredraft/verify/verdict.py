"""Findings of a verification, differences between outputs, and the resulting verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from foredraft.beginnings import shared_length
from foredraft.engine.stats import counted
from foredraft.verify.subjects import Answer

Status = Literal["holds", "broken", "undecided", "left out"]

Check = Literal["tokens", "log-probabilities", "distribution", "control"]

LOSSLESS, NOT_LOSSLESS, UNDECIDED = "lossless", "not lossless", "undecided"
INTERRUPTED = "it was interrupted"
EXIT_STATUS = {LOSSLESS: 0, NOT_LOSSLESS: 3, UNDECIDED: 4}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
      feature: name of the sampling setting.
      status: outcome of the check; "left out" if the subject does not support the setting or no time was left.
      found: explanation in words.
      numbers: figures behind the explanation.
    """

    feature: str
    check: Check
    status: Status
    found: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a decoder: lossless, not lossless, or undecided.

    Args:
      subject: name of the decoder that was checked.
      reference: name of the decoder it was compared with.
      guarantee: the guarantee of the decoder, in words; empty for decoders other than foredraft's.
      findings: results of all checks, in the order in which they were made.
      num_drafted, num_accepted: numbers of verified and of accepted draft tokens; None if the subject does not count.
      false_alarm_rate: upper bound on the chance that a lossless decoder fails any of the distribution tests.
      seconds: duration of the verification.
      is_interrupted: True if Ctrl-C ended the verification early.
    """

    subject: str
    reference: str
    guarantee: str
    findings: tuple[Finding, ...]
    num_drafted: int | None
    num_accepted: int | None
    false_alarm_rate: float
    seconds: float
    is_interrupted: bool = False

    @property
    def broken(self) -> list[Finding]:
        """Findings with status "broken"."""
        return [finding for finding in self.findings if finding.status == "broken"]

    @property
    def doubts(self) -> list[str]:
        """Reasons why the decoder cannot be called lossless although no check failed; empty if there are none."""
        found = [INTERRUPTED] if self.is_interrupted else []
        found += [f"{one.feature}: {one.found}" for one in self.findings if one.status == "undecided"]
        if self.num_accepted == 0:
            found.append("no draft token was accepted, so acceptance was not tested")
        for check in ("tokens", "distribution", "control"):
            if not any(one.check == check and one.status == "holds" for one in self.findings):
                reason = next((one.found for one in self.findings if one.check == check), "no time was left for it")
                if not any(reason in doubt for doubt in found):
                    found.append(f"no {check} check was completed ({reason})")
        return found

    @property
    def left_out(self) -> dict[str, list[str]]:
        """Checks that were left out, grouped by reason."""
        found: dict[str, list[str]] = {}
        for one in self.findings:
            if one.status == "left out":
                found.setdefault(one.found, []).append(f"{one.check} of {one.feature}")
        return found

    @property
    def status(self) -> str:
        """The verdict as a string: "lossless", "not lossless" or "undecided"."""
        if self.broken:
            return NOT_LOSSLESS
        return UNDECIDED if self.doubts else LOSSLESS

    @property
    def exit_status(self) -> int:
        """Exit status of the command line: 0 for lossless, 3 for not lossless, 4 for undecided."""
        return EXIT_STATUS[self.status]

    def sentence(self) -> str:
        """Return the verdict in words."""
        if self.broken:
            first = self.broken[0]
            more = f", and {len(self.broken) - 1} more" if len(self.broken) > 1 else ""
            return f"{self.subject} is not lossless. {first.feature}, {first.check}: {first.found}{more}."
        if self.doubts:
            return f"{self.subject} is undecided: {'; '.join(self.doubts)}.{self._said_of_left_out()}"
        tokens = [one for one in self.findings if one.check == "tokens" and one.status == "holds"]
        tests = [one for one in self.findings if one.check == "distribution" and one.status == "holds"]
        same = sum(one.numbers.get("num_tokens", 0) for one in tokens)
        drafts = (
            ""
            if self.num_accepted is None
            else f" {self.num_accepted} of {self.num_drafted} draft tokens were accepted."
        )
        smallest = min((one.numbers.get("p_value_together", one.numbers["p_value"]) for one in tests), default=1.0)
        finest = min((one.numbers["detectable"] for one in tests), default=1.0)
        alarms = f"{100 * self.false_alarm_rate:g}%"
        asked = sum(one.check == "distribution" for one in self.findings)
        number = counted(len(tests), "distribution test")
        number = number if len(tests) == asked else f"{len(tests)} of {asked} distribution tests"
        agree = f"{number} {'agrees' if len(tests) == 1 else 'agree'}"
        return (
            f"{self.subject} is lossless: {same} tokens under {counted(len(tokens), 'setting')} are equal to those of "
            f"{self.reference}, and {agree} with the enumerated distribution (smallest p "
            f"{smallest:.2g}; false alarms at most {alarms}; a shift of {finest:g} of the mass of a "
            f"token would have been found).{drafts} The control, a deliberately broken decoder, was caught."
            f"{self._said_of_left_out()}"
        )

    def _said_of_left_out(self) -> str:
        """Return a sentence on the checks that were left out, with a leading space; empty if there are none."""
        said = [f"{', '.join(names)} ({reason})" for reason, names in self.left_out.items()]
        return f" Left out: {'; '.join(said)}." if said else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as plain data, ready for JSON."""
        return {
            "status": self.status,
            "sentence": self.sentence(),
            "doubts": self.doubts,
            "left_out": self.left_out,
            **asdict(self),
        }


def holm(p_values: Sequence[float], rate: float) -> list[bool]:
    """Return which tests reject, by Holm's method (1979): the chance of any false rejection is at most ``rate``."""
    rejected = [False] * len(p_values)
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[place] > rate / (len(p_values) - rank):
            break
        rejected[place] = True
    return rejected


NEVER = float("inf")
"""Gap for a difference that rounding cannot explain, such as an output that ends where the other continues."""


@dataclass(frozen=True)
class Difference:
    """The first token at which a sample differs from that of plain decoding.

    Args:
      prompt, sample: index of the prompt, and index of the sample of that prompt.
      position: index in the output.
      found, expected: token ids at that position, or the two texts if all tokens are equal; "(end)" if one has ended.
      gap: preference of the distribution for one of the two tokens over the other, as in
        `foredraft.testing.Divergence`.
    """

    prompt: int
    sample: int
    position: int
    found: int | str
    expected: int | str
    gap: float


def tokens_of(tokenizer: Any, text: str, expected_text: str, expected: list[int]) -> list[int]:
    """Return the tokens of a text that came without token ids: the expected tokens as far as both texts agree, then the
    tokenisation of the rest.
    """
    if tokenizer is None:
        return []
    agree = shared_length(text, expected_text)
    kept = 0
    while kept < len(expected) and len(tokenizer.decode(expected[: kept + 1])) <= agree:
        kept += 1
    rest = text[len(tokenizer.decode(expected[:kept])) if kept else 0 :]
    return [*expected[:kept], *tokenizer(rest, add_special_tokens=False)["input_ids"]]


def token_finding(
    name: str, num_samples: int, num_tokens: int, differences: Sequence[Difference], near_tie: float
) -> Finding:
    """Return the finding of a comparison of outputs.

    Args:
      differences: first differences of the outputs that are not equal.
      near_tie: largest gap that rounding explains; 0 if the guarantee is bitwise.
    """
    numbers = {"num_samples": num_samples, "num_tokens": num_tokens, "differences": list(map(asdict, differences))}
    if not differences:
        return Finding(name, "tokens", "holds", f"{num_samples} of {num_samples} outputs equal", numbers)
    worst = max(differences, key=lambda one: one.gap)
    said = (
        f"{len(differences)} of {num_samples} outputs differ, with a gap of {worst.gap:.3g} at most (rounding explains "
        f"gaps up to {near_tie:g}): in prompt {worst.prompt}, token {worst.position} is {worst.found!r} instead of "
        f"{worst.expected!r}"
    )
    return Finding(name, "tokens", "undecided" if 0.0 < near_tie >= worst.gap else "broken", said, numbers)


def logprob_finding(name: str, found: Sequence[Answer], wanted: Sequence[Answer], limit: float) -> Finding:
    """Return the finding of a comparison of log-probabilities of equal outputs, including tokens after rejected drafts.

    Args:
      limit: largest difference that rounding explains; 0 if the guarantee is bitwise.
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
    said = "bitwise equal" if largest == 0.0 else f"up to {largest:.2g} apart"
    if largest == NEVER:
        said = "some are missing or not a number"
    numbers = {"num_tokens": num_tokens, "largest_difference": largest, "limit": limit}
    status: Status = "holds" if largest <= limit else "broken"
    return Finding(name, "log-probabilities", status, f"{num_tokens} tokens, {said}", numbers)
