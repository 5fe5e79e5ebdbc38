"""foredraft report: what it shows of every kind of result, the token view in a browser, and files that are none."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.bench.accepted import wilson
from foredraft.cli import app
from foredraft.report import read, report
from foredraft.report.sections import acceptance

SHOTS = Path(__file__).parents[2] / ".cache" / "report"
ROW = {"method": "ngram", "tokens_per_step": 1.5, "memory_bytes": 2_000_000}
SPEED = {"arm": "ngram", "base": "plain", "ratio": 1.4, "low": 1.2, "high": 1.7, "num_prompts": 4}
PLAIN = {
    "method": "plain",
    "tokens_per_step": 1.0,
    "memory_bytes": 1_000_000,
    "comparison": None,
    "prompt_ratios": [1] * 4,
}
METHODS = {
    "kinds": ["chat", "maths", "chat", "chat"],
    "plain": PLAIN,
    "rows": [{**ROW, "comparison": SPEED, "prompt_ratios": [1.1, 1.7, 1.3, None]}],
    "refused": [{"method": "medusa", "reason": "<no heads>"}],
    "different": [],
}
VERDICT = {
    "status": "lossless",
    "sentence": "it is lossless",
    "findings": [{"feature": "greedy", "check": "tokens", "status": "holds", "found": "4 of 4 texts equal"}],
}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "t.jsonl"
    arguments = ["generate", "A lion and a </script> mouse", "Once", "-m", "zoo:tiny", "--dtype", "float32", "--json"]
    result = CliRunner().invoke(
        app, [*arguments, "-n", "2", "--seed", "1", "--max-new-tokens", "24", "--trace", str(file)]
    )
    assert result.exit_code == 0, result.stderr
    return file


def test_a_trace_holds_every_token_of_every_text(traced: Path) -> None:
    records = [record for _, record in read(traced)]
    assert [(record["prompt_index"], record["sample"]) for record in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for record in records:
        assert "".join(text for step in record["steps"] for text in step["texts"]) == record["text"]
        position = record["num_prompt_tokens"]
        for step in record["steps"]:
            assert step["position"] == position
            assert len(step["sources"]) == len(step["token_ids"]) == len(step["texts"])
            assert step["num_accepted"] == step["accepted"] <= step["drafted"] <= step["num_drafted"]
            position += len(step["token_ids"])


def test_every_kind_of_result_has_its_section() -> None:
    found = report(
        [
            ("methods", METHODS),
            ("verdict", VERDICT),
            ("info", {"model": {"name": "tiny"}, "step_cost": {"1": 1.0, "4": 1.6}, "peak_memory_bytes": 5e8}),
        ],
        "a & b",
    )
    assert "<title>a &amp; b</title>" in found
    assert "Speed by plain decoding&#x27;s, chat: ngram 1.20 (1.10-1.30)" in found
    assert "Speed by plain decoding&#x27;s, maths: ngram 1.70, one prompt" in found
    assert "&lt;no heads&gt;" in found
    assert "500 MB of memory at most" in found
    assert "{{" not in found
    assert re.findall(r"https?://|//cdn|@import|<link|src=", found) == []


def test_acceptance_is_shown_by_length_and_position() -> None:
    lengths, positions = acceptance([[4, 4, 3], [4, 1, 1]])
    assert [bar.said for bar in lengths.found] == ["1 (25%)", "3 (75%)"]
    assert [(bar.label, bar.said) for bar in positions.found] == [
        ("position 1", "4 of 4"), ("position 2", "3 of 4"), ("position 3", "3 of 3"), ("position 4", "3 of 3")
    ]  # fmt: skip


def test_a_choice_of_tune_is_told_from_a_curve_of_info(tmp_path: Path) -> None:
    """Its profile holds the cost of a step as well, by which it was taken for what info measures, and refused."""
    arm = {"name": "suffix, governed", "speedup": 1.25, "low": 1.1, "high": 1.4}
    record = {
        "method": "suffix", "model": "m", "sentence": "it gains 25 %", "compared": [arm], "step_cost": {"1": 1.0},
        "costs": [{"num_rows": 1, "context": 256, "seconds": {"1": 0.01, "4": 0.02}}], "acceptance": [0.8],
        "settings": [{"num_rows": 1, "context": 256, "num_speculative_tokens": 8, **arm}],
    }  # fmt: skip
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps(record))
    assert [kind for kind, _ in read(file)] == ["profile"]
    found = report(read(file), "a")
    assert "it gains 25 %" in found
    assert "suffix, governed 1.25 (1.10-1.40)" in found


def test_a_file_with_a_byte_order_mark_is_read(traced: Path, tmp_path: Path) -> None:
    """As editors and shells of Windows save text; it was "not JSON"."""
    marked = tmp_path / "marked.jsonl"
    marked.write_text(traced.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert read(marked) == read(traced)


@pytest.mark.parametrize(("name", "begins"), [("all.svg", b"<?xml"), ("all.png", b"\x89PNG"), ("all.pdf", b"%PDF")])
def test_charts_are_written_as_a_picture(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "all.jsonl", tmp_path / name
    curve = {"model": {"name": "tiny"}, "step_cost": {"1": 1.0, "4": 1.6}}
    lines = [{"result": "methods", **METHODS}, VERDICT, curve]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(out), "--title", "three"])
    assert result.exit_code == 0, result.stderr
    # speed over all and of two kinds, tokens per step, memory; the curve. The verdict is sentences and a table
    assert f"6 charts written to {out}" in result.stderr
    assert out.read_bytes().startswith(begins)


def test_a_picture_without_charts_or_matplotlib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "verdict.json", tmp_path / "verdict.svg"
    file.write_text(json.dumps(VERDICT))
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(out)])
    assert result.exit_code == 2
    assert "there is no chart in these results" in result.stderr
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(tmp_path / "verdict.xyz")])
    assert "has no known format" in result.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(out)])
    assert result.exit_code == 2
    assert "python -m pip install 'matplotlib" in result.stderr
    assert not out.exists()


def test_an_interval_holds_the_share_and_stays_a_share() -> None:
    assert wilson(0, 5)[0] == 0.0
    assert wilson(5, 5)[1] == 1.0
    low, high = wilson(50, 100)
    assert (low, high) == (pytest.approx(0.404, abs=1e-3), pytest.approx(0.596, abs=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 1100), ("light", 390), ("dark", 390)])
def test_the_page_goes_step_by_step(browser: Any, traced: Path, tmp_path: Path, theme: str, width: int) -> None:
    out = tmp_path / "page.html"
    whole = tmp_path / "all.jsonl"
    whole.write_text(
        traced.read_text() + json.dumps({"result": "methods", **METHODS}) + "\n" + json.dumps(VERDICT) + "\n"
    )
    result = CliRunner().invoke(app, ["report", str(whole), "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": 800})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(out.as_uri())
    record = read(traced)[0][1]
    turn, told = page.locator(".replay").first, page.locator(".replay + .told").first
    tokens = "all => all.map(one => one.firstChild?.nodeValue ?? '').join('')"
    assert turn.locator("> .token").evaluate_all(tokens) == record["text"]
    assert page.locator(".replay > .drafted").count() > 0
    num_steps = len(record["steps"])
    turn.focus()
    page.keyboard.press("Home")
    assert told.inner_text() == f"step 0 of {num_steps}"
    assert turn.locator("> .later").count() == len([t for step in record["steps"] for t in step["texts"]])
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert told.inner_text().startswith(f"step 1 of {num_steps}: ")
    assert turn.locator("> .now").count() == len(record["steps"][0]["texts"])
    page.get_by_text("Forward").first.click()
    assert told.inner_text().startswith(f"step 2 of {num_steps}: ")
    page.keyboard.press("End")
    turn.focus()
    page.keyboard.press("End")
    assert turn.locator("> .later").count() == 0
    refused = page.locator(".refused").first
    refused.focus()
    assert refused.locator(".branches").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{theme}_{width}.png", full_page=True)
    assert faults == []
    page.close()


PROFILE = """{"method": "ngram", "compared": [{"name": %s, "speedup": %s, "low": 1, "high": 1}], "acceptance": [],
"settings": [], "costs": [{"num_rows": 1, "context": 9, "seconds": {"1": %s}}]}"""
TRACE = """{"prompt": %s, "timings": {"tokens_per_second": 1.0}, "metrics": {}, "steps": [{"sources": ["target"],
"texts": %s, "rejected": [], "num_drafted": 0, "num_accepted": 0}]}"""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON or JSONL"),
        ("[]", "holds no result"),
        ('{"a": 1}\n', "holds no result"),
        ('{"result": "conditions", "provenance": {}}\n', "holds no result"),
        ('{"findings": [{}]}', "kind verdict lacks what it should hold (KeyError"),
        ('{"steps": 3}', "kind trace lacks"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"steps":' * 100_000, "is nested too deeply"),
        ('{"result": [1]}', "holds no result"),
        ('{"a": 1}\n{"b": \n{"c": 1}\n', "is not JSON or JSONL: line 2: Expecting value"),
        ('{"findings": [], "status": "", "sentence": 3}', "3 is not a sentence"),
        (PROFILE % ("7", "1", "1"), "7 is not the name of a bar"),
        (PROFILE % ('"a"', "NaN", "1"), "kind profile lacks what it should hold"),
        (PROFILE % ('"a"', "1e999", "1"), "kind profile lacks what it should hold"),
        (PROFILE % ('"a"', "1" + "0" * 400, "1"), "too large"),
        (PROFILE % ('"a"', "1", "1e308"), "inf is not a number that can be drawn"),
        (PROFILE % ('"a"', "1", '"x"'), "kind profile lacks"),
        (TRACE % ('"a"', "[7]"), "7 is not text"),
        (TRACE % ("null", "[]"), "kind trace lacks"),
    ],
)
def test_files_that_are_no_results_are_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    result = CliRunner().invoke(app, ["report", str(file)])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not (tmp_path / "r.html").exists()


def test_a_line_that_was_cut_off_does_not_lose_the_others(traced: Path, tmp_path: Path) -> None:
    """A file that a kill or a full disk left was refused as a whole, by a column of "line 1" whatever the line."""
    first = traced.read_text().splitlines(keepends=True)[0]
    (tmp_path / "cut.jsonl").write_text(first + first[:-20])
    result = CliRunner().invoke(app, ["report", str(tmp_path / "cut.jsonl")])
    assert result.exit_code == 0, result.stderr
    assert "line 2 of" in result.stderr
    assert "is cut off, and left out" in result.stderr
    found = (tmp_path / "cut.html").read_text()
    assert found.count('"prompt":') == 1


def test_what_ends_a_line_elsewhere_may_stand_in_a_text(traced: Path, tmp_path: Path) -> None:
    """U+2028 is no line end of JSONL, and writers other than this library do not escape it."""
    record = json.loads(traced.read_text().splitlines()[0]) | {"prompt": "one\u2028two"}
    (tmp_path / "r.jsonl").write_text(2 * (json.dumps(record, ensure_ascii=False) + "\n"), encoding="utf-8")
    assert [found["prompt"] for _, found in read(tmp_path / "r.jsonl")] == ["one\u2028two"] * 2


def test_text_that_is_none_and_marks_of_the_page_stay_what_they_are(tmp_path: Path) -> None:
    """Half a surrogate pair in a result or a name was a traceback, and ``{{texts}}`` of a result was filled in."""
    finding = {"feature": "\ud800 {{texts}} <script>", "check": "law", "status": "holds", "found": ""}
    file = tmp_path / os.fsdecode(b"\xff.json")
    file.write_text(json.dumps({"findings": [finding], "status": "lossless", "sentence": "a"}))
    result = CliRunner().invoke(app, ["report", str(file)])
    assert result.exit_code == 0, result.output
    found = file.with_suffix(".html").read_text(encoding="utf-8")
    assert "<td>? {{texts}} &lt;script&gt;</td>" in found
    assert "<h1>foredraft: ?.json</h1>" in found


def test_the_results_are_not_written_over(traced: Path, tmp_path: Path) -> None:
    content = traced.read_text()
    for name in ("r.html", "r.htm", "results"):
        (tmp_path / name).write_text(content)
        result = CliRunner().invoke(app, ["report", str(tmp_path / name), "-o", str(tmp_path / name)])
        assert result.exit_code == 2
        assert "holds the results, which the page would replace" in " ".join(result.stderr.split())
        assert (tmp_path / name).read_text() == content


def test_a_folder_is_no_file_of_results() -> None:
    result = CliRunner().invoke(app, ["report", "."])
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


def test_a_place_that_cannot_be_written_is_said(traced: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(traced), "-o", str(tmp_path / "none" / "r.html")])
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
