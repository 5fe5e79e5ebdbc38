"""Every claim of exactness names the tests that hold it, and these run in `make test`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PROOFS = TESTS.parent / "dev" / "proofs.md"
CLAIMS = [line.split("|")[1:-1] for line in PROOFS.read_text(encoding="utf-8").splitlines() if "::" in line]
"""Cells of every claim: what it says, which tests hold it, and which find a fault."""
HOLDING = [re.findall(r"`([\w/]+\.py::[\w:]+)`", cell) for _, cell, _ in CLAIMS]


class Collected:
    """A plugin that keeps the names of what is collected, without parameters."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names |= {item.nodeid.split("[")[0].removeprefix("tests/") for item in session.items}


def test_every_claim_is_held_by_a_test_that_make_test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose test was renamed, deleted or marked full is found."""
    assert len(CLAIMS) > 20
    assert all(HOLDING)
    named = {name for _, *cells in CLAIMS for cell in cells for name in re.findall(r"`([\w/]+\.py::[\w:]+)`", cell)}
    files = {str(TESTS / name.partition("::")[0]) for name in named}
    missing = {file for file in files if not Path(file).is_file()}
    assert not missing
    collected = Collected()
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    options = ["--collect-only", "-q", "-m", "not full", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"]
    assert pytest.main([*options, *sorted(files)], plugins=[collected]) == 0
    assert named - collected.names == set()
