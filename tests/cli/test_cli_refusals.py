"""What the command line refuses before it loads a model, and standard streams that are closed or full."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import run

from foredraft.folders import check_place
from programs import called

TINY = ["--model", "zoo:tiny"]
SHORT = [*TINY, "--max-new-tokens", "4", "--dtype", "float32", "--method", "none"]
FULL = Path("/dev/full")
METHOD = '{"method": "%s", "%s": "/no/file"}'
IDS = '{"prompt_token_ids": [1, %s]}'


# -- before anything is loaded ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_nothing_loads")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--regex", "[0-9", *TINY], "regex is refused: .*unclosed character class"),
        (["generate", "a", "--json-schema", '{"type": ', *TINY], "json is refused: it is not JSON"),
        (["generate", "a", "--json-schema", '{"type": "obj"}', *TINY], "json is refused: "),
        (["generate", "a", "--grammar", "start: (", *TINY], "grammar is refused: "),
    ],
)
def test_grammars_that_cannot_be_compiled_are_refused_at_once(arguments: list[str], message: str) -> None:
    pytest.importorskip("llguidance")
    result = run(*arguments)
    assert result.exit_code == 2
    assert re.search(message, result.stderr)


@pytest.mark.usefixtures("_nothing_loads")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "there is no prompt"),
        (["generate", "", *TINY], "prompt 0 is empty: ''; give some text"),
        (["generate", "a", " \n", *TINY], r"prompt 1 is empty: ' \n'; give"),
        (["generate", "a\udc80", *TINY], "prompt 0 is not valid Unicode"),
        (["generate", "--prompts-file", "FILE", *TINY], "FILE, line 1 contains True; token ids are whole numbers"),
        (["generate", "a", "--prompts-file", "/no/file", *TINY], "'/no/file' cannot be read: No such file"),
        (["generate", "a", "--execution", "fast", *TINY], "execution='fast' is unknown"),
        (["generate", "a", "--exactness", "bits", *TINY], "exactness is 'bits'"),
        (["generate", "a", "--max-kv-bytes", "many", *TINY], "max_kv_bytes is 'many'"),
        (["generate", "a", "--profile-file", "/no/profile", *TINY], "profile /no/profile cannot be read"),
        (["generate", "a", "--draft-model", "/no/model", *TINY], "/no/model does not exist"),
        (["generate", "a", "--method", "ngrm"], "did you mean 'ngram'"),
        (["generate", "a", "--method", "ngram", "--speculative-config", "nasd"], "leave out --method"),
        (["generate", "a", "--speculative-config", '{"method": "ngram", "num_speculativ_tokens": 3}'], "num_specul"),
        (["generate", "a", "--speculative-config", "{"], "not valid JSON"),
        (["generate", "a", "--speculative-config", "@/no/file"], "cannot be read"),
        (["generate", "a", "--speculative-config", METHOD % ("rest", "datastore"), *TINY], "datastore is '/no/file'"),
        (["generate", "a", "--speculative-config", METHOD % ("layer_skip", "layer_set"), *TINY], "layer_set is '/no/"),
        (
            ["generate", "a", "--speculative-config", METHOD % ("token_recycling", "state_file"), *TINY],
            "/no/file cannot",
        ),
        (["generate", "a", "--generation-config", "/no/folder", *TINY], "'/no/folder': this folder does not exist"),
        (["generate", "a", "--temperature", "-1"], "temperature"),
        (["generate", "a", "--num-speculative-tokens", "-1"], "-1"),
        (["generate", "a", *TINY, "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
        (["generate", "a", "--no-such-option"], "--no-such-option"),
        (["generate", "a", "--chat", "--raw", *TINY], "leave one out"),
        (
            ["generate", "a", "--out", "OUT", "--json", "--trace", "OUT", *TINY],
            "--json, --trace: cannot be used with --out",
        ),
        (
            ["generate", "a", "--out", "OUT", "--replicas", "1", "--ray-address", "ray://head:10001", *TINY],
            "Ray Client",
        ),
        (["quantize", "zoo:tiny", "FOLDER"], "FOLDER already exists and is not empty; name a new folder"),
        (["quantize", "zoo:tiny", "FILE/new"], "FILE/new cannot be created: FILE is a file; choose another place"),
        (["trajectory", "", *TINY], "prompt 0 is empty"),
        (["trajectory", "a", "--html", "/no/file.html", *TINY], "/no/file.html cannot be written"),
        (["trajectory", "a", "--jsonl", "FOLDER", *TINY], "FOLDER cannot be written"),
        (["info", "zoo:tiny", *TINY], "is given twice"),
        (["info", "--keys", "ngram"], "--keys needs no model"),
        (["demo", "", *TINY], "prompt 0 is empty"),
        (["demo", "--svg", "/no/file.svg", *TINY], "/no/file.svg cannot be written"),
        (["demo", "--svg", "demo.png"], "name it "),
        (["demo", "--max-new-tokens", "1"], "max-new-tokens"),
        (["tune", "tre"], "No such command 'tre'"),
        (["tune", "zoo:tiny", "--model", "zoo:tiny"], "given twice"),
        (["tune", "-m", "zoo:tiny", "zoo:tiny"], "given twice"),
        (["tune", *TINY, "--out", "/no/folder/a.json"], "cannot be written"),
        (["tune", *TINY, "-o", "OUT", "--methods", "nothing"], "not known"),
        (["tune", *TINY, "-o", "OUT", "--methods", "none"], "always part of the comparison"),
        (["tune", *TINY, "-o", "OUT", "--prompts-file", "/no/file.jsonl"], "cannot be read"),
        (["tune", *TINY, "-o", "OUT", "--plot", "a.xyz"], "no known format"),
        (["tune", "layer-skip", "zoo:tiny", "--out", "/no/set.json"], "/no/set.json cannot be written"),
        (["tune", "layer-skip", "zoo:tiny", "-o", "OUT", "--prompts", "/no/file"], "'/no/file' cannot be read"),
        (["tune", "profile", "zoo:tiny", "-o", "OUT", "--prompts", "/no/file"], "'/no/file' cannot be read"),
        (["tune", "tree", "zoo:tiny", "-o", "OUT", "--prompts", "/no/file"], "'/no/file' cannot be read"),
        (["bench", *TINY, "--output", "FILE/in/file"], "FILE/in/file cannot be written: Not a directory"),
        (["bench", *TINY, "--methods", "ngram", "--save-config", "FOLDER"], "FOLDER cannot be written"),
        (["bench", *TINY, "--execution", "fast"], "execution='fast' is unknown"),
        (["bench", *TINY, "--kv-cache-dtype", "fp8"], "kv_cache_dtype is 'fp8'"),
        (["bench", *TINY, "--exactness", "bits"], "exactness is 'bits'"),
        (["bench", *TINY, "--kinds", "poem"], "no prompt is of the kind 'poem'; choose among chat"),
        (["bench", *TINY, "--prompts-file", "/no/file"], "'/no/file' cannot be read"),
        (["bench", *TINY, "--draft-model", "/no/model"], "/no/model does not exist"),
        (["tune", *TINY, "-o", "OUT", "--kinds", "poem"], "no prompt is of the kind 'poem'"),
        (["tune", *TINY, "-o", "OUT", "--kinds", "again"], "--kinds contains 'again', which only bench supports"),
        (["tune", *TINY, "-o", "OUT", "--draft-model", "/no/model"], "/no/model does not exist"),
        (["verify", *TINY, "--false-alarm-rate", "2"], "false_alarm_rate is 2.0"),
        (["verify", *TINY, "--against", "nothing"], "--against 'nothing' is not known"),
        (["verify", *TINY, "--against", "no_module:f"], "cannot be imported: No module named 'no_module'"),
        (["verify", *TINY, "--against", "transformers-assisted"], "give one with --draft-model"),
        (
            ["verify", *TINY, "--against", "transformers-assisted", "--draft-model", "/no/model"],
            "/no/model does not exist",
        ),
        (["verify", *TINY, "--against", "http://127.0.0.1:9"], "does not answer"),
        (
            ["train", "eagle", *TINY, "--out", "FILE", "--own-prompts", "8", "--max-new-tokens", "0"],
            "max_answer_tokens",
        ),
        (["train", "eagle", *TINY, "--out", "FILE", "--own-prompts", "8", "--features", "FILE/x"], "FILE is a file"),
        (
            ["train", "draft_model", *TINY, "--out", "FILE", "--own-prompts", "8", "--start", "/no/folder"],
            "/no/folder is not a folder",
        ),
        (["trajectory", "a", *TINY, "--block", "0"], "Invalid value for '--block'"),
        (["trajectory", "a", *TINY, "--initial-guess", "zero"], "initial_guess is 'zero'"),
        (["datastore", "build", "FILE", "--out", "OUT", "--memory", "nan"], "nan is not a number of gigabytes"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "a", "--model", "/no/such"], "/no/such does not exist"),
        (["generate", "a", "--model", "zoo:tinny"], "tiny"),
        (["generate", "a", *TINY, "--dtype", "int3"], "dtype is 'int3'"),
        (["generate", "a", *TINY, "--kv-cache-dtype", "fp8"], "kv_cache_dtype is 'fp8'"),
        (["generate", "a", *TINY, "--device", "tpu"], "tpu"),
        (["train", "eagle", *TINY, "--out", "OUT", "--own-prompts", "8", "--dtype", "int3"], "dtype is 'int3'"),
        (["train", "eagle", *TINY, "--out", "OUT", "--own-prompts", "8", "--execution", "fast"], "execution='fast'"),
        (["tune", "--num-prompts", "4", "zoo:no-such", "--budget", "5"], "'no-such' is not a model of the zoo"),
        (["tune", "./nowhere"], "nowhere does not exist"),
        (
            ["chat", *TINY, "--max-model-len", "9999"],
            "max_model_len is 9999, but zoo:tiny has a context of 2048; lower",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_models_that_do_not_exist_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not any(tmp_path.iterdir())  # a refusal leaves no folder


def test_neither_help_nor_refusals_nor_configs_wait_for_torch() -> None:
    """It takes seconds to import; the list of verbs needs none of their options either."""
    verbs = ["generate", "chat", "demo", "info", "trajectory", "datastore build", "datastore query", "serve", "verify"]
    verbs += ["bench", "train", "tune", "tune layer-skip", "tune tree", "tune profile"]
    refused = [["generate"], ["generate", ""], ["generate", "a\udc80"], ["generate", "a", "--prompts-file", "/no/file"],
               ["generate", "a", "--temperature", "-1"], ["generate", "a", "--method", "telepathy"],
               ["trajectory", " "], ["info", "--keys", "--method", "telepathy"]]  # fmt: skip
    code = f"""
import sys
from typer.testing import CliRunner
from foredraft.cli import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
assert not {{"torch", "numpy", "foredraft.cli.options", "foredraft.methods"}} & set(sys.modules)
for verb in {verbs!r}:
    assert CliRunner().invoke(app, [*verb.split(), "--help"]).exit_code == 0, verb
from foredraft import SpeculativeConfig
from foredraft.methods import key_entries
assert SpeculativeConfig.parse("suffix+draft_model") and key_entries()
for arguments in {refused!r}:
    assert CliRunner().invoke(app, arguments).exit_code == 2, arguments
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("wrong", ["-1", "1.5", '"2"', "null", "[3]"])
def test_a_file_with_anything_but_token_ids_is_refused_by_its_line(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(IDS % "2" + "\n" + IDS % wrong)
    result = run("generate", "--prompts-file", str(file), *TINY)
    assert result.exit_code == 2
    assert f"line 2 contains {json.loads(wrong)!r}; token ids are whole numbers, 0 or more" in result.stderr


def test_an_empty_prompt_may_be_given_as_it_is() -> None:
    """Some tokenizers begin every text with a token of their own; that of zoo:tiny has one for a space."""
    assert run("generate", " ", "--raw", *SHORT).exit_code == 0


def test_a_place_is_written_to_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_place(tmp_path / "new.json") == tmp_path / "new.json"
    assert check_place("/dev/null") == Path("/dev/null")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_place("~/new.json") == tmp_path / "new.json"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        Exception, match=f"new.json cannot be written: you have no write permission for {tmp_path}; choose"
    ):
        check_place(tmp_path / "new.json")


# -- standard streams ------------------------------------------------------------------------------------------------

LOST = (
    "foredraft: error: standard output cannot be written (No space left on device), so further output is lost; make "
    "room, or redirect it\n"
)
TEXT = ["generate", "Once upon a time", *SHORT]
needs_full = pytest.mark.skipif(not FULL.is_char_device(), reason="there is no /dev/full")


@needs_full
def test_a_full_standard_output_is_a_refusal_at_the_end_of_a_process() -> None:
    """It was a traceback of the interpreter at its very end, and the code 120."""
    with FULL.open("w") as full:
        command = [sys.executable, "-m", "foredraft", "info", "--keys", "--json"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, LOST)


@needs_full
@pytest.mark.parametrize(
    ("arguments", "is_unbuffered"),
    [
        (["--help"], False), (["--version"], True), (["info", "--keys"], True), (["info", "--keys", "--json"], False),
        (TEXT, False), ([*TEXT, "--json"], False),
    ],
)  # fmt: skip
def test_a_full_standard_output_is_a_refusal(arguments: list[str], is_unbuffered: bool) -> None:
    with FULL.open("w") as full:
        done = called(arguments, stdout=full.fileno(), is_unbuffered=is_unbuffered)
    assert done.returncode == 2
    assert done.stderr.endswith(LOST)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["--help", "info --keys", "generate hello --model zoo:tiny", "bench --quick"])
def test_a_closed_standard_output_is_a_refusal_at_once(line: str) -> None:
    """The code was 0, and the text was lost."""
    done = called(line.split(), closed=1)
    assert done.returncode == 2
    assert done.stderr == ("foredraft: error: standard output is closed; redirect it, for example to /dev/null\n")


@needs_full
@pytest.mark.parametrize("is_closed", [False, True])
def test_messages_may_be_lost(is_closed: bool) -> None:
    with FULL.open("w") as full:
        lost: dict[str, Any] = {"closed": 2} if is_closed else {"stderr": full.fileno()}
        done = called(TEXT, **lost)
        refused = called(["generate", "a", "--temperature", "-1"], **lost)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_closed_standard_input_has_nothing_in_it() -> None:
    done = called(["generate", "-"], closed=0)
    assert done.returncode == 2
    assert "prompt 0 is empty" in done.stderr


def test_a_terminal_that_does_not_tell_its_width_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """With COLUMNS=0, as where `tput` has no terminal to ask, every verb and --help wrote nothing, with code 0."""
    monkeypatch.setenv("COLUMNS", "0")
    assert "prompt_lookup_min" in called(["info", "--keys", "--method", "ngram"]).stdout


def test_a_reader_who_leaves_is_no_error_of_a_process() -> None:
    command = f"({sys.executable} -m foredraft --help; echo $? >&2) | true"
    assert subprocess.run(["sh", "-c", command], capture_output=True, text=True).stderr == "0\n"


@pytest.mark.parametrize(
    ("arguments", "is_unbuffered"),
    [
        (["--help"], False), (["info", "--keys"], True), (["info", "--keys", "--json"], False), (TEXT, False),
        ([*TEXT, "--json"], True),
    ],
)  # fmt: skip
def test_a_reader_who_has_left_is_no_error(arguments: list[str], is_unbuffered: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = called(arguments, stdout=writer, is_unbuffered=is_unbuffered)
    os.close(writer)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr
