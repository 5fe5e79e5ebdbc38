"""Slips of the pen in the source of a function: a few characters changed, for the length of a test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from hypothesis import Phase, settings

EXAMPLES = settings(phases=[Phase.generate], database=None, derandomize=True, deadline=None, max_examples=200)
"""For a property test that is meant to fail: no shrinking, and nothing remembered."""


@dataclass(frozen=True)
class Slip:
    """A fault, and the test of the suite that catches it.

    Args:
      function: the function or property whose source is changed.
      old, new: the change; ``old`` occurs once in the source.
      caught_by: the test function, as it stands in its file.
      arguments: of that test; "tmp_path" and "monkeypatch" stand for the fixtures.
      keeps_tokens: a method under which the fault changes no token, since verification protects them; "" where the
        tokens do change, or the fault breaks the run.
      raises: how the test fails.
    """

    function: Any
    old: str
    new: str
    caught_by: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    keeps_tokens: str = field(default="", kw_only=True)
    raises: type[Exception] = field(default=AssertionError, kw_only=True)

    @property
    def name(self) -> str:
        """What is changed where, for the name of a test."""
        code = plain(self.function)
        return f"{code.__qualname__}: {self.old} -> {self.new or 'nothing'}"

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Change the function, wherever it is referred to."""
        function = plain(self.function)
        patch.setattr(function, "__code__", changed(function, self.old, self.new))

    def test(self, patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Run the test."""
        fixtures = {"tmp_path": tmp_path, "monkeypatch": patch}
        if hasattr(self.caught_by, "hypothesis"):
            patch.setattr(self.caught_by, "_hypothesis_internal_use_settings", EXAMPLES)
        self.caught_by(*(fixtures.get(one, one) if isinstance(one, str) else one for one in self.arguments))


def plain(function: Any) -> FunctionType:
    """The function behind a property or a wrapper."""
    function = getattr(function, "fget", None) or getattr(function, "__func__", None) or function
    return inspect.unwrap(function)  # type: ignore[no-any-return]


def changed(function: FunctionType, old: str, new: str) -> CodeType:
    """The code of a function whose source has been changed.

    The whole file is compiled, so that names, closures and line numbers stay what they are.
    """
    path = inspect.getsourcefile(function)
    assert path is not None
    lines, first = inspect.getsourcelines(function)
    source = "".join(lines)
    assert source.count(old) == 1, f"{function.__qualname__} has {old!r} {source.count(old)} times; correct the slip"
    everything = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    assert everything[first - 1 : first - 1 + len(lines)] == lines, f"{path} has changed since it was imported"
    everything[first - 1 : first - 1 + len(lines)] = [source.replace(old, new)]
    module = compile("".join(everything), path, "exec", dont_inherit=True)
    names = [name for name in function.__qualname__.split(".") if name != "<locals>"]
    return reduce(_inner, names, module)


def _inner(code: CodeType, name: str) -> CodeType:
    found: Sequence[CodeType] = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name]
    return found[-1]
