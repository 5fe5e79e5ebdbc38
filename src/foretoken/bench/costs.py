"""The cost of the forwards alone: every forward of a run is recorded, then replayed with nothing in between."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from foretoken.bench.arms import EngineArm, Run, Sampling
from foretoken.bench.measure import no_garbage_collection
from foretoken.engine.costs import seconds_of
from foretoken.model.cache.ragged import KVCache
from foretoken.model.lm import CausalLM, Nodes


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


@dataclass(frozen=True)
class ForwardCosts:
    """Seconds of forwards, added up over the decode steps of a run.

    Args:
      num_tokens: emitted in these steps.
      num_steps: their number, one target forward each.
      num_nodes: verified in them.
    """

    num_tokens: int
    num_steps: int
    num_nodes: int
    target_seconds: float
    drafter_seconds: float

    @property
    def seconds(self) -> float:
        return self.target_seconds + self.drafter_seconds

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else float("nan")


@dataclass(frozen=True)
class Efficiency:
    """Measured speed-up over own plain decoding, against what tau and the forwards allow.

    ``allowed`` = tau T(1) / (T_draft + T(n)); ``efficiency`` = ``speedup`` / ``allowed``. Shares of the loop that
    the forwards take stand beside it, since slow plain decoding would flatter it.
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


def replayed(
    arms: Seq[EngineArm], prompt: Seq[int], max_new_tokens: int, sampling: Sampling, repeats: int = 2
) -> tuple[dict[str, ForwardCosts], dict[str, float]]:
    """Costs of the forwards of every arm on one prompt, and the seconds of its loop, interleaved A B B A.

    Every repetition makes the same forwards and steps, so each of them counts with its own median: a disturbance
    that lasts for some steps of one repetition leaves no trace.
    """
    notes = {arm.name: record(arm, prompt, max_new_tokens, sampling) for arm in arms}
    replay = Replay([noted for noted, _ in notes.values()])
    forwards: dict[str, list[Seq[float]]] = {arm.name: [] for arm in arms}
    steps: dict[str, list[Seq[float]]] = {arm.name: [] for arm in arms}
    for _ in range(repeats):
        for arm in [*arms, *reversed(arms)]:
            with no_garbage_collection():
                steps[arm.name].append(arm.run(prompt, max_new_tokens, sampling).step_seconds)
                forwards[arm.name].append(replay.seconds(notes[arm.name][0]))
    costs = {name: _costs(*notes[name], column_medians(forwards[name])) for name in notes}
    return costs, {name: sum(column_medians(steps[name])) for name in notes}


def column_medians(rows: Seq[Seq[float]]) -> list[float]:
    """The median of every column; all rows are of one length."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _costs(noted: Record, run: Run, seconds: Seq[float]) -> ForwardCosts:
    spent = {True: 0.0, False: 0.0}
    for forward, taken in zip(noted.forwards, seconds, strict=True):
        spent[forward.is_target] += taken
    return ForwardCosts(
        num_tokens=run.num_decoded,
        num_steps=noted.num_steps,
        num_nodes=sum(forward.nodes.width for forward in noted.forwards if forward.is_target),
        target_seconds=spent[True],
        drafter_seconds=spent[False],
    )


def efficiencies(
    plain: EngineArm,
    arms: Seq[EngineArm],
    prompts: Seq[Seq[int]],
    max_new_tokens: int,
    sampling: Sampling,
    repeats: int = 2,
) -> list[Efficiency]:
    """The efficiency of every arm over some prompts; loops and forwards are timed side by side, on the same tokens."""
    names = [plain.name, *(arm.name for arm in arms)]
    costs: dict[str, list[ForwardCosts]] = {name: [] for name in names}
    loops = dict.fromkeys(names, 0.0)
    for prompt in prompts:
        by_arm, seconds = replayed([plain, *arms], prompt, max_new_tokens, sampling, repeats)
        if any(cost.num_steps == 0 for cost in by_arm.values()):
            continue
        for name in names:
            costs[name].append(by_arm[name])
            loops[name] += seconds[name]
    totals = {name: _added(costs[name]) for name in names if costs[name]}
    base = totals.get(plain.name)
    if base is None:
        return []
    return [_efficiency(arm.name, totals[arm.name], loops[arm.name], base, loops[plain.name]) for arm in arms]


def _added(costs: Seq[ForwardCosts]) -> ForwardCosts:
    return ForwardCosts(
        num_tokens=sum(cost.num_tokens for cost in costs),
        num_steps=sum(cost.num_steps for cost in costs),
        num_nodes=sum(cost.num_nodes for cost in costs),
        target_seconds=sum(cost.target_seconds for cost in costs),
        drafter_seconds=sum(cost.drafter_seconds for cost in costs),
    )


def _efficiency(
    arm: str, costs: ForwardCosts, loop_seconds: float, base: ForwardCosts, base_seconds: float
) -> Efficiency:
    return Efficiency(
        arm=arm,
        speedup=(base_seconds / base.num_tokens) / (loop_seconds / costs.num_tokens),
        tokens_per_step=costs.tokens_per_step,
        nodes_per_step=costs.num_nodes / costs.num_steps,
        plain_seconds=base.target_seconds / base.num_steps,
        target_seconds=costs.target_seconds / costs.num_steps,
        drafter_seconds=costs.drafter_seconds / costs.num_steps,
        plain_forward_share=base.seconds / base_seconds,
        forward_share=costs.seconds / loop_seconds,
    )
