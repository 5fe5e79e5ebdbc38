"""Builds that end anywhere: killed, out of disk, between any two writes. What goes on is what would have been."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_datastore import sentences, tokenizer
from test_full_disk import room_for

from foredraft.errors import ConfigError, DatastoreError
from foredraft.retrieval import build as building
from foredraft.retrieval import corpus as corpora
from foredraft.retrieval import manifest as manifests
from foredraft.retrieval.build import build
from foredraft.retrieval.datastore import Datastore
from programs import ran, started

SHARD_TOKENS = 700


def write_corpus(path: Path, num_texts: int, num_times: int = 1) -> Path:
    path.write_text("".join(json.dumps({"text": text * num_times}) + "\n" for text in sentences(num_texts)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that readers see, the manifest included."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return small_corpus(tmp_path, monkeypatch)


def small_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some shards, several checkpoints in each."""
    monkeypatch.setattr(building, "CHECKPOINT_BYTES", 256)
    monkeypatch.setattr(corpora, "BATCH_PIECES", 7)
    return write_corpus(tmp_path / "corpus.jsonl", 200)


class Killed(Exception):
    """In the place of the end of the process: nothing is written after it."""


class TokenFile:
    """The token file of a shard that is being written, whose writes a test may replace."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: bytes) -> None:
        self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def open_token_files(patch: pytest.MonkeyPatch) -> None:
    """Open files that tokens are written to as `TokenFile`."""
    opened = Path.open

    def open_one(path: Path, mode: str = "r", *given: Any, **options: Any) -> Any:
        file = opened(path, mode, *given, **options)
        return TokenFile(file) if (path.suffix, mode) == (".tokens", "r+b") else file

    patch.setattr(Path, "open", open_one)


def interrupted(corpus: Path, out: Path, patch: pytest.MonkeyPatch, moment: int) -> bool:
    """Build until the n-th write to a token file has reached the disk; whether it came to that."""
    count = 0
    write = TokenFile.write

    def killing(self: TokenFile, data: bytes) -> None:
        nonlocal count
        write(self, data)
        count += 1
        if count == moment:
            self.flush()  # as the operating system may have done
            raise Killed

    with patch.context() as inner:
        open_token_files(inner)
        inner.setattr(TokenFile, "write", killing)
        try:
            build([corpus], tokenizer(), out, max_shard_tokens=SHARD_TOKENS)
        except Killed:
            return True
    return False


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, marks=() if moment in (2, 5, 8) else pytest.mark.full) for moment in range(1, 12)],
)
def test_an_interrupted_build_goes_on_where_it_was(
    moment: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken off at the n-th state or shard that is written, before or after: the result is the same, byte by byte."""
    build([corpus], tokenizer(), tmp_path / "whole", max_shard_tokens=SHARD_TOKENS)
    calls = 0

    def breaking(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment * 2:
                raise Killed
            result = original(*arguments)
            if calls == moment * 2 + 1:
                raise Killed
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(building, "write_json", breaking(building.write_json))
        patch.setattr(building, "write_suffix_array", breaking(building.write_suffix_array))
        with pytest.raises(Killed):
            build([corpus], tokenizer(), tmp_path / "out", max_shard_tokens=SHARD_TOKENS)
    with pytest.raises(DatastoreError, match="unfinished build"):
        Datastore.open(tmp_path / "out")
    build([corpus], tokenizer(), tmp_path / "out", max_shard_tokens=SHARD_TOKENS)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out" / "build.json").exists()


def test_an_unfinished_build_is_not_mixed_with_another(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(building.DatastoreManifest, "write", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            build([corpus], tokenizer(), tmp_path / "out", max_shard_tokens=300)
    with pytest.raises(DatastoreError, match=r"max_shard_tokens.*--restart"):
        build([corpus], tokenizer(), tmp_path / "out")
    manifest = build([corpus], tokenizer(), tmp_path / "out", restart=True)
    assert len(manifest.shards) == 1
    with pytest.raises(DatastoreError, match="already contains a datastore"):
        build([corpus], tokenizer(), tmp_path / "out")


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", [3, 22, 41, pytest.param(97, marks=pytest.mark.full)])
def test_tokens_behind_the_last_checkpoint_are_cut_off(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token file that is longer than the state says: what is behind is written again, and once."""
    corpus = small_corpus(tmp_path, monkeypatch)
    build([corpus], tokenizer(), tmp_path / "whole", max_shard_tokens=SHARD_TOKENS)
    out = tmp_path / "out"
    assert interrupted(corpus, out, monkeypatch, moment)
    state = json.loads((out / "build.json").read_text()) if (out / "build.json").exists() else {"open_bytes": 0}
    newest = max(out.glob("shard-*.tokens"))
    assert newest.stat().st_size > state["open_bytes"]
    with newest.open("ab") as file:
        file.write(b"\x01\x02" * 5000)  # more than the rest of the build writes over
    build([corpus], tokenizer(), out, max_shard_tokens=SHARD_TOKENS)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_build_that_is_broken_off_again_and_again_comes_to_the_same_end(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build([corpus], tokenizer(), tmp_path / "whole", max_shard_tokens=SHARD_TOKENS)
    moments = random.Random(3)
    num_interruptions = 0
    while interrupted(corpus, tmp_path / "out", monkeypatch, moments.randrange(20, 90)):
        num_interruptions += 1
    assert num_interruptions > 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def outcome(corpus: Path, out: Path) -> str:
    """What a build is refused with, if it is."""
    try:
        build([corpus], tokenizer(), out, max_shard_tokens=SHARD_TOKENS)
    except DatastoreError as error:
        return str(error)
    return ""


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "where",
    [
        (os, "fsync"),
        (building, "write_suffix_array"),
        (manifests, "write_json"),
        (building, "write_json"),
        (TokenFile, "write"),
    ],
    ids=lambda where: where[1] + "-" + where[0].__name__.split(".")[-1],
)
@pytest.mark.parametrize("moment", [0, 2])
def test_a_disk_that_fills_up_anywhere_is_reported_and_the_build_goes_on(
    where: tuple[Any, str], moment: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first or third write of every kind: a typed error with the remedy, and the remedy works."""
    build([corpus], tokenizer(), tmp_path / "whole", max_shard_tokens=SHARD_TOKENS)
    original: Callable[..., Any] = getattr(*where)
    count = 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return full() if count == moment + 1 else original(*arguments, **options)

    with monkeypatch.context() as patch:
        open_token_files(patch)
        patch.setattr(*where, failing)
        message = outcome(corpus, tmp_path / "out")
    if count > moment:  # otherwise it is not written that often
        assert "No space left on device; make room and run the same command again" in message
    if not (tmp_path / "out" / "manifest.json").exists():
        build([corpus], tokenizer(), tmp_path / "out", max_shard_tokens=SHARD_TOKENS)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_disk_that_is_full_is_reported_and_the_build_goes_on(corpus: Path, tmp_path: Path) -> None:
    with room_for(4096), pytest.raises(DatastoreError, match="make room and run the same command again"):
        build([corpus], tokenizer(), tmp_path / "out")
    build([corpus], tokenizer(), tmp_path / "out")
    build([corpus], tokenizer(), tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_two_builds_do_not_write_to_one_directory(corpus: Path, tmp_path: Path) -> None:
    def second(*_: Any) -> None:
        with pytest.raises(ConfigError, match="another process"):
            build([corpus], tokenizer(), tmp_path / "out")
        raise Killed

    with pytest.raises(Killed):
        build([corpus], tokenizer(), tmp_path / "out", progress=second)


@pytest.mark.full
def test_builds_killed_at_random_moments_come_to_the_same_end(tmp_path: Path) -> None:
    """kill -9 on the real command line, any time from its start to its end, again and again until it is through."""
    source = write_corpus(tmp_path / "corpus.jsonl", 12_000, 10)
    command = ["datastore", "build", str(source), "--memory", "0.607", "--out"]
    ran([*command, str(tmp_path / "whole")]).check_returncode()
    moments, num_killed, out = random.Random(1), 0, tmp_path / "out"
    for _ in range(6):
        state = out / "build.json"
        before = state.stat().st_mtime_ns if state.exists() else 0
        process = started([*command, str(out)], start_new_session=True, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if state.exists() and state.stat().st_mtime_ns != before:
                break  # it has gone on: now any moment will do
            time.sleep(0.005)
        time.sleep(moments.uniform(0.0, 0.4))
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        num_killed += 1
    assert num_killed >= 3
    with pytest.raises(DatastoreError):
        Datastore.open(out)
    ran([*command, str(out)]).check_returncode()
    assert contents(out) == contents(tmp_path / "whole")
