"""Texts first: where those of an arm leave the reference's, and by how little."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foretoken.bench.equality import MAX_FLOAT32_GAP, first_difference, is_repeatable
from foretoken.bench.measure import Trial
from foretoken.bench.peers.client import RemoteArm

Gap = Callable[[Seq[int], Seq[int], int, int], float]
"""Of a prompt, the text so far and two tokens: by how much the model prefers one to the other, in logits."""


@dataclass(frozen=True)
class Departure:
    """The first place where a row leaves the reference's text.

    Args:
      tokens: of the reference and of the arm; -1 where one has ended.
      gap: by how much foretoken's target prefers one to the other there, in logits.
    """

    prompt: str
    position: int
    tokens: tuple[int, int]
    gap: float


@dataclass(frozen=True)
class Sameness:
    """An arm's texts beside those of the reference.

    Args:
      same_share: of the reference's tokens, those before the first difference of their row.
      is_repeatable: two runs of one prompt gave the same tokens.
    """

    num_rows: int
    num_same_rows: int
    same_share: float
    is_repeatable: bool
    departures: tuple[Departure, ...]

    @property
    def largest_gap(self) -> float:
        return max((one.gap for one in self.departures), default=0.0)

    @property
    def is_kept_in_full_precision(self) -> bool:
        """What two float32 computations of one function may differ by."""
        return self.is_repeatable and self.largest_gap < MAX_FLOAT32_GAP


def sameness(trial: Trial, arms: Seq[RemoteArm], reference: RemoteArm, gap: Gap) -> dict[str, Sameness]:
    """Of every arm by name. One row beside a batch is compared as far as it goes: it ends where the model ends it."""
    return {arm.name: _compared(trial, arm, reference, gap) for arm in arms}


def _compared(trial: Trial, arm: RemoteArm, reference: RemoteArm, gap: Gap) -> Sameness:
    departures, num_rows, num_same, num_tokens = [], 0, 0, 0
    for prompt in trial.prompts:
        prompts = reference.groups.get(prompt.token_ids, [prompt.token_ids])
        texts = zip(prompts, reference.texts[prompt.token_ids], arm.texts[prompt.token_ids], strict=False)
        for row, (ids, expected, got) in enumerate(texts):
            wanted = expected if arm.num_rows == reference.num_rows else expected[: len(got)]
            place = first_difference(wanted, got)
            num_rows, num_tokens = num_rows + 1, num_tokens + len(wanted)
            num_same += len(wanted) if place is None else min(place, len(wanted))
            if place is not None:
                name = prompt.name if reference.num_rows == 1 else f"{prompt.name}, row {row}"
                departures.append(_departure(name, ids, wanted, got, place, gap))
    share = num_same / num_tokens if num_tokens else 1.0
    return Sameness(num_rows, num_rows - len(departures), share, is_repeatable(trial, arm.name), tuple(departures))


def _departure(name: str, ids: Seq[int], wanted: Seq[int], got: Seq[int], place: int, gap: Gap) -> Departure:
    one, other = (tokens[place] if place < len(tokens) else -1 for tokens in (wanted, got))
    has_ended = -1 in (one, other)  # while the other goes on: no rounding does that
    return Departure(name, place, (one, other), float("inf") if has_ended else gap(ids, wanted[:place], one, other))
