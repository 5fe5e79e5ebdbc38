"""Measure where the time of drafted decoding goes, part by part.

    python benchmarks/parts.py efficiency [--model zoo:tiny --scale 100m] [--contexts 256 1500] [--draft-widths 1 4]
    python benchmarks/parts.py profile [--contexts 100 500 1500] [--vocab-sizes 4096 32000 150000]
    python benchmarks/parts.py drafting [--contexts 1000 16000 128000] [--datastore-sizes 1e5 1e7]
    python benchmarks/parts.py accepted [--num-prompts 18] [--stop-at-eos]

efficiency: the measured speed-up over plain decoding, divided by tau T(1) / (T_draft + T(n)). T comes from a replay of
the forward passes of the run with nothing in between. Arms are the pair's drafter at some widths on padded prompts, and
lookups on questions that are asked again.
profile: shares of a step by verb, without the models.
drafting: host time per step of the drafters that run no model.
accepted: accepted lengths, compared with the truncated geometric distribution of independent acceptances.

``--out FILE`` writes all results as JSON. For speed compared with transformers see race.py.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import perf_counter, perf_counter_ns
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from pairs import Pair, load_pair, padded, scaled, widened
from rich.console import Console, Group

from foredraft.accept import match
from foredraft.bench import report
from foredraft.bench.arms import EngineArm
from foredraft.bench.provenance import provenance
from foredraft.bench.report import Column, plain_data, show
from foredraft.bench.trial import Run, Sampling, no_garbage_collection
from foredraft.bench.workload import BenchPrompt, asked_again, load_prompts, read_questions, select
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import drafter_factory, make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.engine.costs import Forward, filled_cache, median_times, seconds_of
from foredraft.engine.drafter import Drafter, DraftSize, Features, PromptChunk, StepResult
from foredraft.engine.engine import EngineConfig
from foredraft.engine.row import Row
from foredraft.engine.stats import StepProfile
from foredraft.engine.stopping import StopChecker
from foredraft.folders import keep_json
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes
from foredraft.retrieval.build import from_tokens
from foredraft.retrieval.datastore import Datastore
from foredraft.sampling.distribution import Sampler
from foredraft.tree import DraftTree
from foredraft.tune.walk import by_position

VERBS = ("propose", "verify", "accept", "commit", "observe", "emit")


# -- efficiency --------------------------------------------------------------------------------------------------------


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

    def add(self, noted: Record, run: Run, seconds: Sequence[float], loop_seconds: float) -> None:
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


def record(arm: EngineArm, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling) -> tuple[Record, Run]:
    """Run a prompt and record every forward after the first emission, as `Run` counts decoding."""
    noted = Record()
    engine = arm.engine
    with ExitStack() as stack:
        for model in (engine.target, *drafter_models(arm)):
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

    with patch.object(model, "forward", forward):
        yield


class Replay:
    """Replays recorded forwards over caches of its own, filled once.

    Nothing lies between two forwards but setting the lengths, so the sum is what any loop around them must pay.
    """

    def __init__(self, records: Sequence[Record]) -> None:
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
    arms: Sequence[EngineArm],
    prompts: Sequence[Sequence[int]],
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
        forwards: dict[str, list[Sequence[float]]] = {name: [] for name in notes}
        steps: dict[str, list[Sequence[float]]] = {name: [] for name in notes}
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
                total.drafter_seconds += median(drafts[arm.name])  # it drafts in calls that are no forwards
    base = totals[plain.name]
    return [_efficiency(arm.name, totals[arm.name], base) for arm in arms] if base.num_steps else []


def column_medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of every column; all rows are of one length."""
    return [median(column) for column in zip(*rows, strict=True)]


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


# -- profile -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """Seconds per decode step.

    Only what runs inside a transformers module or program counts as forward; masks, positions and cache bookkeeping of
    the adapter count to the verb that called it.

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


def profile(arm: EngineArm, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling) -> StepTimes:
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
    def inside(self, models: Sequence[CausalLM]) -> Iterator[None]:
        """Count as long as the block runs."""
        with ExitStack() as stack:
            for execution in (model.execution for model in models):
                places = [(execution, "run")]
                if (program := execution.program) is not None:
                    places += [(program, "forward"), (program, "chains")]
                for owner, name in places:
                    stack.enter_context(patch.object(owner, name, self._around(getattr(owner, name))))
            yield


# -- drafting ----------------------------------------------------------------------------------------------------------

REST = "rest"
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("ngram", "nasd", "suffix", "token_recycling", "lookahead", "jacobi")},
    "rest": {"method": REST},
    "rest, datastore only": {"method": REST, "retrieval_dynamic_index": False},
    "suffix+token_recycling": {"method": "suffix+token_recycling"},
    "ngram>token_recycling": {"method": "ngram>token_recycling"},
}
"""Arms, each with the defaults of its method."""

_PHRASE = 8
_NUM_PHRASES, _NUM_KNOWN = 40, 4096  # phrases of the row's text, and of the datastore's, which begin with those
_DOCUMENT = 64  # phrases
_AGREEMENT = 0.7  # share of nodes at which the target goes on with the text
_NUM_RANKED = 64
_LONGEST = 65  # tokens of a step


@dataclass(frozen=True)
class DraftCost:
    """Host time of one drafter, one row; medians over steps.

    Args:
      context: tokens of the row at the first step.
      datastore_tokens: of the datastore, for `rest`.
      start_ms: of taking in the prompt.
      propose_us, observe_us: per step.
      propose_p90_us: nine of ten proposals take less.
      nodes: of a proposal in the mean, root included.
    """

    drafter: str
    context: int
    datastore_tokens: int | None
    start_ms: float
    propose_us: float
    propose_p90_us: float
    observe_us: float
    nodes: float


def draft_costs(
    drafter_context: DrafterContext, contexts: Sequence[int], datastore_sizes: Sequence[int], num_steps: int
) -> Iterator[DraftCost]:
    """Every arm at every context over the smallest datastore; then lookups alone at every size of the datastore.

    Args:
      drafter_context: of the target whose vocabulary is drafted from; no forward is made.
      datastore_sizes: tokens of the datastores, built one after another in a temporary directory.
    """
    text = PhraseText(drafter_context.target.vocab_size)
    for number, size in enumerate(sorted(datastore_sizes)):
        with TemporaryDirectory(prefix="foredraft-") as folder, opened(Path(folder), text, size) as store:
            kept = {**drafter_context.kept, ("datastore", folder): store}
            for name, config in CONFIGS.items():
                is_rest = config["method"] == REST
                if number and not is_rest:
                    continue
                given = {**config, "datastore": folder} if is_rest else config
                make = drafter_factory(SpeculativeConfig.parse(given), replace(drafter_context, kept=kept))
                for context in contexts[:1] if number else contexts:
                    yield draft_cost(name, make, text, context, num_steps, size if is_rest else None)


def draft_cost(
    name: str,
    make: Callable[[], Drafter],
    text: PhraseText,
    context: int,
    num_steps: int,
    datastore_tokens: int | None = None,
) -> DraftCost:
    """Drive one drafter over one row whose target goes on with ``text`` most of the time."""
    row, drafter, ahead = text.row(context, num_steps), make(), text.tokens(context + num_steps * _LONGEST)
    drafter.needs(None, None)  # type: ignore[arg-type]  # of these none looks at the model
    observed: list[int] = []
    proposed: list[int] = []
    nodes: list[int] = []
    with no_garbage_collection():
        begin = perf_counter_ns()
        drafter.start([row], [PromptChunk.end_of(row)])
        start = perf_counter_ns() - begin
        for _ in range(num_steps):
            begin = perf_counter_ns()
            (tree,) = drafter.propose([row], [DraftSize(_LONGEST - 1)])
            proposed.append(perf_counter_ns() - begin)
            result = text.verified(row, tree, ahead)
            begin = perf_counter_ns()
            drafter.observe([row], [result])
            observed.append(perf_counter_ns() - begin)
            nodes.append(len(tree))
    return DraftCost(
        drafter=name,
        context=context,
        datastore_tokens=datastore_tokens,
        start_ms=start / 1e6,
        propose_us=median(proposed) / 1e3,
        propose_p90_us=sorted(proposed)[int(0.9 * (len(proposed) - 1))] / 1e3,
        observe_us=median(observed) / 1e3,
        nodes=mean(nodes),
    )


class PhraseText:
    """Phrases in random order: the text of a row, and of the datastore that knows its phrases among many others.

    Args:
      vocab_size: ids are smaller.

    Randomness: fixed seeds.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._phrases = np.random.default_rng(0).integers(0, vocab_size, size=(_NUM_KNOWN, _PHRASE))
        self._draw = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        """The text of a row: always the same for a vocabulary, so a shorter one is the beginning of a longer one."""
        order = np.random.default_rng(1).integers(0, _NUM_PHRASES, size=-(-count // _PHRASE))
        ids: list[int] = self._phrases[order].ravel()[:count].tolist()
        return ids

    def row(self, context: int, num_steps: int) -> Row:
        """A row whose prompt is ``context`` tokens of the text."""
        params = SamplingParams(max_tokens=num_steps * _LONGEST)
        ids, max_length = self.tokens(context), context + num_steps * _LONGEST
        return Row(
            id=0,
            request_id="0",
            index=0,
            token_ids=ids,
            num_prompt_tokens=context,
            params=params,
            seed=1,
            sampler=Sampler(params, vocab_size=self.vocab_size, prompt_ids=ids[:1]),
            max_length=max_length,
            checker=StopChecker(params, (), context, max_length),
        )

    def verified(self, row: Row, tree: DraftTree, ahead: Sequence[int]) -> StepResult:
        """The outcome of a draft for a target that continues the text, with features that are drawn at random."""
        done = len(row.token_ids)
        future = [ahead[done + depth] for depth in tree.depths]
        verdict = match(tree, future.__getitem__)
        emitted = (*(tree.tokens[node] for node in verdict.path[1:]), verdict.next_token)
        row.extend(emitted)
        row.num_steps += 1
        return StepResult(tree, verdict.path, emitted, _Drawn(future, self.vocab_size, self._draw))

    def documents(self, num_tokens: int) -> Iterable[Sequence[int]]:
        """Documents of ``num_tokens`` in all, separators included: frequent phrases and rare ones, a quarter noise."""
        random_ = np.random.default_rng(2)
        while num_tokens > 1:
            which = (_NUM_KNOWN * random_.random(_DOCUMENT) ** 3).astype(np.int64)
            ids = self._phrases[which]
            noise = random_.random(_DOCUMENT) < 0.25
            ids[noise] = random_.integers(0, self.vocab_size, size=(int(noise.sum()), _PHRASE))
            document: list[int] = ids.ravel()[: num_tokens - 1].tolist()
            num_tokens -= len(document) + 1
            yield document


class _Drawn(Features):
    """Features of a target that agrees with the text as often as targets do, drawn beforehand: only drafters are timed.

    Args:
      future: the text after every node.
    """

    def __init__(self, future: Sequence[int], vocab_size: int, draw: random.Random) -> None:
        ranked = min(_NUM_RANKED, vocab_size)
        self._top = torch.stack([torch.randperm(ranked) for _ in future])
        self._choices = tuple(one if draw.random() < _AGREEMENT else draw.randrange(vocab_size) for one in future)

    def top_ids(self, k: int, nodes: Sequence[int]) -> torch.Tensor:
        return self._top[list(nodes), :k]

    @property
    def choices(self) -> tuple[int, ...]:
        return self._choices


@contextmanager
def opened(folder: Path, text: PhraseText, num_tokens: int) -> Iterator[Datastore]:
    """A datastore of the text's documents, as long as the block runs."""
    from_tokens(text.documents(num_tokens), folder, vocab_size=text.vocab_size, num_tokens=num_tokens)
    store = Datastore.open(folder, checksums=False)
    try:
        yield store
    finally:
        store.close()


# -- accepted lengths --------------------------------------------------------------------------------------------------


def expected_length(rate: float, num_drafted: int) -> float:
    """Tokens that a step emits on average when each drafted one is accepted with the same chance, whatever went before.

    Source: Leviathan et al. 2022, arXiv:2211.17192, equation 1: (1 - rate^(K + 1)) / (1 - rate), the bonus included;
    the accepted ones follow a geometric distribution that is cut off at K. Rate 0.5 and K = 2: 1 + 0.5 + 0.25 = 1.75.

    Args:
      rate: chance of acceptance, 0..1.
      num_drafted: K, 0 or more.
    """
    return sum(rate**accepted for accepted in range(num_drafted + 1))


def wilson(found: float, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    share, z = found / total, 1.96
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Position:
    """The outcome of the drafted tokens in one place of their drafts, where all before them were accepted.

    Args:
      position: 1 for the first drafted token.
      num_tested: drafts that came so far.
    """

    position: int
    num_tested: int
    rate: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % for the rate (Wilson's), as if steps were independent of each other. For 1 of 2: 0.095 to 0.905."""
        return wilson(self.rate * self.num_tested, self.num_tested)


@dataclass(frozen=True)
class AcceptedLengths:
    """Steps of an arm by what they drafted and accepted.

    The last step of a text is left out: the end of the text cuts it short, and not the target.

    Args:
      steps: (tokens drafted on a chain, accepted ones, how many such steps); steps without a draft are not among them.
    """

    arm: str
    sampling: str
    num_prompts: int
    steps: tuple[tuple[int, int, int], ...]

    @property
    def num_steps(self) -> int:
        return sum(count for _, _, count in self.steps)

    @property
    def mean_drafted(self) -> float:
        return self._mean(lambda drafted, accepted: drafted)

    @property
    def rate(self) -> float:
        """The chance of a token that came to be tested: accepted by accepted and rejected.

        The likeliest chance, if there were one for all. Not the acceptance rate, which divides by all that was drafted.
        """
        num_accepted = sum(accepted * count for _, accepted, count in self.steps)
        num_rejected = sum(count for drafted, accepted, count in self.steps if accepted < drafted)
        return num_accepted / max(1, num_accepted + num_rejected)

    @property
    def observed(self) -> float:
        """Tokens per step that drafted, the bonus included."""
        return self._mean(lambda drafted, accepted: 1 + accepted)

    @property
    def expected(self) -> float:
        """The same by the formula, at `rate` and the length of every draft."""
        rate = self.rate
        return self._mean(lambda drafted, accepted: expected_length(rate, drafted))

    @property
    def expected_from_first(self) -> float:
        """The same at the rate of first positions, which is what drafts of one token would show."""
        rate = self.positions[0].rate if self.steps else 0.0
        return self._mean(lambda drafted, accepted: expected_length(rate, drafted))

    @property
    def histogram(self) -> dict[int, float]:
        """Accepted tokens -> share of the steps."""
        found: Counter[int] = Counter()
        for _, accepted, count in self.steps:
            found[accepted] += count
        return {length: found[length] / self.num_steps for length in range(max(found, default=-1) + 1)}

    @property
    def expected_histogram(self) -> dict[int, float]:
        """The same by the truncated geometric distribution, at `rate` and the length of every draft."""
        found: defaultdict[int, float] = defaultdict(float)
        rate = self.rate
        for drafted, _, count in self.steps:
            for length in range(drafted):
                found[length] += rate**length * (1 - rate) * count
            found[drafted] += rate**drafted * count
        return {length: found[length] / self.num_steps for length in range(max(found, default=-1) + 1)}

    @property
    def distance(self) -> float:
        """Total variation between both histograms, 0..1: the share of steps that would have to change."""
        lengths = self.histogram.keys() | self.expected_histogram.keys()
        return sum(abs(self.histogram.get(n, 0.0) - self.expected_histogram.get(n, 0.0)) for n in lengths) / 2

    @property
    def positions(self) -> tuple[Position, ...]:
        """The chance by position. Were acceptances independent, it would be the same everywhere."""
        return tuple(Position(place, *found) for place, found in enumerate(by_position(self.steps), 1))

    def _mean(self, value: Callable[[int, int], float]) -> float:
        total = sum(value(drafted, accepted) * count for drafted, accepted, count in self.steps)
        return total / max(1, self.num_steps)


def accepted_lengths(
    arm: EngineArm, prompts: Iterable[Sequence[int]], max_new_tokens: int, sampling: Sampling
) -> AcceptedLengths:
    """Decode prompts one after another with an arm that drafts chains, and count its steps.

    Raises: what a row ended with, if that is an error.
    """
    found: Counter[tuple[int, int]] = Counter()
    num_prompts = 0
    for prompt in prompts:
        steps = arm.run(prompt, max_new_tokens, sampling).trace[:-1]
        found.update((step.drafted, step.accepted) for step in steps if step.drafted)
        num_prompts += 1
    steps = tuple((*step, count) for step, count in sorted(found.items()))
    return AcceptedLengths(arm.name, sampling.label, num_prompts, steps)


# -- running -----------------------------------------------------------------------------------------------------------


class Parts:
    """The models, and what each part needs of them.

    Args:
      pair: as loaded; ``--scale`` says how it is inflated.
    """

    def __init__(self, pair: Pair, options: argparse.Namespace, vocab_size: int | None = None) -> None:
        self.pair = scaled(pair, options.scale, vocab_size)
        self.options = options
        self.target = CausalLM(self.pair.target, execution=options.execution)
        drafter = self.pair.drafter
        self.drafter = None if drafter is None else CausalLM(drafter, execution=options.execution)

    @property
    def greedy(self) -> Sampling:
        return Sampling(seed=self.options.seed, ignore_eos=not self.options.stop_at_eos)

    def sampled(self, top_p: float = 1.0) -> Sampling:
        return replace(self.greedy, temperature=1.0, top_p=top_p)

    def arm(self, method: str, drafter: CausalLM | None = None, *, is_governed: bool = False, **keys: Any) -> EngineArm:
        """This library by a method. Without the governor every run of a prompt drafts the same."""
        if self.options.num_speculative_tokens is not None and method != "none":
            keys["num_speculative_tokens"] = self.options.num_speculative_tokens
        config = SpeculativeConfig.parse({"method": method, **keys})
        context = DrafterContext(self.target, drafter or self.drafter, self.pair.tokenizer, self.pair.zoo_name)
        name = " ".join(["plain" if method == "none" else method, *(f"{key}={value}" for key, value in keys.items())])
        return EngineArm(
            name,
            self.target,
            make_drafter(config, context),
            self.pair.eos_token_ids,
            EngineConfig(max_num_seqs=1, acceptance=config.rejection_sample_method, typical=config.typical_limits),
            is_governed=is_governed and config.is_governed,
        )

    @property
    def default_method(self) -> str:
        """A drafter beside the target drafts; else the method that the command line takes by default."""
        return "auto" if self.drafter is None else "draft_model"

    def prompts(self, context: int | None, *, is_asked_again: bool = False) -> list[BenchPrompt]:
        """Prompts that leave room for the output."""
        options, plain = self.options, self.arm("none")
        questions = select(read_questions(options.prompts_file), options.num_prompts)
        most = self.target.context_length
        room = None if most is None else most - options.max_new_tokens
        if context is not None:
            return padded(self.pair.tokenizer, load_prompts(self.pair.tokenizer, questions), context, room)
        if not is_asked_again:
            return load_prompts(self.pair.tokenizer, questions, room)
        ending = replace(self.greedy, ignore_eos=False)

        def answer(ids: Sequence[int]) -> tuple[int, ...]:
            return plain.run(ids, options.max_new_tokens, ending).token_ids

        return asked_again(self.pair.tokenizer, questions, answer, room)

    def _efficiencies(self, arms: Sequence[EngineArm], prompts: Sequence[BenchPrompt]) -> list[Efficiency]:
        options, plain = self.options, self.arm("none")
        token_ids = [prompt.token_ids for prompt in prompts]
        for arm in (plain, *arms):
            arm.run(token_ids[0], 16, self.greedy)
        return efficiencies(plain, arms, token_ids, options.max_new_tokens, self.greedy, max(2, options.repeats))

    def efficiency(self) -> Iterator[dict[str, Any]]:
        """Efficiencies with the drafter at some widths, on padded prompts; of lookups, on questions asked again."""
        for context in self.options.contexts or (256, 1500):
            for width in self.options.draft_widths if self.drafter is not None else ():
                drafter = CausalLM(widened(self.pair.drafter, width), execution=self.options.execution)
                models = [Forward(model, filled_cache(model, context, 1)[0]) for model in (self.target, drafter)]
                dear, cheap = median_times(models, 9)
                arms = [self.arm("draft_model", drafter), self.arm("draft_model", drafter, num_draft_branches=2)]
                for one in self._efficiencies(arms, self.prompts(context)):
                    where = {"context": context, "draft_width": width, "draft_cost": cheap / dear}
                    yield {**where, **plain_data(one)}
        arms = [self.arm(method) for method in ("ngram", "nasd")]
        for one in self._efficiencies(arms, self.prompts(None, is_asked_again=True)):
            yield {"context": None, "draft_width": None, "draft_cost": 0.0, **plain_data(one)}

    def profiles(self, pair: Pair) -> Iterator[dict[str, Any]]:
        """The step profile of the default method at every vocabulary and context, greedy and sampled.

        Args:
          pair: as loaded.
        """
        own = pair.target.config.vocab_size
        wanted = [own] if self.options.scale == "none" else [max(own, size) for size in self.options.vocab_sizes]
        for vocab_size in dict.fromkeys(wanted):
            parts = self if vocab_size == own else Parts(pair, self.options, vocab_size)
            arm = parts.arm(parts.default_method, is_governed=True)
            for context in self.options.contexts or (100, 500, 1500):
                prompts = [prompt.token_ids for prompt in parts.prompts(context)]
                for sampling in (parts.greedy, parts.sampled(0.9)):
                    found = profile(arm, prompts, self.options.max_new_tokens, sampling)
                    where = {"vocab_size": vocab_size, "context": context, "sampling": sampling.label}
                    yield {**where, **plain_data(found)}

    def drafting(self) -> Iterator[dict[str, Any]]:
        """Host time of the drafters that need no forward, by context and size of the datastore."""
        options = self.options
        context = DrafterContext(self.target, None, self.pair.tokenizer, self.pair.zoo_name)
        contexts = options.contexts or (1000, 16000, 128000)
        return map(plain_data, draft_costs(context, contexts, options.datastore_sizes, options.draft_steps))

    def accepted(self) -> Iterator[dict[str, Any]]:
        """Accepted lengths of every method that drafts chains, on prompts of all kinds."""
        prompts = [prompt.token_ids for prompt in self.prompts(None)]
        for sampling in (self.greedy, self.sampled()):
            for method in dict.fromkeys((self.default_method, "ngram", "nasd")):
                arm = self.arm(method, is_governed=True)
                yield plain_data(accepted_lengths(arm, prompts, self.options.max_new_tokens, sampling))


WIDTH = 110
"""Columns of a printed table: ten figures side by side, whatever the terminal has."""

SHOWN = {
    "efficiency": {
        "arm": "{}", "context": "{}", "draft_width": "{}", "draft_cost": "{:.3f}", "tokens_per_step": "{:.2f}",
        "nodes_per_step": "{:.1f}", "speedup": "{:.2f}", "allowed": "{:.2f}", "efficiency": "{:.3f}",
        "plain_forward_share": "{:.0%}", "forward_share": "{:.0%}",
    },
    "profile": {
        "vocab_size": "{}", "context": "{}", "sampling": "{}", "step_seconds": "{:.4f}", "target_seconds": "{:.4f}",
        "drafter_seconds": "{:.4f}", "outside_share": "{:.1%}",
    },
    "drafting": {
        "drafter": "{}", "context": "{}", "datastore_tokens": "{}", "start_ms": "{:.1f}", "propose_us": "{:.0f}",
        "propose_p90_us": "{:.0f}", "observe_us": "{:.0f}", "nodes": "{:.1f}",
    },
    "accepted": {
        "arm": "{}", "sampling": "{}", "num_steps": "{}", "mean_drafted": "{:.1f}", "rate": "{:.3f}",
        "observed": "{:.3f}", "expected": "{:.3f}", "expected_from_first": "{:.3f}", "distance": "{:.3f}",
    },
}  # fmt: skip
"""Fields that the table of each part shows."""


def table(part: str, rows: Sequence[Mapping[str, Any]]) -> Group:
    """The rows of a part. Heads are broken at underscores, so that tables fit in 80 columns."""

    def column(name: str, form: str) -> Column:
        head = name.replace("_", "\n")
        return Column(head, lambda row: "" if row[name] is None else form.format(row[name]), is_text=form == "{}")

    return report.table(part, [column(name, form) for name, form in SHOWN[part].items()], rows, is_wide=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=SHOWN)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--draft-model")
    parser.add_argument("--scale", default="none", help="make the target wider: none, 100m or HIDDENxFFN")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--contexts", type=_whole, nargs="+")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--num-speculative-tokens", "-k", type=int)
    parser.add_argument("--stop-at-eos", action="store_true")
    parser.add_argument("--prompts-file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-widths", type=int, nargs="+", default=[1], help="factors that widen the drafter")
    parser.add_argument("--vocab-sizes", type=_whole, nargs="+", default=[4096, 32000, 150000])
    parser.add_argument("--datastore-sizes", type=_whole, nargs="+", default=[100_000])
    parser.add_argument("--draft-steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pair = load_pair(options.model, options.draft_model, options.dtype)
    with torch.inference_mode():
        parts = Parts(pair, options)
        measure = {
            "efficiency": parts.efficiency,
            "profile": lambda: parts.profiles(pair),
            "drafting": parts.drafting,
            "accepted": parts.accepted,
        }[options.part]
        rows = list(measure())
    print(f"{parts.pair.label}\n{parts.pair.target.dtype}, {torch.get_num_threads()} threads")
    show(Console(highlight=False, width=WIDTH), [table(options.part, rows)])
    if options.out is not None:
        keep_json(options.out, {"provenance": provenance(), "models": parts.pair.label, options.part: rows})


def _whole(text: str) -> int:
    """``1e5`` is 100000."""
    return int(float(text))


if __name__ == "__main__":
    main()
