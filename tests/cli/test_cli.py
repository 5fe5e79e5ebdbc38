"""The command line as a user meets it: text, JSON lines, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from foredraft import LLM, SamplingParams, SpeculativeConfig, zoo
from foredraft.cli import app
from foredraft.cli.comparison import WARM_UP, Lane
from foredraft.cli.options import DEFAULTS, DraftingOptions
from foredraft.cli.running import choose_model, respell
from foredraft.engine.frontend import Stream
from foredraft.loading.companions import drafters_beside
from foredraft.native.abi import MOST_NODES

STORY = "Once upon a time there was a"
TINY = ["--model", "zoo:tiny"]
SHORT = [*TINY, "--max-new-tokens", "12", "--dtype", "float32"]
DRAFTED = [*SHORT, "--method", "draft_model"]


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, respell(arguments), input=stdin)


def records(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("zoo:tiny", dtype="float32")


# -- generate --------------------------------------------------------------------------------------------------------


def test_keys_and_values_are_rounded_where_that_is_asked_for() -> None:
    result = run("generate", STORY, *SHORT, "--kv-cache-dtype", "int8")
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = LLM("zoo:tiny", dtype="float32", kv_cache_dtype="int8").generate([STORY], params)[0].outputs[0].text
    assert (result.exit_code, result.stdout) == (0, expected + "\n")
    assert "keys and values in int8" in result.stderr


def test_piped_output_is_the_text_and_nothing_else(plain: LLM) -> None:
    result = run("generate", STORY, "A lion", *SHORT)
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [output.outputs[0].text for output in plain.generate([STORY, "A lion"], params)]
    assert result.exit_code == 0
    assert result.stdout == "".join(text + "\n" for text in expected)
    number = r"\d+\.\d+"
    drafts = rf"( · {number}x plain)? \({number} tokens per step, \d+ % of drafts accepted\)"
    assert re.search(rf"^24 tokens · {number} tok/s{drafts}$", result.stderr, re.MULTILINE), result.stderr
    assert "verified draft tokens" not in result.stderr
    assert "verified draft tokens accepted" in run("generate", STORY, *SHORT, "--stats").stderr


def test_json_is_one_object_per_prompt_in_order(plain: LLM) -> None:
    prompts = [STORY, "A lion and a", "Who", "The end of"]
    result = run("generate", *prompts, *DRAFTED, "--temperature", "1", "--seed", "5", "--json")
    lines = records(result)
    outputs = plain.generate(prompts, SamplingParams(temperature=1, seed=5, max_tokens=12))
    assert [line["prompt"] for line in lines] == prompts
    assert [line["token_ids"] for line in lines] == [list(output.outputs[0].token_ids) for output in outputs]
    assert result.stderr.startswith("foredraft: zoo:tiny · float32 · drafting: draft_model · output: ")
    assert result.stderr.count("\n") == 1
    for line, output in zip(lines, outputs, strict=True):
        assert set(line) == {
            "prompt",
            "chat_template",
            "text",
            "token_ids",
            "finish_reason",
            "stop_reason",
            "num_prompt_tokens",
            "num_generated_tokens",
            "seed",
            "lossless",
            "metrics",
            "timings",
        }
        assert line["text"] == output.outputs[0].text
        assert line["num_prompt_tokens"] == len(output.prompt_token_ids)
        assert line["num_generated_tokens"] == len(line["token_ids"])
        assert (line["seed"], line["lossless"], line["chat_template"]) == (5, True, False)
        assert line["metrics"]["speculative_decoding"]["num_spec_tokens"] == 5
        assert set(line["timings"]) == {"prefill_seconds", "decode_seconds", "tokens_per_second"}


def test_several_samples_are_listed() -> None:
    (line,) = records(run("generate", STORY, *SHORT, "-n", "3", "--temperature", "1", "--seed", "1", "--json"))
    assert [sample["index"] for sample in line["samples"]] == [0, 1, 2]
    assert line["token_ids"] == line["samples"][0]["token_ids"]
    assert line["num_generated_tokens"] == sum(len(sample["token_ids"]) for sample in line["samples"])
    text = run("generate", STORY, *SHORT, "-n", "3", "--temperature", "1", "--seed", "1").stdout
    assert text == "".join(sample["text"] + "\n" for sample in line["samples"])


def test_a_drawn_seed_is_reported_and_repeats() -> None:
    (first,) = records(run("generate", STORY, *SHORT, "--temperature", "1", "--json"))
    (again,) = records(
        run("generate", STORY, *SHORT, "--temperature", "1", "--seed", str(first["seed"]), "--json", "--method", "nasd")
    )
    assert again["token_ids"] == first["token_ids"]


def test_stop_may_be_repeated_and_is_cut() -> None:
    full = run("generate", STORY, *SHORT).stdout
    stop = full[5:8]
    (line,) = records(run("generate", STORY, *SHORT, "--stop", "never seen", "--stop", stop, "--json"))
    assert line["text"] == full[: full.index(stop)]
    assert (line["finish_reason"], line["stop_reason"]) == ("stop", stop)


def test_prompts_come_from_files_and_from_standard_input(tmp_path: Path) -> None:
    spec_bench = tmp_path / "question.jsonl"
    entries = [{"question_id": 1, "turns": ["A cat", "And then?"]}, {"prompt": "A dog"}, {"text": "A hen"}, "A cow"]
    spec_bench.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    plain_text = tmp_path / "prompts.txt"
    plain_text.write_text("A pig\n\nA fox\n")
    names = [line["prompt"] for line in records(run("generate", "--prompts-file", str(spec_bench), *SHORT, "--json"))]
    assert names == ["A cat", "A dog", "A hen", "A cow"]
    names = [line["prompt"] for line in records(run("generate", "--prompts-file", str(plain_text), *SHORT, "--json"))]
    assert names == ["A pig", "A fox"]
    assert records(run("generate", "-", *SHORT, "--json", stdin="A goat"))[0]["prompt"] == "A goat"
    ids = json.dumps({"prompt_token_ids": [43, 531]})
    assert records(run("generate", "--prompts-file", "-", *SHORT, "--json", stdin=ids))[0]["num_prompt_tokens"] == 2


def test_chat_uses_the_template(plain: LLM) -> None:
    """JSON keeps what the user gave as the prompt, so that lines can be joined with what was asked."""
    (line,) = records(run("generate", "--chat", "Who are you?", *SHORT, "--json"))
    (output,) = plain.chat([{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0, max_tokens=12))
    assert (line["prompt"], line["chat_template"]) == ("Who are you?", True)
    assert line["num_prompt_tokens"] == len(output.prompt_token_ids)
    assert line["token_ids"] == list(output.outputs[0].token_ids)


def test_a_terminal_shows_who_proposed_what(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run("generate", STORY, *DRAFTED).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = run("generate", STORY, *DRAFTED).stdout
    assert "\x1b[32m" in coloured
    assert coloured.replace("\x1b[32m", "").replace("\x1b[0m", "") == expected


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_keeps_partial_output(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    expected = run("generate", STORY, *SHORT).stdout.rstrip("\n")
    steps = Stream.__next__
    calls = [0]

    def interrupted(self: Stream) -> Any:
        calls[0] += 1
        if calls[0] > 3:
            raise KeyboardInterrupt
        return steps(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    result = run("generate", STORY, *SHORT, *(["--json"] if as_json else []))
    assert result.exit_code == 130
    text = json.loads(result.stdout)["text"] if as_json else result.stdout.rstrip("\n")
    assert text
    assert expected.startswith(text)
    if as_json:
        assert json.loads(result.stdout)["finish_reason"] == "abort"


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        *("--assistant-model X", "--assistant-model=X", "-md X", "--model-draft X", "--speculative-draft-model-path X"),
        *("--spec-draft-model=X", "--num-assistant-tokens 3", "--num-draft-tokens 3", "--draft-max 3"),
        *("--spec-draft-n-max 3", "--speculative-num-steps 3"),
    ],
)
def test_other_tools_names_of_options(spelling: str) -> None:
    meant = "--draft-model X" if spelling.endswith("X") else "--num-speculative-tokens 3"
    assert " ".join(respell(spelling.split())).replace("=", " ") == meant
    assert respell(["--", *spelling.split()]) == ["--", *spelling.split()]


def test_the_default_method_is_auto() -> None:
    def method(**given: Any) -> SpeculativeConfig:
        return DraftingOptions(**given).config()

    assert method().method == "auto"
    assert method(num_speculative_tokens=3).parts[0].num_speculative_tokens == 3
    assert method(draft_model="d").method == "draft_model"
    assert method(method="none").method == "none"
    assert method(speculative_config='{"method": "nasd", "ngram_size": 3}').ngram_size == 3


def test_drafters_that_come_with_a_model_are_found(tmp_path: Path) -> None:
    """As ``foredraft train --out MODEL/eagle3`` leaves them; what else lies there is passed over."""
    assert drafters_beside("zoo:tiny") == [{"method": "draft_model"}, {"method": "eagle3"}]
    assert drafters_beside("zoo:smollm2") == [{"method": "eagle3"}]
    assert drafters_beside("some/model") == []
    for name in ("draft", "notes"):
        (tmp_path / name).mkdir()
    shutil.copytree(zoo.path("tiny", "draft"), tmp_path / "draft", dirs_exist_ok=True)
    assert drafters_beside(tmp_path) == []
    for name in ("medusa", "eagle3"):
        shutil.copytree(zoo.asset("tiny", name), tmp_path / f"my {name}")
    assert drafters_beside(str(tmp_path)) == [{"method": "eagle3", "model": str(tmp_path / "my eagle3")}]


def test_the_default_model_is_a_real_one_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zoo, "why_missing", lambda name: None)
    assert choose_model(None) == "zoo:smollm2"
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(zoo, "why_missing", lambda name: None if name == "tiny" else "install it with: the command")
    assert choose_model("some/model") == "some/model"
    assert choose_model("zoo:tiny") == "zoo:tiny"
    assert capsys.readouterr().err == ""
    assert choose_model(None) == "zoo:tiny"
    said = capsys.readouterr().err
    assert "zoo:tiny is a toy" in said
    assert "install it with: the command" in said


def test_defaults_are_those_of_sampling_params_but_two() -> None:
    ours, theirs = vars(DEFAULTS), vars(SamplingParams())
    assert {key for key in ours if ours[key] != theirs[key]} == {"temperature", "max_tokens"}


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("foredraft 0.")
    text = run("--help").stdout
    for verb in ("generate", "chat", "demo", "info", "bench"):
        assert verb in text
        assert ("By default auto." in " ".join(run(verb, "--help").stdout.split())) == (verb != "bench")


def test_help_flows_at_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of docstrings, which are longer than a terminal, were broken once more after a word or two."""
    monkeypatch.setenv("COLUMNS", "80")
    for verb in ("generate", "verify", "bench", "tune", "tune tree", "datastore build"):
        shown = [line.strip() for line in run(*verb.split(), "--help").stdout.partition(":\n")[0].splitlines()[:-1]]
        short = [line for line, after in pairwise(shown) if line and after and len(line) + len(after.split()[0]) < 70]
        assert short == [], verb


# -- info and demo ---------------------------------------------------------------------------------------------------


def test_info_tells_what_a_model_is_and_costs() -> None:
    (report,) = records(run("info", *TINY, "--repeats", "1", "--context", "16", "--dtype", "float32", "--json"))
    assert report["model"]["architecture"] == "LlamaForCausalLM"
    assert report["probe"] == "trees and chains"
    assert [check["verdict"] for check in report["probe_report"]["checks"]][:3] == ["right"] * 3
    assert (report["guarantee"]["kind"] == "bit-identical") == (report["guarantee"]["reason"] == "")
    assert report["guarantee"]["keeps_bits"] == (report["guarantee"]["kind"] != "up to rounding")
    assert report["step_cost"]["1"] == 1.0
    assert all(cost > 0 for cost in report["step_cost"].values())
    assert report["peak_memory_bytes"] > report["model"]["weight_bytes"]
    assert report["drafter"]["tokenizer"] == "same as the target's"
    assert report["drafter"]["cost"] > 0
    text = run("info", "zoo:tiny", "--repeats", "1", "--context", "16", "--method", "ngram").stdout
    assert "T(k)/T(1)" in text
    assert "test on loading: errors relative to plain forward passes" in text
    assert "zoo:tiny" in text


DEMO = ["demo", *TINY, "--num-prompts", "2", "--max-new-tokens", "8", "--dtype", "float32"]


def test_demo_compares_before_it_speaks_of_speed() -> None:
    (report,) = records(run(*DEMO, "--json"))
    assert (report["num_prompts"], report["num_identical"]) == (2, 2)
    assert report["speedup"]["lowest"] <= report["speedup"]["total"] <= report["speedup"]["highest"]
    seconds = [sum(one[f"{way}_seconds"] for one in report["questions"]) for way in ("plain", "drafting")]
    assert report["speedup"]["total"] == pytest.approx(seconds[0] / seconds[1])
    assert [one["speedup"] is not None for one in report["questions"]] == [True, True]
    text = " ".join(run(*DEMO).stdout.split())
    assert report["questions"][0]["question"] in text
    assert report["questions"][0]["text"].split()[0] in text
    assert "2 of 2 identical" in text
    assert text.index("identical") < text.index("x plain")


@pytest.mark.parametrize("model", ["zoo:tiny", pytest.param("zoo:smollm2", marks=pytest.mark.smollm2)])
def test_the_demo_warms_up_as_its_longest_prompts_run(model: str) -> None:
    """Else the first of them, which plain decoding meets first, would make the layers of long prompts."""
    assert len(AutoTokenizer.from_pretrained(zoo.path(model))(WARM_UP).input_ids) > MOST_NODES


def test_demo_gives_no_speed_when_texts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Lane.advance

    def tampered(self: Lane, stream: Stream) -> None:
        advance(self, stream)
        if self.output is not None and self.title != "plain":
            sample = self.output.outputs[0]
            wrong = replace(sample, token_ids=(*sample.token_ids[:-1], 9))
            self.output = replace(self.output, outputs=(wrong,))

    monkeypatch.setattr(Lane, "advance", tampered)
    result = run(*DEMO)
    assert result.exit_code == 3
    assert "2 of 2 texts differ" in " ".join(result.stdout.split())
    assert "x plain" not in result.stdout
    result = run(*DEMO, "--json")
    assert result.exit_code == 3
    report = json.loads(result.stdout)
    assert report["speedup"] is None
    assert all("speedup" not in one and one["first_difference"] is not None for one in report["questions"])


def test_demo_takes_questions_and_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    assert run(*DEMO, "Who are you?", "--svg", str(picture)).exit_code == 0
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.startswith("<svg")
    shown = drawn.replace("&#160;", " ")
    for text in ("question 1 of 1", "Who are you?", "plain: done in", "per step"):
        assert text in shown


@pytest.mark.parametrize("columns", [50, 80])
def test_demo_in_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end questions, answers and the table stay on the screen, which may be narrow."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(columns)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = run(*DEMO).stdout
    assert text.index("question 1 of 2") < text.index("Same text")
    assert "\x1b[32m" in text  # drafted tokens are coloured
    table = text[text.rindex("speed") :].replace("\r", "")
    assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", table).splitlines())) <= columns
