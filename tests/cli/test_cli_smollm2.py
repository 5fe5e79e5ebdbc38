"""The command line as it comes, without ``--model``, where the real model is installed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foredraft import LLM, SamplingParams
from foredraft.cli import app

pytestmark = [pytest.mark.smollm2, pytest.mark.slow, pytest.mark.usefixtures("_loaded_once")]

QUESTION = "What is the capital of France?"
SHORT = ["--max-new-tokens", "16"]


def run(*arguments: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, arguments, input=stdin)
    assert result.exit_code == 0, result.output
    return result


def record(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def plain() -> LLM:
    return LLM("zoo:smollm2")


def test_a_question_is_answered(plain: LLM) -> None:
    result = run("generate", QUESTION, *SHORT)
    assert "Paris" in result.stdout
    assert result.stderr.startswith(
        "foredraft: loading zoo:smollm2 ...\nforedraft: SmolLM2-135M-Instruct · bfloat16 · "
    )
    assert " · drafting: suffix + eagle3 · output: " in result.stderr
    answer = record("generate", QUESTION, *SHORT)
    params = SamplingParams(temperature=0, max_tokens=16)
    (expected,) = plain.chat([{"role": "user", "content": QUESTION}], params)
    assert answer["token_ids"] == list(expected.outputs[0].token_ids)
    assert (answer["prompt"], answer["chat_template"], answer["finish_reason"]) == (QUESTION, True, "stop")


@pytest.mark.full
def test_a_conversation_remembers() -> None:
    result = run("chat", *SHORT, "--json", stdin=f"{QUESTION}\nAnd of Spain?\n/plain\n")
    first, second, again = [json.loads(line) for line in result.stdout.splitlines()]
    assert "Paris" in first["text"]
    assert "Madrid" in second["text"]
    assert again["identical"]
    assert second["num_cached_tokens"] >= first["num_prompt_tokens"]


@pytest.mark.full
def test_the_demo_ends_where_the_answer_ends() -> None:
    report = record("demo", QUESTION, "Repeat this word for word: The old bakery on Mill Street reopened last week.")
    assert report["model"].startswith("zoo:smollm2")
    assert (report["method"], report["num_identical"], report["num_prompts"]) == ("suffix+eagle3", 2, 2)
    assert [one["finish_reason"] for one in report["questions"]] == ["stop", "stop"]
    assert "Paris" in report["questions"][0]["text"]
    assert report["questions"][1]["tokens_per_step"] > 1.5


@pytest.mark.full
def test_info_says_what_flatters() -> None:
    options = ["--repeats", "1", "--context", "16"]
    report = record("info", *options)
    assert any("quantized_self" in note for note in report["notes"])
    assert "quantized_self" in run("info", *options).stdout
