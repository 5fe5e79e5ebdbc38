"""A mutant changes what it names, for everybody who uses it, and nothing is left of it afterwards."""

from __future__ import annotations

import pytest

from foredraft.drafters.lookup import ngram
from foredraft.drafters.lookup.ngram import continuation
from mutants import Apply, only_once, replaced, skipped, together, with_arguments, with_result, wrapped


class Base:
    def inherited(self) -> str:
        return "base"


class Thing(Base):
    def __init__(self, size: int = 1) -> None:
        self.size = size

    def grown(self, by: int, *, times: int = 1) -> int:
        self.size += by * times
        return self.size

    @property
    def double(self) -> int:
        return 2 * self.size

    @classmethod
    def of(cls, size: int) -> Thing:
        return cls(size)

    @staticmethod
    def half(size: int) -> int:
        return size // 2


def outcome() -> list[object]:
    """Everything that a thing and a function can be asked, through an import and through their module."""
    thing = Thing()
    return [
        thing.inherited(),
        Base().inherited(),
        thing.grown(2),
        thing.grown(by=1, times=3),
        thing.double,
        Thing.of(7).size,
        Thing.half(8),
        continuation([1, 2, 3], 1, 3),
        ngram.continuation([1, 2, 3], 1, 3),
    ]


PLAIN = ["base", "base", 3, 6, 12, 7, 4, (2, 3, 2), (2, 3, 2)]
FAULTS: dict[str, tuple[Apply, dict[int, object]]] = {
    "arguments by name, given by position or left out": (
        with_arguments(Thing, "grown", lambda call: {"by": call.by + call.times}),
        {2: 4, 3: 16, 4: 32},
    ),
    "of a constructor": (
        with_arguments(Thing, "__init__", lambda call: {"size": call.size + 1}),
        {2: 4, 3: 7, 4: 14, 5: 8},
    ),
    "result": (with_result(Thing, "grown", lambda size, call: size * call.by), {2: 6}),
    "result of a property": (with_result(Thing, "double", lambda size, call: size + call.self.size), {4: 18}),
    "result of a class method": (with_result(Thing, "of", lambda thing, call: Thing(-call.size)), {5: -7}),
    "arguments of a static method": (with_arguments(Thing, "half", lambda call: {"size": 2}), {6: 1}),
    "skipped": (skipped(Thing, "grown"), {2: None, 3: None, 4: 2}),
    "skipped sometimes": (skipped(Thing, "grown", lambda call: call.times > 1), {3: None, 4: 6}),
    "only once for every object": (only_once(Thing, "grown"), {3: 3, 4: 6}),
    "inherited, of one class": (replaced(Thing, "inherited", lambda thing: "own"), {0: "own"}),
    "wrapped": (wrapped(Thing, "half", lambda half: lambda size: half(half(size))), {6: 2}),
    "function, wherever it was imported": (
        with_arguments(ngram, "continuation", lambda call: {"start": call.start - 1}),
        {7: (1, 2, 3), 8: (1, 2, 3)},
    ),
    "together": (
        together(skipped(Thing, "grown"), replaced(Base, "inherited", lambda thing: "none")),
        {0: "none", 1: "none", 2: None, 3: None, 4: 2},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_made_and_undone(fault: str) -> None:
    apply, changes = FAULTS[fault]
    before = dict(vars(Thing)), dict(vars(Base))
    assert outcome() == PLAIN
    with pytest.MonkeyPatch.context() as patch:
        apply(patch)
        assert outcome() == [changes.get(place, plain) for place, plain in enumerate(PLAIN)]
    assert outcome() == PLAIN
    assert (dict(vars(Thing)), dict(vars(Base))) == before
