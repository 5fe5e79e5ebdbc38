"""What a step costs beside the forwards of models does not grow with the text; operations are counted, not seconds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import eagle_heads
import toy_heads
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.heads.eagle import EagleDrafter
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.engine.cost_model import CostModel
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.frontend import Completion
from foredraft.engine.governor import Governor
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.rank_tree import RankTree
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, SAMPLED, perturbed, toy_model

VOCAB_SIZE = 64
SHORT, LONG = 128, 3072


@cache
def target() -> CausalLM:
    return CausalLM(toy_model(VOCAB_SIZE, max_position_embeddings=8192), execution="eager", probe=False)


@cache
def small() -> CausalLM:
    model = perturbed(toy_model(VOCAB_SIZE, max_position_embeddings=8192), 0.1, seed=2)
    return CausalLM(model, execution="eager", probe=False)


def made(method: str, **keys: Any) -> Callable[[], Drafter]:
    config = SpeculativeConfig(method, **({} if method == "none" else {"length_policy": "fixed"}), **keys)
    return lambda: make_drafter(config, DrafterContext(target(), draft_model=small()))


def heads(kind: str) -> Drafter:
    tree = RankTree.grown([[0.6, 0.1, 0.05]] * 3, 8)
    given = toy_heads.medusa_heads() if kind == "medusa" else toy_heads.hydra_heads(True)
    return MultiHeadDrafter(given, 2, tree=tree, target_vocab_size=VOCAB_SIZE, max_depth=3)


VIEW = {"kv_budget": 48, "kv_refresh": 16, "num_speculative_tokens": 3}
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": made("none"),
    "ngram": made("ngram"),
    "nasd": made("nasd"),
    "suffix": made("suffix"),
    "token_recycling": made("token_recycling", max_draft_nodes=16),
    "jacobi": made("jacobi", num_speculative_tokens=4),
    "lookahead": made("lookahead", num_speculative_tokens=3, guess_set_size=2),  # else the longer text fills the pool
    "layer_skip": made("layer_skip", skipped_attention=[1], num_speculative_tokens=3),
    "draft_model": made("draft_model", num_speculative_tokens=3),
    "sparse_kv": made("sparse_kv", **VIEW),
    "sparse_kv-snapkv": made("sparse_kv", kv_selector="snapkv", kv_window=16, **VIEW),
    "sparse_kv-model": made("sparse_kv", model="small", **VIEW),
    "ngram+suffix": made("ngram+suffix"),
    "medusa": lambda: heads("medusa"),
    "hydra++": lambda: heads("hydra++"),
    "eagle2": lambda: EagleDrafter(
        eagle_heads.trained(1), target(), policy=LengthPolicy(3), num_branches=2, reranks=True, max_nodes=6,
        target_vocab_size=VOCAB_SIZE,
    ),
}  # fmt: skip
FAST = ("ngram", "suffix", "sparse_kv-model", "token_recycling")
ALL_ON = replace(
    SAMPLED,
    n=1,
    top_p=0.9,
    stop=("never", "w1 w2 w3 w4 w5"),
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    no_repeat_ngram_size=6,
    logprobs=3,
)


class Words:
    """A tokenizer whose tokens are words."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" w{token}" for token in ids)


@dataclass
class Work:
    """Of a step, the forwards of models not counted.

    Args:
      tokens: of the text that were looked at, read or copied, in the row's own list.
      calls: of functions, built-in ones included.
      numbers: in tensors that were computed, and in those that they were computed from.
    """

    tokens: int = 0
    calls: int = 0
    numbers: int = 0


def _whole(name: str) -> Any:
    """A method of lists that looks at all of them."""

    def touched(text: Text, *args: Any) -> Any:
        text._counter.touch(len(text))
        return getattr(list, name)(text, *args)

    return touched


class Text(list[int]):
    """Tokens that count how many of them are looked at, whichever way."""

    def __init__(self, tokens: Iterable[int], counter: Counter) -> None:
        super().__init__(tokens)
        self._counter = counter

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self._counter.touch(len(found) if isinstance(index, slice) else 1)
        return found

    def __iter__(self) -> Iterator[int]:
        for token in super().__iter__():
            self._counter.touch(1)
            yield token

    def __reversed__(self) -> Iterator[int]:
        for token in super().__reversed__():
            self._counter.touch(1)
            yield token

    copy, index, count = _whole("copy"), _whole("index"), _whole("count")
    __add__, __contains__, __eq__, __mul__ = (
        _whole("__add__"),
        _whole("__contains__"),
        _whole("__eq__"),
        _whole("__mul__"),
    )


class Counter(TorchDispatchMode):
    """Counts work inside of `counting`, as long as it is not paused."""

    GATHERS = ("index", "index_put_", "embedding", "copy_")
    """Operations that touch as much as they yield, or less, however large what they look into."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self._is_counting = False

    def touch(self, num_tokens: int) -> None:
        self.work.tokens += num_tokens * self._is_counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._is_counting:
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            results = [value for value in tree_leaves(found) if isinstance(value, torch.Tensor)]
            held = {value.untyped_storage().data_ptr() for value in given}
            fresh = [value for value in results if value.untyped_storage().data_ptr() not in held]
            name = str(func).split(".")[1]
            if name == "lift_fresh":  # made of numbers in Python
                self.work.numbers += sum(value.numel() for value in results)
            elif (fresh or not results) and name not in self.GATHERS:  # else a view, or written in place
                self.work.numbers += sum(value.numel() for value in (*given, *fresh))
        return found

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def uncounted(*args: Any, **options: Any) -> Any:
            was, self._is_counting = self._is_counting, False
            sys.setprofile(None)
            try:
                return function(*args, **options)
            finally:
                self._is_counting = was
                sys.setprofile(self._profile if was else None)

        return uncounted

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        self.work.calls += event in ("call", "c_call")

    @contextmanager
    def counting(self) -> Iterator[Work]:
        self.work = Work()
        before = sys.getprofile()
        with self:
            self._is_counting = True
            sys.setprofile(self._profile)
            try:
                yield self.work
            finally:
                sys.setprofile(before)
                self._is_counting = False


@cache
def longest_text() -> list[int]:
    """Tokens in pieces that come again here and there."""
    rng = random.Random(0)
    pieces = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(5, 30))] for _ in range(20)]
    tokens: list[int] = []
    while len(tokens) < LONG:
        tokens += [*rng.choice(pieces), rng.randrange(VOCAB_SIZE)]
    return tokens[:LONG]


def work_per_step(
    drafter: Drafter, length: int, params: Any, monkeypatch: pytest.MonkeyPatch, governor: Governor | None = None
) -> Work:
    """The median over some steps, behind a prompt of this length."""
    counter = Counter()
    engine = Engine(target(), drafter, tokenizer=Words(), governor=governor)
    (row,) = engine.add_request(longest_text()[-length:], replace(params, max_tokens=2000, ignore_eos=True))
    completion = Completion(row, 0)
    while not engine.decoding_rows:
        engine.step()
    monkeypatch.setattr(CausalLM, "forward", counter.paused(CausalLM.forward))
    monkeypatch.setattr(EagleDrafter, "_run", counter.paused(EagleDrafter._run))
    monkeypatch.setattr(MultiHeadDrafter, "_prefixed", counter.paused(MultiHeadDrafter._prefixed))
    row.token_ids = Text(row.token_ids, counter)
    found = []
    try:
        for number in range(3 + 5):
            with counter.counting() as work:
                (output,) = engine.step()
                completion.take(output, [drafter.name] * len(output.token_ids))
            if number >= 3:  # the first ones make what later ones use
                found.append(work)
    finally:
        monkeypatch.undo()
    return Work(*(median(getattr(work, name) for work in found) for name in ("tokens", "calls", "numbers")))


def check_flat(short: Work, long: Work) -> None:
    """What drafts find in a longer text makes a difference, but none of the order of the text."""
    grown = LONG - SHORT
    assert long.tokens - short.tokens < 0.1 * grown, (short, long)
    assert long.calls - short.calls < 0.25 * grown + short.calls, (short, long)
    assert long.numbers - short.numbers < 0.25 * grown + 0.5 * short.numbers, (short, long)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name in FAST else pytest.mark.full) for name in DRAFTERS]
)
def test_a_step_takes_as_much_work_behind_3072_tokens_as_behind_128(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (work_per_step(DRAFTERS[method](), length, GREEDY, monkeypatch) for length in (SHORT, LONG))
    check_flat(short, long)


@pytest.mark.parametrize(
    "method",
    ["ngram", *(pytest.param(name, marks=pytest.mark.full) for name in ("none", "draft_model", "sparse_kv-model"))],
)
def test_nor_do_penalties_stop_strings_and_logprobs_look_at_the_whole_text(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them at once, sampled; penalties look at different tokens, of which there are no more than V."""
    short, long = (work_per_step(DRAFTERS[method](), length, ALL_ON, monkeypatch) for length in (SHORT, LONG))
    check_flat(short, long)


def test_nor_does_the_governor(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {1: 0.02, 5: 0.022, 16: 0.03, 64: 0.08}
    short, long = (
        work_per_step(DRAFTERS["ngram"](), length, GREEDY, monkeypatch, Governor(CostModel(costs)))
        for length in (SHORT, LONG)
    )
    check_flat(short, long)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "waste",
    [
        lambda row: [token for token in row.token_ids],  # noqa: C416
        lambda row: tuple(row.token_ids),
        lambda row: 3 in row.token_ids,
        lambda row: torch.tensor(row.token_ids),
        lambda row: [abs(number) for number in range(len(row.token_ids))],
    ],
    ids=["loop", "copy", "search", "tensor", "calls"],
)
def test_work_that_grows_with_the_text_is_seen(waste: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a drafter that looks at the whole text in every step, in each of several ways."""

    class Wasteful(type(made("none")())):
        def propose(self, rows: Any, budgets: Any) -> Any:
            for row in rows:
                waste(row)
            return super().propose(rows, budgets)

    short, long = (work_per_step(Wasteful(), length, GREEDY, monkeypatch) for length in (SHORT, LONG))
    with pytest.raises(AssertionError):
        check_flat(short, long)
