"""Prompts of the command line: every encoding and line end, and who gets the chat template."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

from foredraft import zoo
from foredraft.cli import app
from foredraft.cli.prompts import ask, looks_like_instruct, read_prompts
from foredraft.cli.running import put_json, tolerate_encodings
from foredraft.cli.writers import ending
from foredraft.engine.frontend import CompletionOutput, RequestMetrics, RequestOutput
from foredraft.errors import ConfigError, PromptError
from foredraft.loading.models import load_tokenizer
from foredraft.zoo.manifest import Manifest
from programs import called

TINY = ["--model", "zoo:tiny", "--dtype", "float32", "--max-new-tokens", "4"]
ODD = "one\u2028two\u0085three\u2029four\x0cfive\x1csix"
"""What str.splitlines takes for line ends, and a text file does not."""


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments], input=stdin)


# -- reading ---------------------------------------------------------------------------------------------------------


def test_a_file_in_another_encoding_is_refused_by_its_byte(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("Grüße".encode("cp1252"))
    with pytest.raises(PromptError, match=r"is not UTF-8: byte 2 is 0xfc .*; convert it"):
        read_prompts([], str(file))


@pytest.mark.parametrize(
    ("given", "prompt"),
    [("x\n", "x"), ("x\r\n", "x"), ("x\n\n", "x\n"), ("x", "x"), ("\ufeffx\n", "x"), (" x ", " x ")],
)
def test_the_line_end_of_echo_is_not_part_of_a_prompt(given: str, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    assert read_prompts(["-"], None) == [prompt]


def test_jsonl_on_standard_input_is_utf_8_whatever_the_terminal_is() -> None:
    result = run("generate", *TINY, "--prompts-file", "-", "--json", stdin='\ufeff{"prompt": "Grüße"}\n'.encode())
    assert json.loads(result.stdout)["prompt"] == "Grüße"
    result = run("generate", *TINY, "--prompts-file", "-", "--json", stdin=b'{"prompt": "Gr\xfc"}\n')
    assert result.exit_code == 2
    assert "standard input is not UTF-8: byte 14 is 0xfc" in result.stderr


# -- streams ---------------------------------------------------------------------------------------------------------


def test_an_encoding_that_cannot_hold_the_text_escapes_it() -> None:
    prompt = "Ŝi diris: “saluton” 🦊"
    done = called(["generate", *TINY, prompt, "--json", "--stop", "🦊", "--chat"], encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert prompt in json.loads(done.stdout)["prompt"]


@pytest.mark.parametrize("verb", [["generate", "-"], ["chat"]])
def test_bytes_that_are_not_utf_8_are_refused_by_name(verb: list[str]) -> None:
    done = called([*verb, *TINY], encoding="utf-8:strict", stdin=b"a \xff\n")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "is not valid Unicode: character 2" in done.stderr


def test_json_lines_are_one_line_for_every_reader(capsys: pytest.CaptureFixture[str]) -> None:
    put_json({"text": ODD + " Ŝ"})
    written = capsys.readouterr().out
    assert len(written.splitlines()) == 1
    assert "Ŝ" in written
    assert json.loads(written) == {"text": ODD + " Ŝ"}


def test_json_goes_to_standard_output_while_a_bar_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The bar took standard output over, so that `train --json > FILE` wrote its results to the terminal."""
    with Progress(console=Console(stderr=True, force_terminal=True)):
        put_json({"tau": 1.5})
    assert capsys.readouterr().out == '{"tau": 1.5}\n'


# -- the chat template -----------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("zoo:tiny")  # which has a template


@pytest.fixture
def bare(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.chat_template = None
    return tokenizer


def templated(tokenizer: Any, model: str, **options: bool) -> list[bool]:
    """Of a text and of token ids, in one list."""
    return [one.is_templated for one in ask(tokenizer, model, ["Hi", {"prompt_token_ids": [5]}], **options)]


def test_a_template_means_instruct_unless_the_manifest_knows_better(tokenizer: PreTrainedTokenizerBase) -> None:
    assert templated(tokenizer, "owner/model") == [True, False]
    assert templated(tokenizer, "zoo:tiny") == [False, False]
    assert zoo.manifest("smollm2").is_instruct
    assert templated(tokenizer, "zoo:smollm2") == [True, False]


def test_chat_and_raw_overrule(tokenizer: PreTrainedTokenizerBase) -> None:
    assert templated(tokenizer, "zoo:tiny", chat=True) == [True, False]
    assert templated(tokenizer, "owner/model", raw=True) == [False, False]


def test_what_is_given_and_what_the_model_gets(tokenizer: PreTrainedTokenizerBase) -> None:
    (one,) = ask(tokenizer, "owner/model", ["Who are you?"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], tokenize=False, add_generation_prompt=True
    )
    assert one.given == "Who are you?"
    assert one.prompt["prompt"] == text
    assert one.prompt["prompt_token_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_without_a_template(bare: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]) -> None:
    assert templated(bare, "gpt2") == [False, False]
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="no chat template"):
        templated(bare, "gpt2", chat=True)
    assert templated(bare, "owner/Model-1B-Instruct", raw=True) == [False, False]
    assert capsys.readouterr().err == ""
    assert templated(bare, "owner/Model-1B-Instruct") == [False, False]
    assert "has no chat template" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="give --raw"):
        templated(bare, "zoo:smollm2")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("google/gemma-2-2b-it", True),
        ("./Llama-2-7b-chat-hf", True),
        ("model.Q4_1-instruct.gguf", True),
        ("/home/chat/gpt2", False),
        ("italian-gpt", False),
        ("chatty", False),
    ],
)
def test_names_of_instruct_models(name: str, is_one: bool) -> None:
    assert looks_like_instruct(name) is is_one


def test_a_message_that_says_nothing_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        ask(tokenizer, "owner/model", ["Hi", " "])
    with pytest.raises(PromptError, match="prompt 0 is not valid Unicode"):
        ask(tokenizer, "owner/model", ["\udcff"])


def test_the_trajectory_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruct model answers there, too; zoo:tiny stands in for one."""
    lengths = {}
    for option in ("--raw", "--chat"):
        result = run("trajectory", "Hi", *TINY, option, "--json")
        assert result.exit_code == 0, result.stderr
        lengths[option] = json.loads(result.stdout.splitlines()[0])["start"]
    described = zoo.manifest("tiny")
    monkeypatch.setattr(zoo, "manifest", lambda name: Manifest(**{**vars(described), "is_instruct": True}))
    result = run("trajectory", "Hi", *TINY, "--json")
    assert json.loads(result.stdout.splitlines()[0])["start"] == lengths["--chat"] > lengths["--raw"]


@pytest.mark.parametrize(
    ("text", "reason", "num_tokens", "said"),
    [
        ("Fine.", "stop", 2, ""),
        ("", "stop", 1, "ended the text before its first word"),
        ("\n", "stop", 2, "ended the text before its first word"),
        ("Once", "length", 4, "stopped at the limit of 4 tokens; raise it with --max-new-tokens"),
        ("Once", "length", 3, "stopped after 3 tokens: the context of the model is full"),
    ],
)
def test_how_a_text_ended_is_said(text: str, reason: str, num_tokens: int, said: str) -> None:
    sample = CompletionOutput(0, text, (5,) * num_tokens, None, None, reason, None, 0)
    output = RequestOutput("0", "Hi", (5,), (sample,), True, RequestMetrics())
    assert said in ending(output, 4)
    assert bool(said) == bool(ending(output, 4))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_stream_of_the_c_locale_escapes_what_it_cannot_hold(errors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under LANG=C without UTF-8 mode Python itself sets surrogateescape, and `demo` ended in a UnicodeEncodeError."""
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="ascii", errors=errors))
    tolerate_encodings()
    print("\u2026", flush=True)
    assert held.getvalue() == b"\\u2026\n"
