"""Whatever a verb of a drafter does or returns, its fault stays in its rows: every verb, every wrong type."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from contained import CONTAINED, TEXTS, VOCAB_SIZE, params, plain, run, target
from drafting import made
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.cost_model import CostModel
from foredraft.engine.drafter import Drafter, Needs
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.row import Row
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


def sound() -> Drafter:
    return made("ngram", 4, prompt_lookup_min=1)


def rows_of(drafter: Drafter, governor: Any = None, **others: Any) -> list[Row]:
    """All texts, three at a time, the second of which is the victim."""
    engine = Engine(target(), drafter, replace(CONTAINED, **others), governor=governor, prefixes=PrefixStore(8))
    rows = []
    for number, text in enumerate(TEXTS):
        rows += engine.add_request(text, params(number), VICTIM if number == 1 else str(number))
    while engine.has_unfinished:
        engine.step()
        check_cache_lengths(engine)
    return rows


def is_victim(rows: Any) -> bool:
    return any(row.request_id == VICTIM for row in (rows if isinstance(rows, list) else [rows]))


# -- exceptions ----------------------------------------------------------------------------------------------------

VERBS = ("recall", "start", "fork", "propose", "observe", "keep", "forget", "read")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_exception_of_any_kind_stays_in_the_rows_of_its_call(fault: str) -> None:
    for verb in VERBS:
        drafter = sound()
        if verb == "read":
            drafter.requires = replace(drafter.requires, prompts=True)
        works = getattr(drafter, verb)

        def broken(rows: Any, *others: Any, works: Any = works) -> Any:
            if is_victim(rows):
                raise FAULTS[fault]()
            return works(rows, *others)

        setattr(drafter, verb, broken)
        rows = rows_of(drafter)
        assert [row.output_ids for row in rows] == plain(), verb
        assert {row.finish_reason for row in rows} == {"length"}
        assert rows[4].stats.num_draft_tokens > 0, verb  # it came when the victim had left
        assert not rows[4].stats.drafter_error
        if verb not in ("fork", "recall"):  # of several samples, and of prompts that begin like earlier ones
            assert rows[1].stats.drafter_error.startswith(type(FAULTS[fault]()).__name__), verb


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

WRONG_RETURNS: dict[str, list[Any]] = {
    "propose": [None, 5, "no", b"no", {}, [], [None] * 9, object(), torch.zeros(()), DraftTree.root(1)],
    "recall": [None, -1, 10**6, 2.0, "all", [1], torch.tensor([1, 2]), float("nan"), True],
}


@pytest.mark.parametrize("verb", WRONG_RETURNS)
def test_a_wrong_return_of_a_verb_is_a_fault_of_its_rows(verb: str) -> None:
    for value in WRONG_RETURNS[verb]:
        drafter = sound()
        setattr(drafter, verb, lambda *_, value=value: value)
        rows = rows_of(drafter)
        assert [row.output_ids for row in rows] == plain(), repr(value)
        if verb == "propose":
            assert all(row.stats.drafter_error.startswith("TreeError: ") for row in rows), repr(value)


def test_returns_that_nobody_reads_may_be_anything() -> None:
    for verb in ("start", "observe", "forget", "keep"):
        drafter = sound()
        works = getattr(drafter, verb)
        setattr(drafter, verb, lambda *args, works=works: (works(*args), object())[1])
        rows = rows_of(drafter)
        assert [row.output_ids for row in rows] == plain()
        assert not any(row.stats.drafter_error for row in rows)


def test_a_number_of_any_whole_type_may_be_recalled() -> None:
    for number in (np.int64(1), torch.tensor(1), 1):
        drafter = sound()
        drafter.recall = lambda *_, number=number: number
        assert not any(row.stats.drafter_error for row in rows_of(drafter))


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
    "no tokens": lambda pending, tokens: DraftTree((), ()),
    "tokens that are None": lambda pending, tokens: DraftTree(None, (-1,)),
    "a token beyond the vocabulary": lambda pending, tokens: chain(pending, [VOCAB_SIZE]),
    "a token beyond 64 bits": lambda pending, tokens: chain(pending, [2**80]),
    "a negative token": lambda pending, tokens: chain(pending, [-1]),
    "another pending token": lambda pending, tokens: DraftTree.root((pending + 1) % VOCAB_SIZE),
    "negative parents": lambda pending, tokens: DraftTree((pending, 1), (-1, -1)),
    "parents that follow": lambda pending, tokens: DraftTree((pending, 1, 2), (-1, 2, 0)),
    "fewer parents": lambda pending, tokens: DraftTree((pending, 1, 2), (-1, 0)),
    "float parents": lambda pending, tokens: DraftTree((pending, 1), (-1.0, 0.0)),
    "equal siblings": lambda pending, tokens: DraftTree([pending, 1, 1], [-1, 0, 0]),
    "fewer scores": lambda pending, tokens: chain(pending, [1], scores=(1.0,)),
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
    "fewer probs": lambda pending, tokens: chain(pending, [1, 2], probs=torch.ones(1, VOCAB_SIZE)),
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


@pytest.mark.parametrize("is_governed", [False, True], ids=["ungoverned", "governed"])
@pytest.mark.parametrize("name", RIGHT)
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


@pytest.mark.parametrize("is_governed", [False, True], ids=["ungoverned", "governed"])
@pytest.mark.parametrize("name", WRONG)
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


def law(**changed: float) -> torch.Tensor:
    probs = torch.full((1, VOCAB_SIZE), 1.0 / VOCAB_SIZE)
    for place, value in changed.items():
        probs[0, int(place[1:])] = value
    return probs


WRONG_LAWS: dict[str, Callable[[], Any]] = {
    "of another vocabulary": lambda: torch.full((1, 7), 1.0 / 7),
    "of whole numbers": lambda: torch.ones(1, VOCAB_SIZE, dtype=torch.int64),
    "of numpy": lambda: np.full((1, VOCAB_SIZE), 1.0 / VOCAB_SIZE),
    "elsewhere": lambda: torch.empty(1, VOCAB_SIZE, device="meta"),
    "without the drafted token": lambda: law(_1=0.0),
    "with a negative number": lambda: law(_1=-1.0),
    "with NaN": lambda: law(_5=float("nan")),
    "with infinity": lambda: law(_5=float("inf")),
    "that are logits": lambda: torch.randn(1, VOCAB_SIZE) * 5,
}


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("name", WRONG_LAWS)
def test_a_draft_with_a_wrong_distribution_ends_drafting_for_its_row(name: str, rule: str) -> None:
    """They ended the whole call: rules read distributions after the drafter has been left."""

    def given(pending: int, tokens: Any) -> DraftTree:
        return DraftTree.chain(pending, [1], probs=WRONG_LAWS[name]())

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


@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sampled_drafts_in_every_dtype_are_right(rule: str, dtype: torch.dtype) -> None:
    class Rounded(EmptyDrafter):
        name = "rounded"

        def propose(self, rows: Any, budgets: Any) -> Any:
            return [
                DraftTree.chain(row.pending, [int(row.pending) % VOCAB_SIZE], probs=law().to(dtype)) for row in rows
            ]

    engine = Engine(target(), Rounded(), replace(CONTAINED, acceptance=rule))
    rows = [engine.add_request(text, replace(params(0), seed=7))[0] for text in TEXTS]
    list(engine.run())
    assert not any(row.stats.drafter_error for row in rows)
    assert sum(row.stats.num_spec_steps for row in rows) > 0


# -- the cache, arms and set-up ----------------------------------------------------------------------------------------


def test_a_drafter_that_leaves_other_lengths_in_the_cache_is_at_fault() -> None:
    class Longer(EmptyDrafter):
        def bind(self, target: Any, cache: Any) -> None:
            self._cache = cache

        def propose(self, rows: Any, budgets: Any) -> Any:
            self._cache.lengths[0] += 1
            return super().propose(rows, budgets)

    rows = run(Longer())
    assert [row.output_ids for row in rows] == plain()
    assert all("the drafter left [" in row.stats.drafter_error for row in rows)


def test_an_arm_that_cannot_be_chosen_is_a_fault_of_the_rows_that_are_drafted_for() -> None:
    class Stuck(Proposing):
        arms = ("one", "other")

        def choose_arm(self, arm: int) -> None:
            raise LookupError(f"no arm {arm}")

    governor = Governor(CostModel(GOVERNED))
    governor.arm = 1
    rows = rows_of(Stuck(chain), governor)
    assert [row.output_ids for row in rows] == plain()
    assert rows[0].stats.drafter_error == "LookupError: no arm 1"


def test_a_drafter_that_cannot_say_whether_it_is_shared_drafts_for_no_row_with_a_salt() -> None:
    class Unsure(Proposing):
        @property
        def is_shared(self) -> bool:
            raise RuntimeError("who knows")

    engine = Engine(target(), Unsure(chain), CONTAINED)
    rows = [engine.add_request(text, params(number))[0] for number, text in enumerate(TEXTS)]
    for row in rows:
        row.cache_salt = "mine"
    list(engine.run())
    assert [row.output_ids for row in rows] == plain()
    assert sum(row.stats.num_draft_tokens for row in rows) == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": None}, "its name is None"),
        ({"name": 5}, "its name is 5"),
        ({"requires": None}, "its requires NoneType"),
        ({"requires": {"prompts": True}}, "its requires dict"),
        ({"requires": Needs(layer_inputs=(9,))}, r"the inputs of layers \(9,\)"),
        ({"requires": Needs(layer_inputs=(-1,))}, r"the inputs of layers \(-1,\)"),
    ],
)
def test_a_drafter_that_cannot_run_is_refused_when_the_engine_is_made(changed: dict[str, Any], message: str) -> None:
    drafter = sound()
    for name, value in changed.items():
        setattr(drafter, name, value)
    with pytest.raises(ConfigError, match=message):
        Engine(target(), drafter, CONTAINED)


def test_something_else_than_a_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="NGram cannot be a drafter"):
        Engine(target(), type("NGram", (), {"name": "x", "requires": Needs()})(), CONTAINED)
