"""The properties that a drafter and the engine around it must have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from foredraft.beginnings import shared_length
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine import governor as governing
from foredraft.engine.cost_model import CostModel
from foredraft.engine.drafter import Drafter, DraftSize, Needs, PromptChunk, StepResult, WrappingDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.row import Row
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.tree import DraftTree


@dataclass(frozen=True)
class Trace:
    """The result of a run: tokens and finish reason per request, the number of steps, and accepted draft tokens."""

    outputs: dict[str, tuple[int, ...]]
    reasons: dict[str, str | None]
    num_steps: int
    num_accepted: int = 0


@dataclass
class Shown:
    """The evidence that `check_drafter` collects. ``str`` returns it as a sentence.

    Attributes:
      name: name of the drafter.
      num_runs, num_rows: numbers of runs and rows that were decoded with the drafter and compared with plain decoding.
      num_governed_rows: number of these rows in which a governor deepened and cut the drafts.
      num_chains, num_trees: numbers of proposed chains and trees, without empty drafts.
      deepest: number of tokens on the longest path of any draft.
      num_drafted, num_accepted: number of drafted tokens, and number of those that the target accepted.
    """

    name: str
    num_runs: int = 0
    num_rows: int = 0
    num_governed_rows: int = 0
    num_chains: int = 0
    num_trees: int = 0
    deepest: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __str__(self) -> str:
        runs = f"{self.name}: {self.num_rows} rows in {self.num_runs} runs; {self.num_governed_rows} rows were governed"
        if not self.num_drafted:
            return f"{runs}. It drafted nothing, so its drafts were not tested."
        return (
            f"{runs}. The tokens equal those of plain decoding, and the drafter keeps its contract. "
            f"{self.num_drafted} tokens were drafted in {self.num_chains} chains and {self.num_trees} trees, up to "
            f"{self.deepest} deep, and {self.num_accepted} were accepted. No state outlived its rows."
        )

    def add_drafts(self, trees: Sequence[DraftTree]) -> None:
        """Count proposed drafts."""
        for tree in trees:
            if len(tree) > 1:
                self.num_drafted += tree.num_draft_tokens
                self.deepest = max(self.deepest, tree.depth)
                self.num_chains += tree.is_chain
                self.num_trees += not tree.is_chain

    def add_run(self, rows: Sequence[Row], *, is_governed: bool) -> None:
        """Count the rows of a finished run."""
        self.num_runs += 1
        self.num_rows += len(rows)
        self.num_governed_rows += len(rows) if is_governed else 0
        self.num_accepted += sum(row.stats.num_accepted_draft_tokens for row in rows)


class _Watched(WrappingDrafter):
    """A wrapper that forwards every call to a drafter and checks the contract between engine and drafter.

    The state of a row is the last chunk of its prompt.

    Args:
      drafter: the drafter under test.
      shown: counts of drafts; several drafters may share one object.
    """

    def __init__(self, drafter: Drafter, shown: Shown | None = None) -> None:
        super().__init__([drafter])
        self.drafter = drafter
        self.facts = replace(drafter.facts, name=drafter.name)
        self.shown = shown or Shown(drafter.name)
        self._reads_prompts = self._reads_all = False

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        needs = super().needs(target, cache)
        self._reads_prompts = needs.reads_prompts
        self._reads_all = needs.reads_prompts and not needs.partial_prompts
        return needs

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        for row, chunk in zip(rows, chunks, strict=True):
            begins_anew = self._reads_all and not row.state and not row.index
            before: PromptChunk | None = row.state.get(self)
            known = before.start + before.num_tokens if before else 0 if begins_anew else chunk.start
            require(
                chunk.start == known or not self._reads_prompts,
                f"start: the next chunk of row {row.id} begins at {chunk.start}, but {known} tokens have been read",
            )
            require(
                self._reads_prompts or chunk.is_last,
                f"{self.name} got a partial prompt chunk, but does not need the features of prompts",
            )
            row.state[self] = PromptChunk(chunk.start, chunk.num_tokens, is_last=chunk.is_last)
        super().start(rows, chunks)

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        before = [list(row.token_ids) for row in rows]
        trees = self.drafter.propose(rows, budgets)
        require(len(trees) == len(rows), f"{self.name}: {len(trees)} drafts for {len(rows)} rows")
        for row, tokens, budget, tree in zip(rows, before, budgets, trees, strict=True):
            has_started = self in row.state and row.state[self].is_last
            require(has_started, f"propose was called before start for row {row.id}")
            require(row.token_ids == tokens, f"{self.name} changed the tokens of row {row.id}")
            require(
                tree.tokens[0] == tokens[-1],
                f"{self.name}: the root of the draft is token {tree.tokens[0]}, not the pending token {tokens[-1]}",
            )
            require(
                tree.depth <= max(budget, 0), f"{self.name} drafted {tree.depth} tokens deep; the limit is {budget}"
            )
        self.shown.add_drafts(trees)
        return trees

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            ends_well = tuple(row.token_ids[-len(result.emitted) :]) == result.emitted
            require(ends_well, f"observe: row {row.id} does not end with the emitted tokens {result.emitted}")
            path = [result.tree.tokens[node] for node in result.path[1:]]
            require(
                path == list(result.emitted[: len(path)]), "observe: the accepted path differs from the emitted tokens"
            )
        self.drafter.observe(rows, results)


def require(holds: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds, even under ``python -O``."""
    if not holds:
        raise AssertionError(message)


def decode(
    target: CausalLM,
    drafter: Drafter,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    eos_token_ids: Sequence[int] = (),
    config: EngineConfig | None = None,
    abort: str | None = None,
    governor: Governor | None = None,
) -> Trace:
    """Run requests to their end, and check the invariants of engine, cache and drafter after every step.

    Args:
      requests: pairs of a prompt and its parameters. Request i is called ``str(i)``, and its sample j ``"i.j"`` in the
        trace.
      abort: name of a request to abort as soon as it has any output.
      governor: governor of the engine; with None, drafts are as long as allowed.
    Raises: AssertionError if a step makes more than one target forward, or if the cache does not contain exactly the
      tokens before the pending one.
    """
    watched = drafter if isinstance(drafter, _Watched) else _Watched(drafter)
    engine = Engine(target, watched, config, eos_token_ids=eos_token_ids, governor=governor)
    rows = []
    for i, (prompt, params) in enumerate(requests):
        rows += engine.add_request(prompt, params, str(i))
    for row in rows:
        row.id += FIRST_ROW_ID
    num_steps = 0
    while engine.has_unfinished:
        before = target.num_forwards
        engine.step()
        num_steps += 1
        require(
            target.num_forwards - before == 1,
            f"step {num_steps} made {target.num_forwards - before} target forwards instead of one",
        )
        check_cache_lengths(engine)
        if any(row.request_id == abort and row.num_output_tokens and not row.is_finished for row in rows):
            engine.abort(str(abort))
            check_cache_lengths(engine)
    left = [row.id for row in rows if row.state]
    require(not left, f"rows {left} have finished, but their row.state is not empty")
    watched.shown.add_run(rows, is_governed=governor is not None)
    names = {row.id: f"{row.request_id}.{row.index}" for row in rows}
    return Trace(
        {names[row.id]: tuple(row.output_ids) for row in rows},
        {names[row.id]: row.finish_reason for row in rows},
        num_steps,
        sum(row.stats.num_accepted_draft_tokens for row in rows),
    )


FIRST_ROW_ID = 1 << 40
"""Id of the first row of `decode`. No token id, length or count is as large, so row ids are recognised in the state of
a drafter."""
MOST_ROWS = 1 << 20

_OPAQUE = (torch.nn.Module, CausalLM, type, FunctionType, ModuleType)
"""Types whose contents are not searched for row state."""


def check_no_state(drafter: Drafter) -> None:
    """Check that a drafter contains no row, and no id of a row, after all runs of `decode` have ended.

    Attributes, containers, partial functions and arrays of integers are searched at any depth.

    Raises: AssertionError that names the attributes.
    """
    left = sorted(set(_state_of_rows(drafter)))
    require(
        not left,
        f"{drafter.name}: state of finished rows is left in {', '.join(left[:4])}; keep state in row.state, which is "
        "deleted with the row",
    )


def _state_of_rows(drafter: Drafter) -> Iterator[str]:
    """Yield the names of attributes that contain rows or ids of rows."""
    seen: set[int] = set()
    found: list[tuple[Any, str]] = [(drafter, type(drafter).__name__)]
    while found:
        value, place = found.pop()
        if type(value) is int:
            if FIRST_ROW_ID <= value < FIRST_ROW_ID + MOST_ROWS:
                yield place
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Row):
                yield place
            elif isinstance(value, (torch.Tensor, np.ndarray)):
                if _holds_ids(value):
                    yield place
            else:
                found += _parts(value, place)


def _holds_ids(numbers: torch.Tensor | np.ndarray) -> bool:
    if numbers.dtype not in (torch.int64, np.int64):
        return False
    return bool(((numbers >= FIRST_ROW_ID) & (numbers < FIRST_ROW_ID + MOST_ROWS)).any())


def _parts(value: Any, place: str) -> list[tuple[Any, str]]:
    if isinstance(value, (str, bytes, float, bool)) or value is None or isinstance(value, _OPAQUE):
        return []
    if isinstance(value, Mapping):
        return [(part, place) for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(part, place) for part in value]
    if isinstance(value, partial):
        return [(part, place) for part in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, MethodType):
        return [(value.__self__, place)]
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    return [(getattr(value, name, None), f"{place}.{name}") for name in names if isinstance(name, str)]


def check_cache_lengths(engine: Engine) -> None:
    """Check that the cache of every decoding row ends right before its pending token. Raises AssertionError
    otherwise."""
    lengths = {row.id: len(row.token_ids) - 1 for row in engine.decoding_rows}
    cached = {row.id: engine.cache.lengths[slot] for slot, row in enumerate(engine.decoding_rows)}
    require(cached == lengths, f"the cache contains {cached} tokens per row; expected {lengths}")
    require(
        engine.cache.num_rows == engine.num_running,
        f"the cache has {engine.cache.num_rows} rows, but {engine.num_running} are running",
    )


@contextmanager
def ungoverned() -> Iterator[None]:
    """Make engines created inside the context draft and verify as much as their configs allow.

    The function is for tests, which need drafts even where drafting is slow. Users set ``length_policy="fixed"``
    instead.
    """
    with patch.object(governing, "new_governor", _no_governor):
        yield


@contextmanager
def governed() -> Iterator[None]:
    """Undo `ungoverned` inside the context: engines created inside are governed, as they are for users."""
    with patch.object(governing, "new_governor", _NEW_GOVERNOR):
        yield


def _no_governor(*args: Any) -> None:
    """Replacement of `foredraft.engine.governor.new_governor`."""


_NEW_GOVERNOR = governing.new_governor


MakeDrafter = Callable[[int], Drafter]
"""Function that builds a new drafter whose drafts have at most this depth."""

PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5), (7,), (2, 7, 1, 8, 2, 8), (1, 6, 1), (5, 5, 5, 5, 5, 5, 5, 5, 5))
GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=14, temperature=0.9, top_p=0.95, seed=1234)
PENALISED = replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.4, min_tokens=4)


def check_drafter(
    make_drafter: MakeDrafter, target: CausalLM | PreTrainedModel, *, depths: Iterable[int] = (1, 2, 3, 4, 5, 6)
) -> Shown:
    """Check every property that a drafter and the engine around it must have, on one target, and print the evidence.

    The output must equal that of plain decoding, greedy and sampled, at every depth. All of this is checked for single
    rows, and in a ragged batch in which rows start and end. Further cases are EOS and token limit at every offset
    inside a draft, empty drafts, an aborted request, several samples of one prompt, several runs of one drafter, and
    drafts that a governor deepens and cuts. After every step the cache must end right before the pending token, and the
    step must have made one target forward. At the end no drafter may contain any state of a row.

    Args:
      make_drafter: function that returns a fresh drafter for a depth.
      target: the model to draft for, a transformers model or a `CausalLM`, of any size, with a vocabulary of at least
        ten tokens.
      depths: draft depths to check, in tokens.
    Returns: counts of decoded rows and drafted tokens, which are printed as well.
    Raises: AssertionError that names the drafter, the setting and both outputs. Drafts and return values that do not
      fit their rows raise TreeError, ConfigError or another typed error.
    """
    if not isinstance(target, CausalLM):
        target = CausalLM(target)
    *shallower, deepest = sorted(set(depths))
    made: list[Drafter] = []
    shown = Shown(make_drafter(deepest).name)

    def make(depth: int) -> Drafter:
        made.append(make_drafter(depth))
        return _Watched(made[-1], shown)

    for params in (GREEDY, SAMPLED):
        plain = _decode_all(target, EmptyDrafter(), params)
        for depth in shallower:
            check_identity(make(depth), target, params, plain, f"K={depth}")
        check_single_rows(make, deepest, target, params, plain)
        check_endings(make, deepest, target, params, plain)
        check_rows_come_and_go(make(deepest), target, params, plain)
        check_abort(make(deepest), target, params, plain)
        check_samples(make(deepest), target, params)
        drafter = make(deepest)
        for run in ("first", "second"):
            check_identity(drafter, target, params, plain, f"K={deepest}, {run} run of one drafter")
        for costs in (NODES_ARE_FREE, NODES_ARE_DEAR):
            check_governed(make(deepest), target, params, plain, costs)
    penalised = _decode_all(target, EmptyDrafter(), PENALISED)
    check_identity(make(deepest), target, PENALISED, penalised, "with penalties")
    for drafter in made:
        check_no_state(drafter)
    print(shown)
    return shown


def _decode_all(target: CausalLM, drafter: Drafter, params: SamplingParams, **options: Any) -> Trace:
    return decode(target, drafter, [(prompt, params) for prompt in PROMPTS], **options)


def check_identity(drafter: Drafter, target: CausalLM, params: SamplingParams, plain: Trace, setting: str) -> None:
    """Check that all prompts in one batch give the tokens of plain decoding. Raises AssertionError otherwise."""
    compare(_decode_all(target, drafter, params), plain, f"{drafter.name}, {setting}, {_words(params)}")


NODES_ARE_FREE: Mapping[int, float] = {1: 1e-3, 512: 1.01e-3}
NODES_ARE_DEAR: Mapping[int, float] = {1: 1e-3, 512: 0.512}
"""Seconds of a step by its number of nodes, in the cost model that `check_governed` gives to a governor."""


def check_governed(
    drafter: Drafter, target: CausalLM, params: SamplingParams, plain: Trace, costs: Mapping[int, float]
) -> None:
    """Check that drafts deepened and cut by a governor do not change the output, with a fresh and with a used governor.

    Args:
      costs: seconds of a step by its number of nodes.
    Raises: AssertionError if the output differs.
    """
    governor = Governor(CostModel(costs), drafter.facts)
    for run in ("first", "second"):
        trace = _decode_all(target, drafter, params, governor=governor)
        compare(trace, plain, f"{drafter.name}, governed, {run} run, {_words(params)}")


def check_single_rows(
    make_drafter: MakeDrafter, depth: int, target: CausalLM, params: SamplingParams, plain: Trace
) -> None:
    """Check that a row gives the same tokens alone and in a batch. Raises AssertionError otherwise."""
    for i in (0, 1):
        trace = decode(target, make_drafter(depth), [(PROMPTS[i], params)])
        want = plain.outputs[f"{i}.0"]
        require(trace.outputs["0.0"] == want, _differ(f"prompt {i} alone", trace.outputs["0.0"], want))


def check_endings(
    make_drafter: MakeDrafter, depth: int, target: CausalLM, params: SamplingParams, plain: Trace
) -> None:
    """Check that token limit, stop token and EOS end a row exactly, at every offset inside a draft.

    One batch contains a request for every token limit, and another one a request for every stop token.

    Raises: AssertionError if an output or a finish reason differs.
    """
    text = plain.outputs["0.0"]
    name = f"{make_drafter(depth).name}, K={depth}, {_words(params)}"
    budgets = [replace(params, max_tokens=length) for length in range(1, len(text) + 1)]
    stops = [replace(params, stop_token_ids=(token,)) for token in text]
    for kind, several in (("budget", budgets), ("stop token", stops)):
        trace = decode(target, make_drafter(depth), [(PROMPTS[0], one) for one in several])
        for i, one in enumerate(several):
            want = text[: one.max_tokens] if kind == "budget" else cut_after(text, text[i])
            reason = "length" if kind == "budget" else "stop"
            got = trace.outputs[f"{i}.0"]
            require(got == want, _differ(f"{name}, {kind} {i}", got, want))
            require(trace.reasons[f"{i}.0"] == reason, f"{name}, {kind} {i}: ended by {trace.reasons[f'{i}.0']}")
    eos = text[min(depth + 1, len(text) - 1)]
    trace = _decode_all(target, make_drafter(depth), params, eos_token_ids=(eos,))
    for key, whole in plain.outputs.items():
        want, reason = cut_after(whole, eos), "stop" if eos in whole else "length"
        require(trace.outputs[key] == want, _differ(f"{name}, EOS {eos}", trace.outputs[key], want))
        require(trace.reasons[key] == reason, f"{name}, EOS {eos}: ended by {trace.reasons[key]}, not {reason}")


def check_rows_come_and_go(drafter: Drafter, target: CausalLM, params: SamplingParams, plain: Trace) -> None:
    """Check that two rows at a time and small prefill chunks do not change the output. Raises AssertionError
    otherwise."""
    config = EngineConfig(max_num_seqs=2, prefill_chunk_size=3)
    compare(_decode_all(target, drafter, params, config=config), plain, f"{drafter.name}, two rows at a time")


def check_abort(drafter: Drafter, target: CausalLM, params: SamplingParams, plain: Trace) -> None:
    """Check that an aborted row ends where it is and the other rows do not change. Raises AssertionError otherwise."""
    trace = _decode_all(target, drafter, params, abort="2")
    for key, want in plain.outputs.items():
        got = trace.outputs[key]
        want = want[: len(got)] if key == "2.0" else want
        require(got == want, _differ(f"{drafter.name}, request 2 aborted", got, want))
    require(trace.reasons["2.0"] == "abort", f"the aborted row ended by {trace.reasons['2.0']}")


def check_samples(drafter: Drafter, target: CausalLM, params: SamplingParams) -> None:
    """Check that three samples of one prompt equal those of plain decoding. Raises AssertionError otherwise."""
    requests = [(PROMPTS[0], replace(params, n=3)), (PROMPTS[3], params)]
    compare(decode(target, drafter, requests), decode(target, EmptyDrafter(), requests), f"{drafter.name}, n=3")


def compare(trace: Trace, plain: Trace, setting: str) -> None:
    """Raise AssertionError at the first row whose tokens or finish reason differ."""
    for key, want in plain.outputs.items():
        require(trace.outputs[key] == want, _differ(f"{setting}, row {key}", trace.outputs[key], want))
        reasons = trace.reasons[key], plain.reasons[key]
        require(reasons[0] == reasons[1], f"{setting}, row {key}: ended by {reasons[0]}, plain by {reasons[1]}")


def cut_after(tokens: tuple[int, ...], last: int) -> tuple[int, ...]:
    """Return the tokens up to and including the first ``last``."""
    return tokens[: tokens.index(last) + 1] if last in tokens else tokens


def _words(params: SamplingParams) -> str:
    return "greedy" if params.temperature == 0 else f"temperature {params.temperature}, seed {params.seed}"


def _differ(setting: str, got: Sequence[int], want: Sequence[int]) -> str:
    place = shared_length(list(got), list(want))
    is_cut = place == min(len(got), len(want))
    where = f"lengths {len(got)} and {len(want)}" if is_cut else f"first at output token {place}"
    return f"{setting}: differs from plain decoding, {where}: {list(got)} instead of {list(want)}"
