"""Where the time of a step goes: forwards of a run replayed with nothing in between, and what lies around them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from foredraft.bench.arms import EngineArm
from foredraft.bench.trial import Run, Sampling, no_garbage_collection
from foredraft.engine.costs import seconds_of
from foredraft.engine.stats import StepProfile
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes

VERBS = ("propose", "verify", "accept", "commit", "observe", "emit")


@dataclass(frozen=True)
class NotedForward:
    """One forward as it was made: the model, its arguments, and how much its cache held."""

    model: CausalLM
    is_target: bool
    nodes: Nodes
    lengths: tuple[int, ...]
    arguments: dict[str, Any]


@dataclass
class Record:
    """The forwards of the decode steps of one run, in order. ``marks[i]`` of them were made by the end of step i."""

    forwards: list[NotedForward] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return len(self.marks)


@dataclass
class _Costs:
    """Seconds of forwards and of the loop around them, added up over the decode steps of runs."""

    num_tokens: int = 0
    num_steps: int = 0
    num_nodes: int = 0
    target_seconds: float = 0.0
    drafter_seconds: float = 0.0
    loop_seconds: float = 0.0

    def add(self, noted: Record, run: Run, seconds: Seq[float], loop_seconds: float) -> None:
        """One run: seconds of each of its forwards."""
        self.num_tokens += run.num_decoded
        self.num_steps += noted.num_steps
        self.loop_seconds += loop_seconds
        for forward, taken in zip(noted.forwards, seconds, strict=True):
            if forward.is_target:
                self.num_nodes += forward.nodes.width
                self.target_seconds += taken
            else:
                self.drafter_seconds += taken


@dataclass(frozen=True)
class Efficiency:
    """Measured speed-up over own plain decoding, against what tau and the forwards allow.

    ``allowed`` = tau T(1) / (T_draft + T(n)); ``efficiency`` = ``speedup`` / ``allowed``. Shares of the loop that
    the forwards take stand beside it, since slow plain decoding would flatter it. A small model that drafts in one call
    instead of forwards counts with its proposals.
    """

    arm: str
    speedup: float
    tokens_per_step: float
    nodes_per_step: float
    plain_seconds: float
    target_seconds: float
    drafter_seconds: float
    plain_forward_share: float
    forward_share: float

    @property
    def allowed(self) -> float:
        return self.tokens_per_step * self.plain_seconds / (self.drafter_seconds + self.target_seconds)

    @property
    def efficiency(self) -> float:
        return self.speedup / self.allowed

    @property
    def draft_cost(self) -> float:
        """c: seconds of one drafter forward over one target forward, per drafted level."""
        levels = self.nodes_per_step - 1
        return self.drafter_seconds / levels / self.plain_seconds if levels > 0 else 0.0


def record(arm: EngineArm, prompt: Seq[int], max_new_tokens: int, sampling: Sampling) -> tuple[Record, Run]:
    """Run a prompt and record every forward after the first emission, as `Run` counts decoding."""
    noted = Record()
    engine = arm.engine
    models = [engine.target, *drafter_models(arm)]
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_noting(model, model is engine.target, noted))
        (row,) = engine.add_request(prompt, sampling.params(max_new_tokens))
        num_first = 0
        while not row.is_finished:
            for _ in engine.step():
                if num_first == 0:
                    num_first = row.num_output_tokens
                    noted.forwards.clear()
                else:
                    noted.marks.append(len(noted.forwards))
    return noted, Run(tuple(row.output_ids), num_first, 0.0, 0.0, row.stats)


def drafter_models(arm: EngineArm) -> list[CausalLM]:
    """Models that the drafter of an arm runs."""
    model = getattr(arm.engine.drafter, "model", None)
    return [model] if isinstance(model, CausalLM) else []


@contextmanager
def _noting(model: CausalLM, is_target: bool, noted: Record) -> Iterator[None]:
    original = model.forward

    def forward(nodes: Nodes, cache: KVCache, **arguments: Any) -> Any:
        first_row, num_rows = arguments.get("first_row", 0), nodes.tokens.shape[0]
        lengths = tuple(cache.row_lengths(first_row, num_rows))
        noted.forwards.append(NotedForward(model, is_target, nodes, lengths, arguments))
        return original(nodes, cache, **arguments)

    with replaced(model, "forward", forward):
        yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Put an attribute of one object in front of its class's."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


class Replay:
    """Replays recorded forwards over caches of its own, filled once.

    Nothing lies between two forwards but setting the lengths, so the sum is what any loop around them must pay.
    """

    def __init__(self, records: Seq[Record]) -> None:
        self._caches: dict[int, KVCache] = {}
        for noted in records:
            for forward in noted.forwards:
                self._make_room(forward)

    def _make_room(self, forward: NotedForward) -> None:
        needed = max(forward.lengths) + forward.nodes.width
        num_rows = forward.arguments.get("first_row", 0) + forward.nodes.tokens.shape[0]
        cache = self._caches.get(id(forward.model))
        if cache is None:
            cache = self._caches[id(forward.model)] = forward.model.new_cache(num_rows, capacity=needed)
            forward.model.forward(Nodes.from_chains([[1]] * num_rows), cache)
        if cache.num_rows < num_rows:
            cache.add_rows(num_rows - cache.num_rows)
        cache.reserve(needed)

    def seconds(self, noted: Record) -> list[float]:
        """Seconds of every forward."""
        spent = []
        for forward in noted.forwards:
            cache = self._caches[id(forward.model)]
            first_row = forward.arguments.get("first_row", 0)
            cache.lengths[first_row : first_row + len(forward.lengths)] = forward.lengths
            run, device = forward.model.forward, forward.model.device
            spent.append(seconds_of(run, device, forward.nodes, cache, **forward.arguments))
        return spent


def efficiencies(
    plain: EngineArm,
    arms: Seq[EngineArm],
    prompts: Seq[Seq[int]],
    max_new_tokens: int,
    sampling: Sampling,
    repeats: int = 2,
) -> list[Efficiency]:
    """The efficiency of every arm over some prompts; loops and forwards are timed side by side, on the same tokens.

    Every repetition makes the same forwards and steps, so each of them counts with its own median: a disturbance
    that lasts for some steps of one repetition leaves no trace.
    """
    everyone = [plain, *arms]
    totals = {arm.name: _Costs() for arm in everyone}
    for prompt in prompts:
        notes = {arm.name: record(arm, prompt, max_new_tokens, sampling) for arm in everyone}
        if any(noted.num_steps == 0 for noted, _ in notes.values()):
            continue
        replay = Replay([noted for noted, _ in notes.values()])
        forwards: dict[str, list[Seq[float]]] = {name: [] for name in notes}
        steps: dict[str, list[Seq[float]]] = {name: [] for name in notes}
        drafts: dict[str, list[float]] = {name: [] for name in notes}
        for arm in [*everyone, *reversed(everyone)] * repeats:
            before = arm.engine.profile.propose_seconds
            with no_garbage_collection():
                steps[arm.name].append(arm.run(prompt, max_new_tokens, sampling).step_seconds)
                forwards[arm.name].append(replay.seconds(notes[arm.name][0]))
            drafts[arm.name].append(arm.engine.profile.propose_seconds - before)
        for arm in everyone:
            noted, run = notes[arm.name]
            total = totals[arm.name]
            total.add(noted, run, column_medians(forwards[arm.name]), sum(column_medians(steps[arm.name])))
            if drafter_models(arm) and all(forward.is_target for forward in noted.forwards):
                total.drafter_seconds += statistics.median(drafts[arm.name])  # it drafts in calls that are no forwards
    base = totals[plain.name]
    return [_efficiency(arm.name, totals[arm.name], base) for arm in arms] if base.num_steps else []


def column_medians(rows: Seq[Seq[float]]) -> list[float]:
    """The median of every column; all rows are of one length."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _efficiency(arm: str, costs: _Costs, base: _Costs) -> Efficiency:
    return Efficiency(
        arm=arm,
        speedup=(base.loop_seconds / base.num_tokens) / (costs.loop_seconds / costs.num_tokens),
        tokens_per_step=costs.num_tokens / costs.num_steps,
        nodes_per_step=costs.num_nodes / costs.num_steps,
        plain_seconds=base.target_seconds / base.num_steps,
        target_seconds=costs.target_seconds / costs.num_steps,
        drafter_seconds=costs.drafter_seconds / costs.num_steps,
        plain_forward_share=base.target_seconds / base.loop_seconds,
        forward_share=(costs.target_seconds + costs.drafter_seconds) / costs.loop_seconds,
    )


# -- verbs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
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


def profile(arm: EngineArm, prompts: Seq[Seq[int]], max_new_tokens: int, sampling: Sampling) -> StepTimes:
    """Profile the decode steps of an arm over some prompts, one at a time; the first step of each is warm-up."""
    engine, total, wall = arm.engine, StepProfile(), 0.0
    before = engine.profile
    target, drafter = _Stopwatch(), _Stopwatch()
    for prompt in prompts:
        (row,) = engine.add_request(prompt, sampling.params(max_new_tokens))
        while row.num_output_tokens == 0:
            engine.step()
        engine.profile = total
        with no_garbage_collection(), target.inside([engine.target]), drafter.inside(drafter_models(arm)):
            start = perf_counter()
            while not row.is_finished:
                engine.step()
            wall += perf_counter() - start
        engine.profile = before
    seconds = {verb: getattr(total, f"{verb}_seconds") for verb in VERBS}
    seconds["propose"] -= drafter.seconds
    seconds["verify"] -= target.seconds
    count = max(total.num_steps, 1)
    each = {verb: spent / count for verb, spent in seconds.items()}
    return StepTimes(arm.name, total.num_steps, wall / count, target.seconds / count, drafter.seconds / count, each)


class _Stopwatch:
    """Adds up the time inside some models, their modules or programs, while a loop runs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = function(*args, **kwargs)
            self.seconds += perf_counter() - start
            return result

        return timed

    @contextmanager
    def inside(self, models: Seq[CausalLM]) -> Iterator[None]:
        """Count as long as the block runs."""
        with ExitStack() as stack:
            for execution in (model.execution for model in models):
                stack.enter_context(replaced(execution, "run", self._around(execution.run)))
                if (program := execution.program) is not None:
                    stack.enter_context(replaced(program, "forward", self._around(program.forward)))
                    stack.enter_context(replaced(program, "chains", self._around(program.chains)))
            yield
