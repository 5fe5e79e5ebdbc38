"""``foredraft generate --out``: each prompt exactly once, in order, from where a run was broken off."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.cli import generate as jobs
from foredraft.folders import only_writer

OPTIONS = ["--model", "zoo:tiny", "--raw", "--max-new-tokens", "6", "--temperature", "1", "--seed", "5"]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BATCH", 3)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Story {place} is about"}) + "\n" for place in range(8)))
    return file


def run(prompts: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["generate", "--prompts-file", str(prompts), "--out", str(out), *OPTIONS, *more])


def test_a_job_goes_on_where_it_was_broken_off(prompts: Path, tmp_path: Path) -> None:
    """Also within a line; the file is the one of a run that was not."""
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert run(prompts, whole).exit_code == 0
    data = whole.read_bytes()
    records = [json.loads(line) for line in data.splitlines()]
    assert [record["prompt"] for record in records] == [f"Story {place} is about" for place in range(8)]
    assert [record["number"] for record in records] == list(range(8))
    for share in (0, 0.5, 0.9, 1):  # of the whole nothing is left to do
        broken.write_bytes(data[: int(share * len(data))])
        assert run(prompts, broken).exit_code == 0
        assert broken.read_bytes() == data


@pytest.mark.parametrize("content", ["{}\n", "hello\n", "[3]\n"])
def test_a_file_of_something_else_is_not_touched(prompts: Path, tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    refused = run(prompts, out)
    assert refused.exit_code == 2
    assert "line 1, is a result of another job" in refused.output
    assert out.read_text() == content


@pytest.mark.parametrize("out", ["/dev/full", "/dev/zero", "."])
def test_what_is_no_file_is_refused(prompts: Path, out: str) -> None:
    """Results are read again to go on: ``/dev/full`` was read for ever, until the memory was full."""
    refused = run(prompts, Path(out))
    assert refused.exit_code == 2
    assert f"{out} is not a regular file" in refused.output


def test_a_disk_that_is_full_is_told_and_a_later_run_goes_on(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run(prompts, whole).exit_code == 0
    sizes: list[int] = []

    def filling(file: int) -> None:
        sizes.append(os.fstat(file).st_size)
        if len(sizes) == 2:
            os.ftruncate(file, sizes[-1] - 10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(jobs.os, "fsync", filling)
        stopped = run(prompts, out)
    assert stopped.exit_code == 2
    assert "No space left on device" in stopped.output
    assert "contains 3 of 8" in stopped.output
    assert run(prompts, out).exit_code == 0
    assert out.read_bytes() == whole.read_bytes()


def test_results_of_other_weights_or_settings_are_not_gone_on_with(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run(prompts, out).exit_code == 0
    data = out.read_bytes()
    for more in (["--dtype", "float64"], ["--kv-cache-dtype", "int8"], ["--seed", "6"], ["--max-new-tokens", "7"]):
        assert run(prompts, out, *more).exit_code == 2
    assert run(prompts, out, "--method", "ngram").exit_code == 0, "drafting changes no result"
    assert out.read_bytes() == data


def test_two_jobs_do_not_write_one_file(prompts: Path, tmp_path: Path) -> None:
    """Their lines came between one another's, and neither could be gone on with."""
    out = tmp_path / "out.jsonl"
    with only_writer(out):
        refused = run(prompts, out)
        assert refused.exit_code == 2
        assert "another process is writing" in refused.output
        assert out.read_bytes() == b""
    assert run(prompts, out).exit_code == 0
