"""Whatever a verb of a drafter does or returns, its fault stays in its rows: every verb, every wrong type."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from contained import CONTAINED, TEXTS, VOCAB_SIZE, params, plain, run, target
from drafting import made
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.cost_model import CostModel
from foredraft.engine.drafter import Drafter, DrafterFacts, Needs
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.row import Row, RowState
from foredraft.errors import ConfigError, TreeError, as_exception
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.testing import check_cache_lengths
from foredraft.tree import DraftPlan, DraftTree

VICTIM = "victim"
"""The request for which drafters go wrong; all others are drafted for."""


class PanicException(BaseException):
    """As extension modules in Rust raise: no Exception."""

    __module__ = "pyo3_runtime"


class Interrupt(BaseException):
    """As whoever stops a call may raise: no Exception either."""


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


FAULTS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("out of ideas"),
    "RecursionError": lambda: RecursionError("too deep"),
    "StopIteration": StopIteration,
    "AssertionError": AssertionError,
    "SystemError": lambda: SystemError("returned a result with an exception set"),
    "OSError": lambda: OSError(28, "No space left on device"),
    "TimeoutError": TimeoutError,
    "CancelledError": CancelledError,
    "asyncio": asyncio.CancelledError,
    "panic": lambda: PanicException("index out of bounds: the len is 3 but the index is 7"),
    "group": lambda: BaseExceptionGroup("several", [PanicException("a"), ValueError("b")]),
    "silent": Silent,
    "one that cannot be shown": lambda: KeyError(object()),
}


def by_turns(names: Iterable[str], others: Sequence[Any]) -> list[Any]:
    """Every name with one of the others; the rest of the product in the whole matrix."""
    return [
        pytest.param(name, other, marks=() if number % len(others) == place else pytest.mark.full)
        for number, name in enumerate(names)
        for place, other in enumerate(others)
    ]


KINDS_OF_FAULTS = [
    pytest.param(name, marks=() if name in ("ValueError", "panic", "silent") else pytest.mark.full) for name in FAULTS
]


def sound() -> Drafter:
    return made("ngram", 4, prompt_lookup_min=1)


def rows_of(drafter: Drafter, governor: Any = None, prefixes: PrefixStore | None = None, **others: Any) -> list[Row]:
    """All texts, three at a time, the second of which is the victim."""
    engine = Engine(
        target(), drafter, replace(CONTAINED, **others), governor=governor, prefixes=prefixes or PrefixStore(8)
    )
    rows = []
    for number, text in enumerate(TEXTS):
        rows += engine.add_request(text, params(number), VICTIM if number == 1 else str(number))
    while engine.has_unfinished:
        engine.step()
        check_cache_lengths(engine)
    assert not any(row.state for row in rows)
    return rows


Answer = Callable[["Known", Any], Any]
"""From a state and what it would say rightly to what it says."""


@dataclass(eq=False)
class Known(RowState):
    """What a `Knowing` drafter knows of a row."""

    request_id: str
    num_tokens: int
    answers: dict[str, Answer]
    is_of_earlier: bool = False

    def copied(self) -> Any:
        return self._said("copied", replace(self))

    def cut(self, num_tokens: int) -> Any:
        num_tokens = min(num_tokens, self.num_tokens)
        verb = "cut again" if self.is_of_earlier else "cut"
        return self._said(verb, (replace(self, num_tokens=num_tokens, is_of_earlier=True), num_tokens))

    def ended(self, row: Row, *, is_kept: bool) -> None:
        self._said("ended", None)

    def _said(self, verb: str, right: Any) -> Any:
        answer = self.answers.get(verb)
        return right if answer is None else answer(self, right)


class Knowing(Drafter):
    """Drafts from the text, reads prompts, and has states whose verbs say what they are told to.

    Args:
      answers: by verb; "cut again" is that of a state which an earlier row has left.
    """

    name = "knowing"

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.num_read: dict[str, int] = {}
        self._inner = sound()

    def needs(self, target: Any, cache: Any) -> Needs:
        return Needs(prompts=True)

    def start(self, rows: Any, chunks: Any) -> None:
        for row, chunk in zip(rows, chunks, strict=True):
            known = row.state.get(self) or Known(row.request_id, 0, self.answers)
            assert chunk.start == known.num_tokens or row.index
            row.state[self] = replace(known, request_id=row.request_id, num_tokens=chunk.start + chunk.num_tokens)
            self.num_read[row.request_id] = self.num_read.get(row.request_id, 0) + chunk.num_tokens
            if chunk.is_last:
                self._inner.start([row], [chunk])

    def propose(self, rows: Any, budgets: Any) -> Any:
        assert all(type(row.state[self]) is Known for row in rows)
        return self._inner.propose(rows, budgets)

    def observe(self, rows: Any, results: Any) -> None:
        for row in rows:
            row.state[self].num_tokens = len(row.token_ids) - 1
        self._inner.observe(rows, results)


def is_victim(rows: Any) -> bool:
    return any(row.request_id == VICTIM for row in (rows if isinstance(rows, list) else [rows]))


# -- exceptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", KINDS_OF_FAULTS)
def test_an_exception_of_any_kind_stays_in_the_rows_of_its_call(fault: str) -> None:
    """Of every verb, and of `start` while a prompt is read."""
    for verb, is_reading in (("start", False), ("start", True), ("propose", False), ("observe", False)):
        drafter: Drafter = Knowing({}) if is_reading else sound()
        works = getattr(drafter, verb)

        def broken(rows: Any, *others: Any, works: Any = works, is_reading: bool = is_reading) -> Any:
            if is_victim(rows) and not (is_reading and others[0][0].is_last):
                raise FAULTS[fault]()
            return works(rows, *others)

        setattr(drafter, verb, broken)
        rows = rows_of(drafter, prefill_chunk_size=3 if is_reading else CONTAINED.prefill_chunk_size)
        assert [row.output_ids for row in rows] == plain(), verb
        assert {row.finish_reason for row in rows} == {"length"}
        assert rows[4].stats.num_draft_tokens > 0, verb  # it came when the victim had left
        assert not rows[4].stats.drafter_error
        assert rows[1].stats.drafter_error.startswith(type(FAULTS[fault]()).__name__), verb
        assert not is_reading or rows[1].stats.num_draft_tokens == 0


def of_the_victim(answer: Callable[[], Any]) -> Answer:
    """What states of the victim say; all others are sound."""
    return lambda state, right: answer() if state.request_id == VICTIM else right


def fail(fault: str) -> Any:
    raise FAULTS[fault]()


def samples_of(drafter: Drafter) -> tuple[list[Row], list[Row]]:
    """Three samples of the victim, and a row beside them that began before: both with plain decoding's tokens."""
    engine = Engine(target(), drafter, replace(CONTAINED, max_num_seqs=4), prefixes=PrefixStore(8))
    before = engine.add_request(TEXTS[0], params(0), "0")
    engine.step()
    rows = engine.add_request(TEXTS[1], params(1, n=3), VICTIM)  # greedy: all alike
    while engine.has_unfinished:
        engine.step()
        check_cache_lengths(engine)
    assert [row.output_ids for row in (*before, *rows)] == [plain()[0], *[plain()[1]] * 3]
    assert not any(row.state for row in (*before, *rows))
    return rows, before


@pytest.mark.parametrize("fault", KINDS_OF_FAULTS)
def test_an_exception_of_a_state_stays_in_its_row(fault: str) -> None:
    """One that takes over what an earlier row has left goes on with the target's columns, and without drafts."""
    name, failing = type(FAULTS[fault]()).__name__, of_the_victim(lambda: fail(fault))
    victims, others = samples_of(Knowing({"copied": failing}))
    assert all(row.stats.drafter_error.startswith(name) for row in victims)
    assert not any(row.stats.drafter_error for row in others)
    assert all(row.stats.num_draft_tokens > 0 for row in others)
    for verb, answer, culprit in (
        ("cut", failing, 1),
        ("ended", failing, 1),
        ("cut again", lambda state, right: fail(fault), 4),
    ):
        rows = rows_of(Knowing({verb: answer}))
        assert [row.output_ids for row in rows] == plain(), verb
        assert [bool(row.stats.drafter_error) for row in rows] == [number == culprit for number in range(5)], verb
        assert rows[culprit].stats.drafter_error.startswith(name), verb
        assert rows[0].stats.num_draft_tokens > 0, verb
    assert rows[4].num_cached_tokens == len(TEXTS[4]) - 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, Interrupt])
def test_what_ends_the_program_is_passed_on(error: type[BaseException]) -> None:
    def broken(*_: Any) -> Any:
        raise error

    for verb in ("start", "propose", "observe"):
        drafter = sound()
        setattr(drafter, verb, broken)
        with pytest.raises(error):
            run(drafter)


def test_a_panic_is_seen_by_whoever_catches_exceptions() -> None:
    panic = PanicException("x")
    assert as_exception(error := ValueError()) is error
    assert str(as_exception(panic)) == "PanicException: x"
    assert as_exception(panic).__cause__ is panic


def test_a_panic_of_a_processor_or_a_tokenizer_ends_its_own_row() -> None:
    def panics(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise PanicException("no such state")

    class Panicking:
        def decode(self, ids: list[int], **_: Any) -> str:
            raise PanicException("no such token")

    def given(number: int, **others: Any) -> Any:
        return params(number, **(others if number == 1 else {}))

    for keys, tokenizer in (({"logits_processors": [panics]}, None), ({"stop": ["z"]}, Panicking())):
        rows = run(sound(), given=lambda number, keys=keys: given(number, **keys), tokenizer=tokenizer)
        assert [row.finish_reason for row in rows] == ["length", "error", "length", "length", "length"]
        assert "PanicException: no such" in str(rows[1].stop_reason)
        assert [row.output_ids for row in rows[2:]] == plain()[2:]


# -- what verbs return -----------------------------------------------------------------------------------------------

WRONG_DRAFTS: list[Any] = [None, 5, "no", b"no", {}, [], [None] * 9, object(), torch.zeros(()), DraftTree.root(1)]
WRONG_NUMBERS: list[Any] = [None, -1, 10**6, 2.0, "all", [1], torch.tensor([1, 2]), float("nan"), True]
WRONG_STATES: list[Any] = [5, "no", object(), [], RowState, (RowState(), 1)]
WRONG_CUTS: list[Any] = [
    *(5, "no", object(), [], RowState(), (), (RowState(),), (RowState(), 1, 1), [RowState(), 1]),
    *((None, 1), (5, 1), (RowState, 1)),
]


def test_a_wrong_return_of_propose_is_a_fault_of_its_rows() -> None:
    for value in WRONG_DRAFTS:
        drafter = sound()
        drafter.propose = lambda *_, value=value: value  # type: ignore[method-assign]
        rows = rows_of(drafter)
        assert [row.output_ids for row in rows] == plain(), repr(value)
        assert all(row.stats.drafter_error.startswith("TreeError: ") for row in rows), repr(value)


def test_a_copy_that_is_no_state_is_a_fault_of_the_samples_of_its_prompt() -> None:
    for value in WRONG_STATES:
        victims, others = samples_of(Knowing({"copied": of_the_victim(lambda value=value: value)}))
        assert all(row.stats.drafter_error.startswith("TypeError: copied returned") for row in victims), repr(value)
        assert not any(row.stats.drafter_error for row in others), repr(value)
        assert others[0].stats.num_draft_tokens > 0, repr(value)


def test_a_state_may_begin_anew_with_every_sample_and_every_prompt() -> None:
    rows, _ = samples_of(Knowing({"copied": lambda state, right: None}))
    assert not any(row.stats.drafter_error for row in rows)
    drafter = Knowing({"cut": lambda state, right: None})
    rows = rows_of(drafter)
    assert [row.output_ids for row in rows] == plain()
    assert not any(row.stats.drafter_error for row in rows)
    assert rows[4].num_cached_tokens == 0  # it must be shown the whole prompt
    assert drafter.num_read["4"] == len(TEXTS[4]) - 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("verb", ["cut", "cut again"])
def test_a_wrong_return_of_cut_is_a_fault_of_its_row(verb: str) -> None:
    """What a row leaves is looked at when it ends, and what another one takes over when that begins."""
    wrong: list[Answer] = [lambda state, right, value=value: value for value in WRONG_CUTS]
    wrong += [lambda state, right, value=value: (right[0], value) for value in WRONG_NUMBERS]
    for place, answer in enumerate(wrong):

        def said(state: Known, right: Any, answer: Answer = answer) -> Any:
            return answer(state, right) if verb == "cut again" or state.request_id == "0" else right

        rows = rows_of(Knowing({verb: said}))
        culprit = 0 if verb == "cut" else 4
        assert [row.output_ids for row in rows] == plain(), place
        assert [bool(row.stats.drafter_error) for row in rows] == [number == culprit for number in range(5)], place
        assert "cut returned" in rows[culprit].stats.drafter_error, place
        if verb == "cut":  # nothing of it is left to others
            assert rows[4].num_cached_tokens == 0
            assert rows[4].stats.num_draft_tokens > 0
        else:
            assert rows[4].num_cached_tokens == len(TEXTS[4]) - 1
            assert rows[4].stats.num_draft_tokens == 0


def test_a_number_of_any_whole_type_may_be_recalled() -> None:
    for number in (np.int64(1), torch.tensor(1), 1):
        drafter = Knowing({"cut again": lambda state, right, number=number: (replace(right[0], num_tokens=1), number)})
        rows = rows_of(drafter)
        assert not any(row.stats.drafter_error for row in rows)
        assert rows[4].num_cached_tokens == 1
        assert drafter.num_read["4"] == len(TEXTS[4]) - 2


# -- drafts ----------------------------------------------------------------------------------------------------------

Make = Callable[[int, tuple[int, ...]], Any]
"""From the pending token and the right continuation to what is proposed for the row."""


def chain(pending: int, tokens: Any, **others: Any) -> DraftTree:
    return DraftTree([pending, *tokens], list(range(-1, len(tokens))), **others)


RIGHT: dict[str, Make] = {
    "lists": chain,
    "arrays": lambda pending, tokens: DraftTree(np.array([pending, *tokens]), np.arange(-1, len(tokens))),
    "tensors": lambda pending, tokens: DraftTree(torch.tensor([pending, *tokens]), torch.arange(-1, len(tokens))),
    "numpy numbers": lambda pending, tokens: DraftTree.chain(np.int32(pending), [np.uint16(t) for t in tokens]),
    "torch numbers": lambda pending, tokens: DraftTree.chain(torch.tensor(pending), list(map(torch.tensor, tokens))),
    "generators": lambda pending, tokens: DraftTree((t for t in (pending, *tokens)), iter(range(-1, len(tokens)))),
    "paths": lambda pending, tokens: DraftTree.from_paths(np.int64(pending), [np.array(tokens, dtype=np.int64)]),
    "scores in a list": lambda pending, tokens: chain(pending, tokens, scores=[1] * (len(tokens) + 1)),
    "scores in a tensor": lambda pending, tokens: chain(pending, tokens, scores=torch.ones(len(tokens) + 1)),
    "sources in a list": lambda pending, tokens: chain(pending, tokens, sources=["me"] * (len(tokens) + 1)),
    "a tree of lists": lambda pending, tokens: DraftTree(
        [pending, *dict.fromkeys([(tokens or (0,))[0], 62, 63])],
        [-1, *[0] * len({(tokens or (0,))[0], 62, 63})],
    ),
}

WRONG: dict[str, Make] = {
    "None": lambda pending, tokens: None,
    "a list of tokens": lambda pending, tokens: list(tokens),
    "a pair": lambda pending, tokens: ([pending, *tokens], list(range(-1, len(tokens)))),
    "a stranger": lambda pending, tokens: type("Tree", (), {"tokens": (pending,), "parents": (-1,), "probs": None})(),
    "the class": lambda pending, tokens: DraftTree,
    "floats": lambda pending, tokens: chain(pending, [1.0]),
    "a float tensor": lambda pending, tokens: DraftTree(torch.tensor([pending, 1.0]), (-1, 0)),
    "truth values": lambda pending, tokens: chain(pending, [True]),
    "texts": lambda pending, tokens: chain(pending, ["a"]),
    "None as a token": lambda pending, tokens: chain(pending, [None]),
    "a matrix": lambda pending, tokens: DraftTree(torch.tensor([[pending, 1]]), (-1, 0)),
    "tokens that are None": lambda pending, tokens: DraftTree(None, (-1,)),
    "a token beyond the vocabulary": lambda pending, tokens: chain(pending, [VOCAB_SIZE]),
    "a token beyond 64 bits": lambda pending, tokens: chain(pending, [2**80]),
    "a negative token": lambda pending, tokens: chain(pending, [-1]),
    "another pending token": lambda pending, tokens: DraftTree.root((pending + 1) % VOCAB_SIZE),
    "fewer parents": lambda pending, tokens: DraftTree((pending, 1, 2), (-1, 0)),
    "float parents": lambda pending, tokens: DraftTree((pending, 1), (-1.0, 0.0)),
    "scores of NaN": lambda pending, tokens: chain(pending, [1], scores=(1.0, float("nan"))),
    "negative scores": lambda pending, tokens: chain(pending, [1], scores=(1.0, -0.5)),
    "large scores": lambda pending, tokens: chain(pending, [1], scores=(1.0, 7.0)),
    "scores of None": lambda pending, tokens: chain(pending, [1], scores=(1.0, None)),
    "a score": lambda pending, tokens: chain(pending, [1], scores=0.5),
    "a source that is a list": lambda pending, tokens: chain(pending, [1], source=["me"]),
    "a source that is None": lambda pending, tokens: chain(pending, [1], source=None),
    "sources that are numbers": lambda pending, tokens: chain(pending, [1], sources=[1, 2]),
    "a text for sources": lambda pending, tokens: chain(pending, [1], sources="me"),
    "a plan that is a number": lambda pending, tokens: chain(pending, [1], plan=3),
    "a plan of nothing": lambda pending, tokens: chain(pending, [1], plan=DraftPlan(None)),
    "a plan of an unknown cause": lambda pending, tokens: chain(pending, [1], plan=DraftPlan(0, cause="mood")),
    "probs of one dimension": lambda pending, tokens: chain(pending, [1], probs=torch.ones(VOCAB_SIZE)),
    "probs in a list": lambda pending, tokens: chain(pending, [1], probs=[[1.0]]),
    "a number for probs": lambda pending, tokens: chain(pending, [1], probs=1.0),
}

OF_THE_VICTIM = {"None", "a list of tokens", "a pair", "a stranger", "the class", "another pending token"} | {
    name for name in WRONG if name.startswith(("a token", "a negative token", "a plan"))
}
"""Found by the engine when `propose` has returned, so that only the row of the draft goes without the drafter."""

GOVERNED = {1: 0.001, 512: 0.00101}


class Proposing(EmptyDrafter):
    """Proposes what plain decoding gives for all rows, the victim's made by a function."""

    name = "proposing"

    def __init__(self, make: Make, makes_all: bool = False) -> None:
        self._make = make
        self._makes_all = makes_all
        self._texts = {tuple(text): output for text, output in zip(TEXTS, plain(), strict=True)}

    def propose(self, rows: Any, budgets: Any) -> Any:
        return [self._draft(row, budget) for row, budget in zip(rows, budgets, strict=True)]

    def _draft(self, row: Row, budget: int) -> Any:
        prompt = tuple(row.token_ids[: row.num_prompt_tokens])
        tokens = tuple(self._texts[prompt][row.num_output_tokens :][: min(budget, 4)])
        is_made = self._makes_all or row.request_id == VICTIM
        return self._make(row.pending, tokens) if is_made else DraftTree.chain(row.pending, tokens, source=self.name)


@pytest.mark.parametrize(("name", "is_governed"), by_turns(RIGHT, (False, True)))
def test_numbers_of_any_kind_make_a_tree(name: str, is_governed: bool) -> None:
    """A tree of lists ended the whole call where the engine was governed: lists cannot be hashed."""
    governor = Governor(CostModel(GOVERNED)) if is_governed else None
    rows = rows_of(Proposing(RIGHT[name], makes_all=True), governor)
    assert [row.output_ids for row in rows] == plain()
    assert not any(row.stats.drafter_error for row in rows)
    assert sum(row.stats.num_accepted_draft_tokens for row in rows) > 0
    tree = RIGHT[name](5, (6, 7))
    assert {type(number) for number in (*tree.tokens, *tree.parents)} == {int}
    assert type(tree.tokens) is type(tree.parents) is tuple
    assert hash(tree.parents) is not None


@pytest.mark.parametrize("name", [name for name in WRONG if name not in OF_THE_VICTIM])
def test_a_tree_that_cannot_be_is_refused_when_it_is_made(name: str) -> None:
    with pytest.raises(TreeError):
        WRONG[name](5, (6, 7))


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    ("name", "is_governed"), by_turns([*sorted(OF_THE_VICTIM), "texts", "fewer parents"], (False, True))
)
def test_a_draft_that_is_wrong_ends_drafting_for_its_rows(name: str, is_governed: bool) -> None:
    governor = Governor(CostModel(GOVERNED)) if is_governed else None
    rows = rows_of(Proposing(WRONG[name]), governor)
    assert [row.output_ids for row in rows] == plain()
    assert {row.finish_reason for row in rows} == {"length"}
    assert rows[1].stats.drafter_error.startswith("TreeError: "), rows[1].stats.drafter_error
    touched = {row.request_id for row in rows if row.stats.drafter_error}
    assert touched == {VICTIM} if name in OF_THE_VICTIM else touched <= {VICTIM, "0", "2"}
    assert rows[4].stats.num_accepted_draft_tokens > 0
    with pytest.raises(TreeError):
        rows_of(Proposing(WRONG[name]), contains_faults=False)


# -- distributions -----------------------------------------------------------------------------------------------------


def distribution(**changed: float) -> torch.Tensor:
    probs = torch.full((1, VOCAB_SIZE), 1.0 / VOCAB_SIZE)
    for place, value in changed.items():
        probs[0, int(place[1:])] = value
    return probs


WRONG_DISTRIBUTIONS: dict[str, Callable[[], Any]] = {
    "of another vocabulary": lambda: torch.full((1, 7), 1.0 / 7),
    "of whole numbers": lambda: torch.ones(1, VOCAB_SIZE, dtype=torch.int64),
    "of numpy": lambda: np.full((1, VOCAB_SIZE), 1.0 / VOCAB_SIZE),
    "elsewhere": lambda: torch.empty(1, VOCAB_SIZE, device="meta"),
    "without the drafted token": lambda: distribution(_1=0.0),
    "with a negative number": lambda: distribution(_1=-1.0),
    "with NaN": lambda: distribution(_5=float("nan")),
    "with infinity": lambda: distribution(_5=float("inf")),
    "that are logits": lambda: torch.randn(1, VOCAB_SIZE) * 5,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "rule"), by_turns(WRONG_DISTRIBUTIONS, ("standard", "block")))
def test_a_draft_with_a_wrong_distribution_ends_drafting_for_its_row(name: str, rule: str) -> None:
    """They ended the whole call: rules read distributions after the drafter has been left."""

    def given(pending: int, tokens: Any) -> DraftTree:
        return DraftTree.chain(pending, [1], probs=WRONG_DISTRIBUTIONS[name]())

    def wrong(number: int) -> Any:
        return replace(params(number), temperature=0.9)

    engine = Engine(target(), Proposing(given), replace(CONTAINED, acceptance=rule))
    rows = [
        engine.add_request(text, wrong(number), VICTIM if number == 1 else str(number))[0]
        for number, text in enumerate(TEXTS)
    ]
    list(engine.run())
    assert {row.finish_reason for row in rows} == {"length"}
    assert [bool(row.stats.drafter_error) for row in rows] == [False, True, False, False, False]
    assert rows[1].stats.num_spec_steps == 0


@pytest.mark.parametrize(
    ("rule", "dtype"), [("standard", torch.float32), ("block", torch.bfloat16), ("standard", torch.float64)]
)
def test_sampled_drafts_in_every_dtype_are_right(rule: str, dtype: torch.dtype) -> None:
    class Rounded(EmptyDrafter):
        name = "rounded"

        def propose(self, rows: Any, budgets: Any) -> Any:
            return [
                DraftTree.chain(row.pending, [int(row.pending) % VOCAB_SIZE], probs=distribution().to(dtype))
                for row in rows
            ]

    engine = Engine(target(), Rounded(), replace(CONTAINED, acceptance=rule))
    rows = [engine.add_request(text, replace(params(0), seed=7))[0] for text in TEXTS]
    list(engine.run())
    assert not any(row.stats.drafter_error for row in rows)
    assert sum(row.stats.num_spec_steps for row in rows) > 0


# -- the cache, arms and set-up ----------------------------------------------------------------------------------------


def test_a_drafter_that_leaves_other_lengths_in_the_cache_is_at_fault() -> None:
    class Longer(EmptyDrafter):
        def needs(self, target: Any, cache: Any) -> Needs:
            self._cache = cache
            return Needs()

        def propose(self, rows: Any, budgets: Any) -> Any:
            self._cache.lengths[0] += 1
            return super().propose(rows, budgets)

    rows = run(Longer())
    assert [row.output_ids for row in rows] == plain()
    assert all("the drafter left [" in row.stats.drafter_error for row in rows)


def test_an_arm_that_cannot_be_chosen_is_a_fault_of_the_rows_that_are_drafted_for() -> None:
    class Stuck(Proposing):
        facts = DrafterFacts("stuck", arms=("one", "other"), arm=1)

        def propose(self, rows: Any, budgets: Any) -> Any:
            if (arm := budgets[0].arm) is not None:
                raise LookupError(f"no arm {arm}")
            return super().propose(rows, budgets)

    rows = rows_of(Stuck(chain), Governor(CostModel(GOVERNED), Stuck.facts))
    assert [row.output_ids for row in rows] == plain()
    assert rows[0].stats.drafter_error == "LookupError: no arm 1"


def test_a_shared_drafter_drafts_for_no_row_with_a_salt() -> None:
    class Shared(Proposing):
        facts = DrafterFacts("shared", is_shared=True)

    engine = Engine(target(), Shared(chain), CONTAINED)
    rows = [engine.add_request(text, params(number))[0] for number, text in enumerate(TEXTS)]
    for row in rows[1:]:
        row.cache_salt = "mine"
    list(engine.run())
    assert [row.output_ids for row in rows] == plain()
    assert rows[0].stats.num_draft_tokens > 0
    assert sum(row.stats.num_draft_tokens for row in rows[1:]) == 0


@pytest.mark.parametrize(
    ("facts", "needs", "message"),
    [
        (DrafterFacts(None), Needs(), "its name is None"),  # type: ignore[arg-type]
        (DrafterFacts(5), Needs(), "its name is 5"),  # type: ignore[arg-type]
        (DrafterFacts(), Needs(), "its name is ''"),
        (None, Needs(), "give it facts"),
        ({"name": "x"}, Needs(), "give it facts"),
        (DrafterFacts("x"), None, "its needs NoneType"),
        (DrafterFacts("x"), {"prompts": True}, "its needs dict"),
        (DrafterFacts("x"), Needs(layer_inputs=(9,)), r"the inputs of layers \(9,\)"),
        (DrafterFacts("x"), Needs(layer_inputs=(-1,)), r"the inputs of layers \(-1,\)"),
        (DrafterFacts("x"), Needs(caches=(5,)), r"needs caches \(5,\); each must be a DraftCache"),  # type: ignore[arg-type]
        (DrafterFacts("x"), Needs(caches=5), "needs caches 5; each must be a DraftCache"),  # type: ignore[arg-type]
    ],
)
def test_a_drafter_that_cannot_run_is_refused_when_the_engine_is_made(facts: Any, needs: Any, message: str) -> None:
    drafter: Any = sound()
    drafter.facts, drafter.needs = facts, lambda *_: needs
    with pytest.raises(ConfigError, match=message):
        Engine(target(), drafter, CONTAINED)


def test_something_else_than_a_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="NGram cannot be a drafter"):
        Engine(target(), type("NGram", (), {"name": "x", "facts": DrafterFacts("x")})(), CONTAINED)
