"""Help for people: short, whole with --help-all, in plain text; and a sign of life before torch is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from foredraft.cli import GROUPS, VERBS, app

NAMES = [
    *VERBS,
    *("tune layer-skip", "tune tree", "tune profile"),
    *("datastore build", "datastore append", "datastore info", "datastore query"),
]


def shown(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def command(name: str) -> Any:
    found = typer.main.get_command(app)
    for word in name.split():
        found = found.get_command(None, word)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_help_is_short_and_help_all_is_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate had 177 lines, in which the ten options that most people need could not be found."""
    short, whole = (shown(*name.split(), option, monkeypatch=monkeypatch) for option in ("--help", "--help-all"))
    assert len(short.splitlines()) < 60
    assert max(map(len, short.splitlines())) <= 80
    for parameter in command(name).params:
        assert max(getattr(parameter, "opts", [parameter.name]), key=len) in whole or parameter.metavar in whole
        if parameter.param_type_name == "option":
            assert parameter.help, parameter.name
            is_rare = parameter.hidden
            option = max(parameter.opts, key=len)
            assert bool(re.search(rf"{option}[ ,\n]", short)) != is_rare, option
    assert "<bool>" not in whole
    assert "VALUE" not in whole, "every value has a placeholder"
    assert "--help-all" not in whole


def test_rare_options_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"--help-all lists every option \(\d+ more\)", shown("generate", "-h", monkeypatch=monkeypatch))
    assert "--help-all" not in shown("report", "--help", monkeypatch=monkeypatch)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_examples_that_run_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(name, "--help", monkeypatch=monkeypatch)
    examples = text.partition("Examples:\n")[2]
    assert f"  foredraft {name}" in examples


def test_the_list_of_verbs_has_the_beginnings_of_their_help() -> None:
    for name in VERBS:
        about = command(name).callback.__doc__ if command(name).help is None else command(name).help
        assert " ".join(about.split("\n\n")[0].split()) == VERBS[name]


def test_every_verb_that_loads_a_target_can_be_told_in_what_weights() -> None:
    """`quantize`, which writes them, names its target and its bits otherwise; `datastore` loads tokenizers alone."""
    verbs = {name: {parameter.name for parameter in command(name).params} for name in NAMES}
    loading = {name for name, options in verbs.items() if "dtype" in options} - {"quantize"}
    assert loading == {
        *("generate", "chat", "serve", "demo", "info", "bench", "verify", "train", "trajectory"),
        *("tune", "tune layer-skip", "tune tree", "tune profile"),
    }
    for name in loading:
        assert verbs[name] >= {"dtype", "execution", "quantization", "weights", "kv_cache_dtype"}, name


def test_verbs_are_grouped_by_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown("--help", monkeypatch=monkeypatch)
    places = [text.index(f"{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(VERBS)


def test_help_all_after_a_double_dash_is_a_prompt() -> None:
    result = CliRunner().invoke(app, ["generate", "--model", "zoo:no-such", "--", "--help-all"])
    assert result.exit_code == 2


@pytest.mark.parametrize("arguments", [["methods", "--help-all"], ["--help-all", "methods"]])
def test_help_all_of_a_verb_that_does_not_exist_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code == 2) == (arguments[0] == "methods")


SIGN = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.stderr.write("TORCH")
            raise KeyboardInterrupt
sys.meta_path.insert(0, Watch())
from foredraft.cli import main
sys.argv[1:] = {arguments!r}
main()
"""


@pytest.mark.parametrize(
    "line",
    ["generate hello", "chat", "serve", "demo", "info zoo:tiny", "bench", "trajectory hello",
     "train eagle3 --own-prompts 4 --out OUT", "tune", "tune tree --heads x --out OUT", "tune profile --out OUT",
     "verify", "quantize zoo:tiny OUT"],
)  # fmt: skip
def test_something_is_said_before_torch_is_imported(line: str, tmp_path: Any) -> None:
    """The screen stayed empty for the seconds in which torch is imported and the model is loaded."""
    arguments = [str(tmp_path / "new" / word) if word == "OUT" else word for word in line.split()]
    if line.startswith("tune"):
        arguments = [str(tmp_path / word.rpartition("/")[2]) if "/new/" in word else word for word in arguments]
        arguments += [] if "--out" in line else ["--out", str(tmp_path / "tuned.json")]
    program = SIGN.format(arguments=[*arguments, *([] if "zoo:tiny" in line else ["--model", "zoo:tiny"])])
    if line.startswith(("tune tree", "tune profile")):
        program = SIGN.format(arguments=[*arguments, "zoo:tiny"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    said, torch, _ = done.stderr.partition("TORCH")
    assert torch, done.stderr
    assert said == "foredraft: loading zoo:tiny ...\n"


def test_json_has_no_status() -> None:
    program = SIGN.format(arguments=["generate", "hello", "--model", "zoo:tiny", "--json"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.startswith("TORCH")
