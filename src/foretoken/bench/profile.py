"""Where a step goes: the models' forwards, and by verb everything around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from foretoken.bench.arms import EngineArm, Sampling
from foretoken.bench.costs import drafter_models, replaced
from foretoken.bench.measure import no_garbage_collection
from foretoken.engine.stats import StepProfile
from foretoken.model.lm import CausalLM

VERBS = ("propose", "verify", "accept", "commit", "observe", "emit")


@dataclass(frozen=True)
class Profile:
    """Seconds per decode step.

    Only what runs inside a transformers module counts as forward; masks, positions and cache bookkeeping of the
    adapter count to the verb that called it.

    Args:
      step_seconds: wall time of a step of the engine.
      target_seconds, drafter_seconds: inside of the models.
      verb_seconds: by verb, models left out.
    """

    arm: str
    num_steps: int
    step_seconds: float
    target_seconds: float
    drafter_seconds: float
    verb_seconds: dict[str, float]

    @property
    def outside_share(self) -> float:
        """Share of a step outside of the models; the goal is 0.05 at 100 M parameters."""
        return 1.0 - (self.target_seconds + self.drafter_seconds) / self.step_seconds

    @property
    def verb_shares(self) -> dict[str, float]:
        return {verb: seconds / self.step_seconds for verb, seconds in self.verb_seconds.items()}


class _Stopwatch:
    """Adds up the time inside one function while a loop runs; `foretoken.engine.costs` times forwards on their own."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = function(*args, **kwargs)
            self.seconds += perf_counter() - start
            return result

        return timed


def profile(arm: EngineArm, prompts: Seq[Seq[int]], max_new_tokens: int, sampling: Sampling) -> Profile:
    """Profile the decode steps of an arm over some prompts, one at a time; the first step of each is warm-up."""
    totals = _Totals()
    for prompt in prompts:
        with no_garbage_collection():
            _add_prompt(totals, arm, prompt, max_new_tokens, sampling)
    return totals.profile(arm.name)


class _Totals:
    def __init__(self) -> None:
        self.num_steps = 0
        self.step_seconds = self.target_seconds = self.drafter_seconds = 0.0
        self.verb_seconds = dict.fromkeys(VERBS, 0.0)

    def add(self, steps: StepProfile, wall_seconds: float, target_seconds: float, drafter_seconds: float) -> None:
        self.num_steps += steps.num_steps
        self.step_seconds += wall_seconds
        self.target_seconds += target_seconds
        self.drafter_seconds += drafter_seconds
        for verb in VERBS:
            self.verb_seconds[verb] += getattr(steps, f"{verb}_seconds")
        self.verb_seconds["propose"] -= drafter_seconds
        self.verb_seconds["verify"] -= target_seconds

    def profile(self, arm: str) -> Profile:
        count = max(self.num_steps, 1)
        return Profile(
            arm,
            self.num_steps,
            self.step_seconds / count,
            self.target_seconds / count,
            self.drafter_seconds / count,
            {verb: seconds / count for verb, seconds in self.verb_seconds.items()},
        )


def _add_prompt(totals: _Totals, arm: EngineArm, prompt: Seq[int], max_new_tokens: int, sampling: Sampling) -> None:
    engine = arm.engine
    (row,) = engine.add_request(prompt, sampling.params(max_new_tokens))
    while row.num_output_tokens == 0:
        engine.step()
    with _timed([engine.target]) as target, _timed(drafter_models(arm)) as drafter:
        before, engine.profile = engine.profile, StepProfile()
        start = perf_counter()
        while not row.is_finished:
            engine.step()
        wall_seconds = perf_counter() - start
        steps, engine.profile = engine.profile, before
    totals.add(steps, wall_seconds, target.seconds, drafter.seconds)


@contextmanager
def _timed(models: Seq[CausalLM]) -> Iterator[_Stopwatch]:
    """Time what runs inside of the modules of some models."""
    stopwatch = _Stopwatch()
    with ExitStack() as stack:
        for execution in (model.execution for model in models):
            stack.enter_context(replaced(execution, "run", stopwatch.around(execution.run)))
        yield stopwatch
