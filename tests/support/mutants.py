"""Mutants: faults in what a program does, made at its interfaces for the length of a test.

A mutant wraps a method or a function, or puts a subclass into the place of a class. It never looks at source text, so
code may be rewritten, renamed inside and moved without any of them noticing, as long as it keeps its interfaces.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from hypothesis import Phase, settings

EXAMPLES = settings(phases=[Phase.generate], database=None, derandomize=True, deadline=None, max_examples=200)
"""For a property test that is meant to fail: no shrinking, and nothing remembered."""

Apply = Callable[[pytest.MonkeyPatch], None]
Call = SimpleNamespace
"""The arguments of one call by the names of the parameters, ``self`` and defaults included."""


@dataclass(frozen=True)
class Mutant:
    """A fault, and the test of the suite that catches it.

    Args:
      name: what is wrong, in words.
      apply: makes the fault; whoever hands out the `pytest.MonkeyPatch` undoes it.
      caught_by: the test function, as it stands in its file.
      arguments: of that test; "tmp_path" and "monkeypatch" stand for the fixtures.
    """

    name: str
    apply: Apply
    caught_by: Callable[..., None]
    arguments: tuple[Any, ...] = ()

    def test(self, patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Run the test."""
        fixtures = {"tmp_path": tmp_path, "monkeypatch": patch}
        if hasattr(self.caught_by, "hypothesis"):
            patch.setattr(self.caught_by, "_hypothesis_internal_use_settings", EXAMPLES)
        self.caught_by(*(fixtures.get(one, one) if isinstance(one, str) else one for one in self.arguments))


# -- ways to make a fault ------------------------------------------------------------------------------------------


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Apply:
    """``make`` turns the original into what stands in its place.

    Args:
      owner: a class, whose method, class method, static method or property is meant; it may be an inherited one. Or a
        module: its function or class is replaced wherever it has been imported under its name.
    """

    def apply(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)
        if isinstance(owner, ModuleType):
            changed = make(original)
            for module in list(sys.modules.values()):
                if getattr(module, "__dict__", {}).get(name) is original:
                    patch.setattr(module, name, changed)
        elif isinstance(original, property):
            patch.setattr(owner, name, property(make(original.fget)))
        elif isinstance(inspect.getattr_static(owner, name), FunctionType):
            patch.setattr(owner, name, make(original))
        else:  # of a class or static method, the original is what a caller gets
            patch.setattr(owner, name, staticmethod(make(original)))

    return apply


def arguments_changed(change: Callable[[Call], dict[str, Any]]) -> Callable[[Any], Any]:
    """Turns a function into one that runs with other arguments: ``change`` returns those that differ, by name."""

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            bound = _bound(signature, args, kwargs)
            bound.arguments.update(change(Call(**bound.arguments)))
            return original(*bound.args, **bound.kwargs)

        return wrong

    return make


def with_arguments(owner: Any, name: str, change: Callable[[Call], dict[str, Any]]) -> Apply:
    """Every call is made with other arguments: ``change`` returns those that differ, by name."""
    return wrapped(owner, name, arguments_changed(change))


def with_result(owner: Any, name: str, change: Callable[[Any, Call], Any]) -> Apply:
    """Every call returns what ``change`` makes of its result."""

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            call = Call(**_bound(signature, args, kwargs).arguments)
            return change(original(*args, **kwargs), call)

        return wrong

    return wrapped(owner, name, make)


def replaced(owner: Any, name: str, new: Any) -> Apply:
    """Something else stands in its place."""
    return wrapped(owner, name, lambda _: new)


def skipped(owner: Any, name: str, when: Callable[[Call], bool] = lambda _: True) -> Apply:
    """Calls do nothing and return None, all of them or some."""

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            if not when(Call(**_bound(signature, args, kwargs).arguments)):
                return original(*args, **kwargs)

        return wrong

    return wrapped(owner, name, make)


def only_once(owner: Any, name: str) -> Apply:
    """Of every object, only the first call is made; later ones get its result."""

    def make(original: Any) -> Any:
        results: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

        def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self not in results:
                results[self] = original(self, *args, **kwargs)
            return results[self]

        return wrong

    return wrapped(owner, name, make)


def together(*faults: Apply) -> Apply:
    """Several changes that make one fault."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        for fault in faults:
            fault(patch)

    return apply


def _bound(signature: inspect.Signature, args: Any, kwargs: Any) -> inspect.BoundArguments:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


# -- faults of anything that keeps the contract of a drafter -------------------------------------------------------


class Altered:
    """An object that others take for a row: the row itself, but for some attributes."""

    def __init__(self, row: Any, **changes: Any) -> None:
        vars(self).update(changes, _altered=row)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._altered, name)


def told(drafter: type, change: Callable[[Any], Any]) -> Apply:
    """The drafter learns something else of every step than what happened: ``change`` is made to each result."""
    return with_arguments(drafter, "observe", lambda call: {"results": [change(result) for result in call.results]})


def keeps_rows(drafter: type) -> Apply:
    """What is known of rows is noted in the drafter, too, where it outlives them."""

    def make(start: Any) -> Any:
        def wrong(self: Any, rows: Any, chunks: Any) -> None:
            start(self, rows, chunks)
            vars(self).setdefault("noted", {}).update((row.id, row.state.get(self)) for row in rows)

        return wrong

    return wrapped(drafter, "start", make)


def one_state_for_all(drafter: type) -> Apply:
    """All rows have one state, so each finds what was noted of another."""

    def as_one(call: Call) -> dict[str, Any]:
        shared = vars(call.self).setdefault("shared", {})
        return {"rows": [Altered(row, state=shared) for row in call.rows]}

    return together(*(with_arguments(drafter, verb, as_one) for verb in ("start", "propose", "observe")))
