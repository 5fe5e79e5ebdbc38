"""Traces: in a file on request, as a picture, and refused by name where no picture can be made."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.cli.generate import titled_traces
from foredraft.engine.stats import StepTrace
from foredraft.errors import ConfigError
from foredraft.views.traceplot import check_picture, plot_traces

SHORT = [
    "generate",
    "A lion and a",
    "--model",
    "zoo:tiny",
    "--dtype",
    "float32",
    "--max-new-tokens",
    "12",
    "--seed",
    "1",
]
EGAG = ["--speculative-config", '{"method": "draft_model", "length_policy": "egag"}']
STEPS = [StepTrace(0, 4, 0.1, 5, 5, 2), StepTrace(0, 7, None, None, 0, 0)]


def test_a_file_carries_the_trace_on_request(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    result = CliRunner().invoke(app, [*SHORT, *EGAG, "--json", "--trace", str(file)])
    record, traced = json.loads(result.stdout), json.loads(file.read_text())
    steps = traced["steps"]
    assert len(steps) == record["metrics"]["speculative_decoding"]["num_steps"]
    assert {"sample", "position", "entropy", "gamma", "drafted", "accepted"} < set(steps[0])
    assert steps[0]["position"] == record["num_prompt_tokens"]
    assert sum(step["accepted"] + 1 for step in steps) >= record["num_generated_tokens"]
    assert traced["text"] == record["text"]


def test_results_carry_it_sample_by_sample() -> None:
    llm = LLM("zoo:tiny", {"method": "ngram"}, dtype="float32")
    output = llm.generate("A lion and a", SamplingParams(n=2, max_tokens=6, seed=1), use_tqdm=False)[0]
    titles, traces = zip(*titled_traces([output]), strict=True)
    assert titles == ("prompt 0, sample 0", "prompt 0, sample 1")
    assert sum(map(len, traces)) == len(output.metrics.trace) == output.metrics.speculative_decoding["num_steps"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_written(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"out.{ending}"
    result = CliRunner().invoke(app, [*SHORT, *EGAG, "--trace-plot", str(picture)])
    assert result.exit_code == 0, result.stderr
    assert picture.stat().st_size > 5000


def test_pictures_that_cannot_be_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"no known format; name it .png"):
        check_picture(tmp_path / "out.txt")
    with pytest.raises(ConfigError, match="it needs to be a file in a folder that exists"):
        check_picture(tmp_path / "none" / "out.png")
    with pytest.raises(ConfigError, match="no step to draw"):
        plot_traces([("empty", [])], tmp_path / "out.png")
    assert plot_traces([("one", STEPS)] * 9 + [("empty", [])], tmp_path / "out.png").exists()


def test_without_matplotlib_nothing_is_generated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    importing = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return importing(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    result = CliRunner().invoke(app, [*SHORT, "--trace-plot", str(tmp_path / "out.png")])
    assert result.exit_code == 2
    assert "python -m pip install 'matplotlib" in result.stderr
    assert result.stdout == ""
