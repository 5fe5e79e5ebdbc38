"""The second draw of a law test that failed: what fails by chance alone does not fail twice."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from foretoken.config.sampling import SamplingParams
from foretoken.errors import ForetokenError
from foretoken.law.noise import mix
from foretoken.verify.continuations import draw
from foretoken.verify.laws import Law, LawTest, judge_samples
from foretoken.verify.subjects import Subject
from foretoken.verify.verdict import Finding, Status

FAR = 0.1
"""Of the level of a law test, below which p over both draws is no chance, however the second one came out."""


@dataclass(frozen=True)
class Tested:
    """One law test that was made.

    Args:
      place: of its finding.
      samples: of the first draw.
    """

    place: int
    law: Law
    prompt: list[int]
    params: SamplingParams
    samples: list[Seq[int]]
    test: LawTest


@dataclass(frozen=True)
class SecondDraw:
    """What a second draw found.

    Args:
      num_samples, num_wanted: those that there was time for, and those of the first draw.
      p_value, p_together: of them, and over both draws; without any, 1 and that of the first draw.
      failed: why the subject gave no more; empty where it did.
    """

    num_samples: int
    num_wanted: int
    p_value: float
    p_together: float
    failed: str = ""

    @property
    def is_cut_short(self) -> bool:
        """Whether it is smaller than the first one."""
        return self.num_samples < self.num_wanted

    def judged(self, finding: Finding, rate: float, level: float) -> Finding:
        """The finding of a test that failed, after the second draw; one cut short acquits nobody.

        Args:
          rate: of false alarms of all law tests together.
          level: of one law test.
        """
        is_fault = self.p_value <= rate or self.p_together <= FAR * level
        is_doubtful = self.is_cut_short or self.p_together <= level
        status: Status = "broken" if is_fault else "undecided" if is_doubtful else "holds"
        return replace(
            finding,
            status=status,
            found=f"{finding.found}; {self._described()}",
            numbers={
                **finding.numbers,
                "p_value_again": self.p_value,
                "p_value_together": self.p_together,
                "num_samples_again": self.num_samples,
            },
        )

    def _described(self) -> str:
        why = self.failed or "no time was left for more"
        if not self.num_samples:
            return f"it was not drawn once more ({why})"
        cut = f" ({self.num_samples} of {self.num_wanted} continuations: {why})" if self.is_cut_short else ""
        return f"drawn once more{cut}, p = {self.p_value:.2g}, together {self.p_together:.2g}"


def draw_again(tested: Tested, subject: Subject, seed: int, *, until: float) -> SecondDraw:
    """As many samples as the first draw had, by other seeds, or as many as time allows.

    Args:
      until: by `time.monotonic`.

    Exactness: how many there are does not hang on what they are, so that both levels stay exact.
    """
    wanted = len(tested.samples)
    again: list[Seq[int]] = []
    failed = ""
    try:
        again, _ = draw(
            subject, tested.prompt, tested.params, mix(seed, 1), until=until, num_samples=wanted, num_least=0
        )
    except ForetokenError as error:
        failed = str(error)
    if not again:
        return SecondDraw(0, wanted, 1.0, tested.test.p_value, failed)
    p_value, p_together = (
        judge_samples(tested.law, samples, FAR, seed).p_value for samples in (again, [*tested.samples, *again])
    )
    return SecondDraw(len(again), wanted, p_value, p_together, failed)
