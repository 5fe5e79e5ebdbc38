"""What scripts in `benchmarks/` and `dev/` reckon with: figures of the house, the way of a prompt, speeds by kind."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import house
import pytest
import speed
from test_bench import Fake

from foredraft.bench.trial import Sampling, interleave
from foredraft.bench.workload import BenchPrompt

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_finds_what_it_imports(script: str) -> None:
    """`steps.py` imported a function from where it no longer was."""
    importlib.import_module(script)


def test_the_house_is_counted_by_files_lines_classes_and_words(tmp_path: Path) -> None:
    room = tmp_path / "src" / "foredraft" / "room"
    room.mkdir(parents=True)
    (room / "one.py").write_text("class A:\n    def f(self):\n        return 1\n\n\nclass B: ...\n")
    (room / "two.py").write_text("class A: ...\n\n\ndef g():\n    return 2\n")
    (room / "kernel.cpp").write_text("int main() {}\n")
    for name in ("tests", "benchmarks", "examples", "docs", "dev"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text("two words\n")
    (tmp_path / "docs" / "page.md").write_text("# and three more\n")
    found = house.counted(tmp_path)
    assert found["source"] == {"files": 2, "lines": 11}
    assert found["C++"] == {"files": 1, "lines": 1}
    assert found["rooms"] == {"room": 11}
    assert found["classes"] == {"number": 3, "names that stand twice": 1}
    assert found["functions"] == {"number": 2, "median lines": 2, "of 40 lines and more": 0}
    assert found["docs"] == {"pages": 2, "words": 6}


def test_a_way_is_the_files_whose_functions_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports alone, and bodies of classes, are not on it; files outside of the package neither."""
    package = tmp_path / "walked"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "called.py").write_text("from walked import idle\n\n\ndef go():\n    return [len(x) for x in 'ab']\n")
    (package / "idle.py").write_text("class Idle:\n    size = 1\n\n\ndef rest(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with house.Footprints(package) as found:
        from walked import called

        called.go()
        called.go()
    assert sys.getprofile() is None
    assert set(found.calls) == {str(package / "called.py")}
    assert found.calls.total() >= 2


def test_speeds_are_ratios_of_sums_by_kind_and_their_geometric_mean() -> None:
    prompts = [BenchPrompt("a", "chat", (1,)), BenchPrompt("b", "chat", (3,)), BenchPrompt("c", "qa", (2,))]
    arms = [Fake("plain", 1.0), Fake("ngram", 0.5), Fake("other", 2.0, (1, 2, 4))]
    trial = interleave(arms, prompts, Sampling(), 3)
    twice, half = speed.cells_of(trial, 1)
    assert twice["method"] == "ngram"
    assert twice["kinds"] == {"chat": (2.0, 2.0, 2.0), "qa": (2.0, 2.0, 2.0)}
    assert twice["mean"] == pytest.approx((2.0, 2.0, 2.0))
    assert (twice["same"], half["same"]) == ("3/3", "0/3")
    assert speed.ratio([(1.0, 1.0), (3.0, 1.0)]) == 2.0
    assert speed.mean({"chat": [(4.0, 1.0)], "qa": [(1.0, 1.0)]}) == pytest.approx(2.0)
