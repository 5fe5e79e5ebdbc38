"""Traces: in a file on request, and in results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app

pytestmark = pytest.mark.usefixtures("_loaded_once")

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
    assert {step.sample for step in output.metrics.trace} == {0, 1}
    assert len(output.metrics.trace) == output.metrics.speculative_decoding["num_steps"]
