"""A disk that is full: what was kept before stays whole, nothing half-written is left, and what is computed goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from test_broken_steps import TOY_PARAMS, expected_of_toy, given, tokens, toy

from foredraft import LLM
from foredraft.bench.report import Report
from foredraft.errors import CheckpointError, ConfigError
from foredraft.folders import append_lines, filling, is_no_room, keep_json, write_atomically, write_text
from foredraft.heads.checkpoint import write_checkpoint
from foredraft.loading.stored import save_compressed
from foredraft.methods.rank_tree import RankTree
from foredraft.native.library import library
from foredraft.pictures import keep_picture, require_matplotlib
from foredraft.train.plan import Plan
from foredraft.train.run import Training
from small_disk import room_for

PROMPTS = "\n".join(
    f"Once there was a {one} who {other}" for one in ("dog", "girl", "king") for other in ("ran", "sat")
)


def save_tree(file: Path, size: int) -> None:
    RankTree.of([(0,) * depth for depth in range(1, size // 20)]).save(file)


def save_trace(file: Path, size: int) -> None:
    write_text(file, "x" * size)


def save_picture(file: Path, size: int) -> None:
    figure = require_matplotlib().Figure(figsize=(1, size / 2048))
    figure.text(0, 0, "x" * size)
    keep_picture(figure, file)


def save_head(file: Path, size: int) -> None:
    write_checkpoint(file.parent, {"size": size}, {"w": torch.full((size,), float(size))})


@pytest.mark.parametrize(
    ("save", "file_name", "error"),
    [
        (lambda file, size: keep_json(file, ["x" * size]), "costs.json", OSError),
        (save_tree, "tree.json", OSError),
        (save_trace, "trace.html", ConfigError),
        (save_picture, "picture.svg", ConfigError),
        (save_head, "model.safetensors", Exception),
    ],
)
def test_what_was_kept_before_stays_whole(save: Any, file_name: str, error: type[Exception], tmp_path: Path) -> None:
    save(tmp_path / file_name, 60)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with room_for(2048), pytest.raises(error):
        save(tmp_path / file_name, 4096)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    save(tmp_path / file_name, 4096)
    assert (tmp_path / file_name).stat().st_size >= 4096


def test_what_is_no_file_is_written_to_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert (tmp_path / "link").is_symlink()
    write_atomically(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()


def test_lines_begin_after_one_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append_lines(file, "1\n22\n")
    with room_for(8), pytest.raises(OSError, match="too large"):
        append_lines(file, "333333\n")
    append_lines(file, "4\n")
    assert file.read_text() == "1\n22\n333\n4\n"


def test_an_error_in_words_is_told_from_others() -> None:
    assert is_no_room(Exception("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert not is_no_room(Exception("I/O error: Permission denied (os error 13)"))
    assert not is_no_room(RuntimeError("unexpected pos 704 vs 598"))


def test_a_bench_goes_on_and_keeps_what_came_before(tmp_path: Path) -> None:
    file, said = tmp_path / "results.json", list[str]()
    report = Report(Console(quiet=True), file, said.append)
    report.keep(first=1)
    with room_for(1024):
        report.keep(second="x" * 4096)
    assert "results.json cannot be written (File too large); the results are still shown" in said[0]
    assert json.loads(file.read_text()) == {"first": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_a_method_that_cannot_keep_what_it_has_learned_says_so(tmp_path: Path) -> None:
    config = {"method": "suffix", "shared": True, "state_file": str(tmp_path / "learned")}
    llm = toy().with_speculative_config(config)
    with room_for(64), pytest.warns(RuntimeWarning, match="learned"):
        assert tokens(llm.generate(given([[5, 6, 7, 5, 6]]), TOY_PARAMS)) == expected_of_toy()[:1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_training_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    """No checkpoint fits, then no features do; with room the run ends as one that never lacked any."""
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    llm = LLM("zoo:tiny", dtype="float32", execution="packed")

    def run(name: str) -> Training:
        return Training(
            llm,
            Plan(
                method="medusa", out=tmp_path / name, prompts=tmp_path / "prompts.txt",
                features=tmp_path / f"{name}-kept",
                num_heads=1, draft_vocabulary=64, batch_tokens=24, evaluate_tokens=30, one_in=6, raw=True,
                max_answer_tokens=8,
            ),
        )  # fmt: skip

    list(run("whole").train())
    with room_for(100_000), pytest.raises(CheckpointError, match="Make room and run the same command"):
        list(run("short").train())
    assert not list((tmp_path / "short").glob(".*"))
    list(run("short").train())
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "short")]
    assert all(torch.equal(heads[0][key], heads[1][key]) for key in heads[0])


@pytest.mark.skipif(library() is None, reason="no kernels here")
def test_a_quantised_model_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Neither a full disk nor Ctrl-C leaves anything, and the same folder can be named again."""
    llm, folder = LLM("zoo:tiny", quantization="int8"), tmp_path / "q"
    with room_for(2**16), pytest.raises(ConfigError, match="nothing was left there; free space"):
        llm.save_quantized(folder)
    assert not folder.exists()

    class Interrupted:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")
            raise KeyboardInterrupt

    given = tmp_path / "given"
    given.mkdir()
    with pytest.raises(KeyboardInterrupt):
        save_compressed(llm.target.shadow, given, Interrupted())  # type: ignore[arg-type]
    assert list(given.iterdir()) == []
    llm.save_quantized(given)
    assert LLM(str(given)).model_info.quantization == "stored"


def test_a_kill_while_files_come_into_a_folder_leaves_it_without_its_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved = []
    monkeypatch.setattr(os, "replace", lambda _, file: moved.append(file.name))
    with filling(tmp_path, "b") as part:
        for name in "abc":
            (part / name).write_text(name)
    assert (sorted(moved), moved[-1]) == (["a", "b", "c"], "b")
