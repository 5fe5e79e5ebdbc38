"""What the command line refuses before it loads a model, and standard streams that are closed or full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import run

import foredraft.llm
from foredraft.folders import check_place
from foredraft.loading import models
from programs import ran

TINY = ["--model", "zoo:tiny"]
SHORT = [*TINY, "--max-new-tokens", "4", "--dtype", "float32", "--method", "none"]
FULL = Path("/dev/full")
METHOD = '{"method": "%s", "%s": "/no/file"}'
IDS = '{"prompt_token_ids": [1, %s]}'


# -- before anything is loaded ---------------------------------------------------------------------------------------


@pytest.fixture
def _nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(foredraft.llm, "load_model", load)
    monkeypatch.setattr(models, "load_model", load)


@pytest.mark.usefixtures("_nothing_loads")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "", *TINY], "prompt 0 is empty: '' says nothing to go on with; give some text"),
        (["generate", "a", " \n", *TINY], r"prompt 1 is empty: ' \n' says nothing"),
        (["generate", "a\udc80", *TINY], "prompt 0 is not valid Unicode"),
        (["generate", "--prompts-file", "FILE", *TINY], "FILE, line 1 holds True; token ids are whole numbers"),
        (["generate", "a", "--prompts-file", "/no/file", *TINY], "'/no/file' cannot be read: No such file"),
        (["generate", "a", "--execution", "fast", *TINY], "execution='fast' is unknown"),
        (["generate", "a", "--exactness", "bits", *TINY], "exactness is 'bits'"),
        (["generate", "a", "--max-kv-bytes", "many", *TINY], "max_kv_bytes is 'many'"),
        (["generate", "a", "--profile-file", "/no/profile", *TINY], "profile /no/profile cannot be read"),
        (["generate", "a", "--draft-model", "/no/model", *TINY], "/no/model does not exist"),
        (["generate", "a", "--method", "telepathy", *TINY], "method 'telepathy' is not known"),
        (["generate", "a", "--speculative-config", METHOD % ("rest", "datastore"), *TINY], "datastore is '/no/file'"),
        (["generate", "a", "--speculative-config", METHOD % ("layer_skip", "layer_set"), *TINY], "layer_set is '/no/"),
        (
            ["generate", "a", "--speculative-config", METHOD % ("token_recycling", "state_file"), *TINY],
            "/no/file cannot",
        ),
        (["generate", "a", "--chat", "--raw", *TINY], "leave one out"),
        (["quantize", "zoo:tiny", "FOLDER"], "FOLDER is there already and holds something; name a new folder"),
        (["quantize", "zoo:tiny", "FILE/new"], "FILE/new cannot be written: FILE is a file; choose another place"),
        (["trajectory", "", *TINY], "prompt 0 is empty"),
        (["trajectory", "a", "--html", "/no/file.html", *TINY], "/no/file.html cannot be written"),
        (["trajectory", "a", "--jsonl", "FOLDER", *TINY], "FOLDER cannot be written"),
        (["generate", "a", "--out", "OUT", "--json", "--trace", "OUT", *TINY], "--json, --trace: not with --out"),
        (["generate", "a", "--out", "OUT", "--replicas", "1", "--ray-address", "ray://head:10001", *TINY], "of Ray's"),
        (["demo", "", *TINY], "prompt 0 is empty"),
        (["demo", "--svg", "/no/file.svg", *TINY], "/no/file.svg cannot be written"),
        (["tune", "layer-skip", "zoo:tiny", "--out", "/no/set.json"], "/no/set.json cannot be written"),
        (["tune", "layer-skip", "zoo:tiny", "-o", "OUT", "--prompts", "/no/file"], "'/no/file' cannot be read"),
        (["tune", "profile", "zoo:tiny", "-o", "OUT", "--prompts", "/no/file"], "'/no/file' cannot be read"),
        (["tune", "tree", "zoo:tiny", "-o", "OUT", "--prompts", "/no/file"], "'/no/file' cannot be read"),
        (["bench", *TINY, "--output", "FILE/in/file"], "FILE/in/file cannot be written: Not a directory"),
        (["bench", *TINY, "--methods", "ngram", "--save-config", "FOLDER"], "FOLDER cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_are_refused_before_a_model_is_loaded(arguments: list[str], message: str, tmp_path: Path) -> None:
    """An empty prompt, a place that cannot be written and others were found after the seconds of loading."""
    (tmp_path / "ids.jsonl").write_text(IDS % "true")
    names = {"FILE": tmp_path / "ids.jsonl", "FOLDER": tmp_path, "OUT": tmp_path / "out.json"}
    for name, path in names.items():
        arguments = [argument.replace(name, str(path)) for argument in arguments]
        message = message.replace(name, str(path))
    result = run(*arguments)
    assert result.exit_code == 2, result.exception
    assert result.stdout == ""
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ids.jsonl"]


def test_prompts_and_options_are_refused_without_torch() -> None:
    """Which takes seconds to import."""
    refused = [["generate"], ["generate", ""], ["generate", "a\udc80"], ["generate", "a", "--prompts-file", "/no/file"],
               ["generate", "a", "--temperature", "-1"], ["generate", "a", "--method", "telepathy"],
               ["trajectory", " "], ["info", "--keys", "--method", "telepathy"]]  # fmt: skip
    code = f"""
import sys
from typer.testing import CliRunner
from foredraft.cli import app
print([CliRunner().invoke(app, one).exit_code for one in {refused!r}], "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[2] * len(refused)} False\n"


@pytest.mark.parametrize("wrong", ["-1", "1.5", '"2"', "null", "[3]"])
def test_a_file_with_anything_but_token_ids_is_refused_by_its_line(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(IDS % "2" + "\n" + IDS % wrong)
    result = run("generate", "--prompts-file", str(file), *TINY)
    assert result.exit_code == 2
    assert f"line 2 holds {json.loads(wrong)!r}; token ids are whole numbers, 0 or more" in result.stderr


def test_an_empty_prompt_may_be_given_as_it_is() -> None:
    """Some tokenizers begin every text with a token of their own; that of zoo:tiny has one for a space."""
    assert run("generate", " ", "--raw", *SHORT).exit_code == 0


def test_a_place_is_written_to_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_place(tmp_path / "new.json") == tmp_path / "new.json"
    assert check_place("/dev/null") == Path("/dev/null")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_place("~/new.json") == tmp_path / "new.json"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(Exception, match=f"new.json cannot be written: {tmp_path} is not yours to write to; choose"):
        check_place(tmp_path / "new.json")


# -- standard streams ------------------------------------------------------------------------------------------------


def shell(line: str, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m foredraft {line}"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        ["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment
    )


needs_full = pytest.mark.skipif(not FULL.is_char_device(), reason="there is no /dev/full")


@needs_full
@pytest.mark.parametrize(
    ("line", "unbuffered"), [("--help", ""), ("--version", "1"), ("info --keys", "1"), ("info --keys --json", "")]
)
def test_a_standard_output_that_is_full_is_a_refusal(line: str, unbuffered: str) -> None:
    """It was a traceback, or one of the interpreter at its very end and the code 120."""
    done = shell(f"{line} > {FULL}", unbuffered)
    assert done.returncode == 2
    assert done.stderr == (
        "foredraft: ConfigError: standard output cannot be written (No space left on device), so what was to follow is "
        "lost; make room, or send it elsewhere\n"
    )


@pytest.mark.parametrize("line", ["--help", "info --keys", "generate hello --model zoo:tiny", "bench --quick"])
def test_a_standard_output_that_is_closed_is_a_refusal_at_once(line: str) -> None:
    """The code was 0, and the text was lost."""
    done = shell(f"{line} >&-") if line == "--help" else ran(line.split(), closed=1)
    assert done.returncode == 2
    assert done.stderr == (
        "foredraft: ConfigError: standard output is closed; give it a place, /dev/null for instance\n"
    )


@needs_full
@pytest.mark.slow
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_generation_whose_text_is_lost_says_so(form: str) -> None:
    with FULL.open("w") as full:
        done = ran(["generate", "Once upon a time", *SHORT, *form.split()], stdout=full)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("foredraft: ConfigError: standard output cannot be written (No space left on device)")


@needs_full
@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [False, True])
def test_messages_may_be_lost(is_closed: bool) -> None:
    with FULL.open("w") as full:
        lost: dict[str, Any] = {"closed": 2} if is_closed else {"stderr": full}
        done = ran(["generate", "Once upon a time", *SHORT], **lost)
        refused = ran(["generate", "a", "--temperature", "-1"], **lost)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_closed_standard_input_has_nothing_in_it() -> None:
    done = ran(["generate", "-"], closed=0)
    assert done.returncode == 2
    assert "prompt 0 is empty" in done.stderr


@pytest.mark.parametrize("line", ["info --keys", "--help"])
def test_a_reader_who_has_seen_enough_is_no_error(line: str) -> None:
    done = shell(f"{line} | head -c 1")
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")


@pytest.mark.parametrize(("line", "unbuffered"), [("--help", ""), ("info --keys", "1"), ("info --keys --json", "")])
def test_a_reader_who_never_began_is_no_error(line: str, unbuffered: str) -> None:
    command = f"({sys.executable} -m foredraft {line}; echo $? >&2) | true"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=environment)
    assert done.stderr == "0\n"
