"""foredraft report: the headline of every kind of result, the token view in a browser, and files that are none."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.views.report import read, report

SHOTS = Path(__file__).parents[2] / ".cache" / "report"
SPEED = {"arm": "ngram", "base": "plain", "ratio": 1.4, "low": 1.2, "high": 1.7, "num_prompts": 4}
METHODS = {
    "rows": [
        {"method": "<suffix>", "comparison": {**SPEED, "ratio": 1.5, "num_prompts": 1}},
        {"method": "ngram", "comparison": SPEED},
        {"method": "untimed", "comparison": None},
    ],
    "different": [{"arm": "medusa"}],
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
    arguments += ["--method", "draft_model"]  # the governor of the default may not draft on a busy machine
    result = CliRunner().invoke(
        app, [*arguments, "-n", "2", "--seed", "1", "--max-new-tokens", "24", "--trace", str(file)]
    )
    assert result.exit_code == 0, result.stderr
    return file


def test_a_trace_holds_every_token_of_every_text(traced: Path) -> None:
    records = read(traced)
    assert [(record["prompt_index"], record["sample"]) for record in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for record in records:
        assert "".join(text for step in record["steps"] for text in step["texts"]) == record["text"]
        position = record["num_prompt_tokens"]
        for step in record["steps"]:
            assert step["position"] == position
            assert len(step["sources"]) == len(step["token_ids"]) == len(step["texts"])
            assert step["num_accepted"] == step["accepted"] <= step["drafted"] <= step["num_drafted"]
            position += len(step["token_ids"])


def test_a_trace_has_what_the_policy_of_lengths_has_seen(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    egag = '{"method": "draft_model", "length_policy": "egag"}'
    arguments = ["generate", "A lion and a", "--model", "zoo:tiny", "--speculative-config", egag, "--seed", "1"]
    result = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "12", "--json", "--trace", str(file)])
    record, traced = json.loads(result.stdout), json.loads(file.read_text())
    assert len(traced["steps"]) == record["metrics"]["speculative_decoding"]["num_steps"]
    assert {"sample", "position", "entropy", "gamma", "drafted", "accepted"} < set(traced["steps"][0])
    assert traced["text"] == record["text"]


def test_results_carry_traces_sample_by_sample() -> None:
    llm = LLM("zoo:tiny", {"method": "ngram"}, dtype="float32")
    output = llm.generate("A lion and a", SamplingParams(n=2, max_tokens=6, seed=1), use_tqdm=False)[0]
    assert {step.sample for step in output.metrics.trace} == {0, 1}
    assert len(output.metrics.trace) == output.metrics.speculative_decoding["num_steps"]


def test_every_kind_of_result_has_its_headline(traced: Path) -> None:
    conditions = {"models": "tiny", "dtype": "float32", "provenance": {"cpu": "a CPU", "num_threads": 2}}
    reason = {"result": "reason", "reason": "ngram runs at 1.40 of plain decoding's speed"}
    notes = {"result": "notes", "notes": "2 prompts are <too few>"}
    lines: list[Any] = [{"result": "conditions", **conditions}, {"result": "methods", **METHODS}, reason, VERDICT]
    found = report([*lines, notes, *read(traced)], "a & b")
    assert "<title>a &amp; b</title>" in found
    assert "tiny, float32, on a CPU, 2 threads" in found
    headline = "&lt;suffix&gt; is 1.50x as fast as plain decoding on one prompt"
    assert f'<p class="headline">{headline}</p>' in found
    assert "of plain decoding&#x27;s speed" not in found, "the speeds themselves are there"
    assert found.index(headline) < found.index('id="view"') < found.index("<table>")
    assert re.search(r"&lt;suffix&gt;</th>.*<td>1.50, one prompt</td>.*ngram</th>.*<td>1.40 \(1.20-1.70\)</td>", found)
    assert "2 prompts are &lt;too few&gt;" in found
    assert '<p class="headline">ngram runs at 1.40' in report([reason], "a")
    assert "medusa differs from plain decoding, although identical output is guaranteed" in found
    assert '<p class="headline">it is lossless</p>' in found
    num_steps = sum(len(record["steps"]) for record in read(traced))
    assert re.search(rf"\d+ tokens in {num_steps} steps, \d+ of \d+ drafted tokens accepted; proposed by: ", found)
    assert "{{" not in found
    assert re.findall(r"https?://|//cdn|@import|<link|src=", found) == []
    whole = {**conditions, "methods": METHODS, "by_kind": [], "reason": reason["reason"], "notes": []}
    assert report([whole], "a & b").replace(" hidden", "").count("<svg") == 2


@pytest.mark.parametrize(
    ("figures", "same", "said"),
    [
        ({"ratio": 1.374, "low": 1.2, "high": 1.5}, 4, "suffix + eagle3 is 1.37x as fast as plain decoding on these"
         " prompts (1.20-1.50); all texts equal"),
        ({"ratio": 1.1, "low": 0.9}, 3, "no method is clearly faster than plain decoding on these prompts: the best, "
         "suffix + eagle3, is 1.10x as fast (0.90-1.70); 3 of 4 texts equal"),
        ({"ratio": 0.8, "low": 0.7, "high": 0.9}, 4, "no method is faster than plain decoding on these prompts: the "
         "best, suffix + eagle3, is 0.80x as fast (0.70-0.90); all texts equal"),
    ],
)  # fmt: skip
def test_the_finding_is_the_headline_and_one_method_has_no_bars(
    figures: dict[str, float], same: int, said: str
) -> None:
    row = {"method": "suffix+eagle3", "comparison": SPEED | figures, "tokens_per_second": 19.04}
    row["equality"] = {"num_prompts": 4, "num_identical": same}
    found = report([{"rows": [row]}], "a")
    assert f'<p class="headline">{said}</p>' in found
    assert "<svg" not in found
    assert f"<td>19.0</td><td>\u2013</td><td>\u2013</td><td>{same} of 4</td>" in found


def test_a_trace_says_how_fast_it_was(traced: Path) -> None:
    first = read(traced)[0]
    fast = {**first, "method": "a+b", "metrics": {"governor": {"estimated_speedup": 1.26}}}
    assert "a + b is 1.26x as fast as plain decoding on this output (estimated); lossless" in report([fast], "a")
    slow = {**fast, "metrics": {"governor": {"estimated_speedup": 0.9}}}
    assert "is 0.90x to 1.26x as fast as plain decoding on these outputs" in report([fast, slow], "a")
    for unknown in ({"governor": None}, {"governor": {"estimated_speedup": None}}):
        assert "as fast as" not in report([fast, {**slow, "metrics": unknown}], "a")


def test_a_file_with_a_byte_order_mark_is_read(traced: Path, tmp_path: Path) -> None:
    """As editors and shells of Windows save text; it was "not JSON"."""
    marked = tmp_path / "marked.jsonl"
    marked.write_text(traced.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert read(marked) == read(traced)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 390)])
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
    record = read(traced)[0]
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


SPEEDS = """{"rows": [{"method": %s, "comparison": {"ratio": %s, "low": 1, "high": 1, "num_prompts": 2}}]}"""
TRACE = """{"prompt": %s, "steps": [{"sources": ["target"], "texts": %s, "rejected": [], "num_drafted": 0,
"num_accepted": 0}]}"""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON or JSONL"),
        ("[]", "contains no result"),
        ('{"a": 1}\n', "contains no result"),
        ('{"result": "conditions", "provenance": {}}\n', "contains no result"),
        ('{"steps": 3}', "a result is missing a key or has an invalid value (KeyError"),
        ('{"rows": [{}]}', "a result is missing a key or has an invalid value"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"steps":' * 100_000, "is nested too deeply"),
        ('{"result": [1]}', "contains no result"),
        ('{"a": 1}\n{"b": \n{"c": 1}\n', "is not JSON or JSONL: line 2: Expecting value"),
        ('{"sentence": 3}', "3 is not text"),
        (SPEEDS % ("7", "1"), "7 is not text"),
        (SPEEDS % ('"a"', "NaN"), "a result is missing a key or has an invalid value"),
        (SPEEDS % ('"a"', "1e999"), "a result is missing a key or has an invalid value"),
        (SPEEDS % ('"a"', "1" + "0" * 400), "too large"),
        (SPEEDS % ('"a"', '"x"'), "a result is missing a key or has an invalid value"),
        (TRACE % ('"a"', "[7]"), "7 is not text"),
        (TRACE % ("null", "[]"), "a result is missing a key or has an invalid value"),
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
    assert "is incomplete and is left out" in result.stderr
    found = (tmp_path / "cut.html").read_text()
    assert found.count('"prompt":') == 1


def test_what_ends_a_line_elsewhere_may_stand_in_a_text(traced: Path, tmp_path: Path) -> None:
    """U+2028 is no line end of JSONL, and writers other than this library do not escape it."""
    record = json.loads(traced.read_text().splitlines()[0]) | {"prompt": "one\u2028two"}
    (tmp_path / "r.jsonl").write_text(2 * (json.dumps(record, ensure_ascii=False) + "\n"), encoding="utf-8")
    assert [found["prompt"] for found in read(tmp_path / "r.jsonl")] == ["one\u2028two"] * 2


def test_text_that_is_none_and_marks_of_the_page_stay_what_they_are(tmp_path: Path) -> None:
    """Half a surrogate pair in a result or a name was a traceback, and ``{{texts}}`` of a result was filled in."""
    file = tmp_path / os.fsdecode(b"\xff.json")
    file.write_text(json.dumps({"status": "lossless", "sentence": "\ud800 {{texts}} <script>"}))
    result = CliRunner().invoke(app, ["report", str(file)])
    assert result.exit_code == 0, result.output
    found = file.with_suffix(".html").read_text(encoding="utf-8")
    assert ">? {{texts}} &lt;script&gt;</p>" in found
    assert "<h1>foredraft: ?.json</h1>" in found


def test_the_results_are_not_written_over(traced: Path, tmp_path: Path) -> None:
    content = traced.read_text()
    for name in ("r.html", "r.htm", "results"):
        (tmp_path / name).write_text(content)
        result = CliRunner().invoke(app, ["report", str(tmp_path / name), "-o", str(tmp_path / name)])
        assert result.exit_code == 2
        assert "is the file of the results, which the page would replace" in " ".join(result.stderr.split())
        assert (tmp_path / name).read_text() == content


@pytest.mark.parametrize(
    ("results", "out", "said"),
    [
        (None, "r.svg", "a report is an HTML page; use the suffix .html"),
        (None, "none/r.html", "cannot be written"),
        (".", "r.html", "cannot be read"),
    ],
)
def test_places_that_hold_no_page_or_no_results(
    results: str | None, out: str, said: str, traced: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["report", results or str(traced), "-o", str(tmp_path / out)])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []
