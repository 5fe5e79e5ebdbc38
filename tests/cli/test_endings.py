"""Verbs that are ended early: what they have found by then is kept, whatever is pressed, and no traceback shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft import LLM, zoo
from foredraft.cli import app, comparison
from foredraft.ending import ENDING, end_as_by_ctrl_c, finishing
from foredraft.engine.engine import Engine
from foredraft.folders import only_writer
from foredraft.heads.checkpoint import write_checkpoint
from foredraft.heads.medusa_hydra import HeadsShape, MedusaHeads
from foredraft.heads.medusa_hydra_layouts import write_medusa
from programs import started
from small_disk import room_for

HIDDEN_SIZE = int(json.loads((zoo.path("tiny") / "config.json").read_text())["hidden_size"])
TINY = ["--model", "zoo:tiny"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def end_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with Ctrl-C in its nth call."""
    num_calls = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    return called


# -- signals ---------------------------------------------------------------------------------------------------------


def ended(arguments: list[str], is_time: Callable[[], bool], *numbers: signal.Signals) -> subprocess.Popen[str]:
    """The command, to which signals are sent one after the other once it is time."""
    process = started(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not is_time() and process.poll() is None:
        time.sleep(0.01)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_a_comparison_that_is_ended_keeps_its_rows(tmp_path: Path) -> None:
    """A second Ctrl-C ended the process by the signal, while it wrote; SIGTERM lost what --json was to print."""
    file = tmp_path / "kept.json"
    options = ["--methods", "ngram", *TINY, "--quick", "--num-prompts", "400", "--output", str(file), "--json"]
    process = ended(["bench", *options], file.exists, signal.SIGHUP, *[signal.SIGINT] * 3, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "ignored" not in err
    assert json.loads(out)["methods"]["rows"] == json.loads(file.read_text())["methods"]["rows"] != []


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Signals as at the beginning of a process, and what was told that could not be raised."""
    told: list[Any] = []
    before = {number: signal.getsignal(number) for number in ENDING}
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    for number in ENDING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield told
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("unraisable")
def test_signals_that_a_process_was_started_to_ignore_stay_so() -> None:
    """``nohup`` and shells' jobs in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_as_by_ctrl_c()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) != signal.default_int_handler


@pytest.mark.usefixtures("unraisable")
def test_a_second_signal_at_once_is_the_same_one() -> None:
    end_as_by_ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_comes_where_nothing_can_be_raised_still_ends(unraisable: list[Any]) -> None:
    """In destructors, and callbacks of the import system: Python told of it, and a benchmark ran to its end."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    class Failing:
        def __del__(self) -> None:
            raise ValueError

    end_as_by_ctrl_c()
    Failing()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        Dying()
        time.sleep(20)
    assert [one.exc_type for one in unraisable] == [ValueError]


def test_nothing_ends_what_is_finishing() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore
    try:
        with finishing():
            for number in ENDING:
                os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(tmp_path: Path) -> None:
    """Four of seventy ended by the signal instead: dataclasses run text, and CPython remembers Ctrl-C in that."""
    (tmp_path / "typer.py").write_text("exec('import signal; signal.raise_signal(signal.SIGINT)')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-m", "foredraft", "info"],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stderr) == (130, "")


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def generated(traced: Path, *more: str) -> Any:
    options = [*TINY, "--raw", "--max-new-tokens", "9", "--trace", str(traced)]
    return run("generate", "Once upon", "A lion", *options, *more)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError, OSError])
def test_a_trace_is_written_however_its_text_ends(
    error: type[BaseException], traced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``| head -1`` left none."""
    from foredraft.cli.writers import TextWriter

    def write(self: TextWriter, *_: Any) -> None:
        raise error

    monkeypatch.setattr(TextWriter, "write", write)
    result = generated(traced)
    assert (result.exit_code == 130) == (error is KeyboardInterrupt)
    records = [json.loads(line) for line in traced.read_text().splitlines()]
    assert [record["prompt_index"] for record in records] == [0, 1]
    assert records[0]["steps"]


def test_texts_are_shown_where_the_trace_cannot_be_written(traced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foredraft.cli.tracing import TraceFile

    monkeypatch.setattr(TraceFile, "note", end_at(3, TraceFile.note))
    with room_for(100):
        result = generated(traced, "--json")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["Once upon", "A lion"]


def test_a_demo_keeps_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    race = comparison.race
    for number in (3, 1):
        monkeypatch.setattr(comparison, "race", end_at(number, race))
        result = run("demo", *TINY, "--max-new-tokens", "4", "--num-prompts", "4", "--json")
        assert result.exit_code == 130
        if number == 1:
            assert result.stdout == ""
        else:
            assert len(json.loads(result.stdout)["questions"]) == 2
            assert "interrupted after 2 of 4 questions" in result.stderr


TUNE = ["tune", *TINY, "--num-prompts", "6", "--max-new-tokens", "4", "--methods", "ngram,draft_model"]


@pytest.mark.parametrize(("number", "kept"), [(2, True), pytest.param(1, False, marks=pytest.mark.full)])
def test_a_choice_is_made_of_what_was_counted(
    number: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All texts and counts were lost; drafters that were timed are known to the next run all the same."""
    monkeypatch.setattr(LLM, "with_speculative_config", end_at(number, LLM.with_speculative_config))
    result = run(*TUNE, "--out", str(tmp_path / "tuned.json"), "--json")
    assert result.exit_code == 130, result.output
    assert (tmp_path / "tuned.json").exists() == kept
    if kept:
        found = json.loads(result.stdout)
        assert found["is_interrupted"]
        assert {one["name"].partition(",")[0] for one in found["compared"]} == {"plain decoding", "ngram"}


def ended_after(number: int) -> Callable[[Engine], Iterator[Any]]:
    """`Engine.run` with Ctrl-C after so many steps."""
    run_whole = Engine.run

    def run(engine: Engine) -> Iterator[Any]:
        for count, outputs in enumerate(run_whole(engine)):
            if count == number:
                raise KeyboardInterrupt
            yield outputs

    return run


@pytest.mark.parametrize(
    ("verb", "number", "form"),
    [
        ("tree", 12, []),
        ("tree", 12, ["--json"]),
        ("tree", 0, []),
        pytest.param("profile", 12, [], marks=pytest.mark.full),
        ("profile", 12, ["--json"]),
        pytest.param("profile", 0, [], marks=pytest.mark.full),
    ],
)
def test_a_search_keeps_what_was_decoded(
    verb: str, number: int, form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tune tree` and `tune profile` lost everything but the costs of forwards."""
    monkeypatch.setattr(Engine, "run", ended_after(number))
    write_checkpoint(tmp_path / "heads", *write_medusa(MedusaHeads(HeadsShape(HIDDEN_SIZE, 0, 3))))
    out = tmp_path / "found.json"
    options = f"--num-prompts 2 --max-nodes 6 --heads {tmp_path / 'heads'}"
    if verb == "profile":
        options = "--num-prompts 3 --batch-sizes 1 --contexts 64 --repeats 1 --check --method draft_model"
    result = run("tune", verb, "zoo:tiny", *options.split(), "--max-new-tokens", "24", "--out", str(out), *form)
    assert result.exit_code == 130, result.output
    assert out.exists() == (number > 0)
    if number:
        found = json.loads(out.read_text())
        assert found["is_interrupted"]
        assert "interrupted" in result.stdout
        if verb == "tree":
            assert 0 < found["num_places"] < 2 * 24
        else:
            assert found["settings"]
            assert "check" not in found


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_choice_is_told_where_it_cannot_be_written(form: list[str], tmp_path: Path) -> None:
    """It took minutes, and was lost for a full disk."""
    with room_for(2000):
        result = run(*TUNE, "--out", str(tmp_path / "tuned.json"), *form)
    assert result.exit_code == 2
    assert "tuned.json cannot be written" in result.stderr
    assert "written to" not in result.stdout
    assert '"out": null' in result.stdout if form else "speed relative to plain decoding" in result.stdout
    assert list(tmp_path.iterdir()) == []


# -- two at once -----------------------------------------------------------------------------------------------------


def test_two_trainings_do_not_fill_one_folder(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    with only_writer(tmp_path / ".running"):
        result = run("train", "medusa", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "another process is writing" in " ".join(result.stderr.split())


@pytest.mark.parametrize("place", ["file", "file/folder"])
def test_a_training_into_a_file_is_refused(place: str, tmp_path: Path) -> None:
    """It was a traceback, after the model was loaded."""
    (tmp_path / "file").write_text("a\nb\n")
    result = run("train", "medusa", "--prompts", str(tmp_path / "file"), "--out", str(tmp_path / place))
    assert result.exit_code == 2
    assert "cannot be written" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "option",
    ["--epochs nan", "--epochs inf", "--learning-rate nan", "--evaluate-tokens 0", "--own-prompts -1", "--patience -1"],
)
def test_numbers_that_no_training_has_are_refused(option: str, tmp_path: Path) -> None:
    """Tracebacks, some of them after the answers were made."""
    (tmp_path / "p.txt").write_text("a\nb\n")
    name, value = option.split()
    options = ["--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "out"), f"{name}={value}"]
    result = run("train", "medusa", *options)
    assert result.exit_code == 2
    assert f"{name.strip('-').replace('-', '_')} is {value}" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()
