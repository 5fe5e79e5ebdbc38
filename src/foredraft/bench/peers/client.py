"""The driver's side of a worker: a process of its own, asked line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foredraft.bench.trial import Arm, Run, Sampling, rows_of
from foredraft.errors import ForedraftError

HERE = Path(__file__).parent
_SETTLING_SECONDS = 0.02  # between two requests, so that threads of the worker before have gone to sleep
_PATIENCE_SECONDS = 5.0  # with a worker whose input has ended
_BOOT = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module(sys.argv.pop(1), run_name='__main__')"
"""Runs a worker where this package is not: its folder comes last on the path, so that it hides nothing."""


class WorkerError(ForedraftError):
    """A worker ended, or reports an exception."""


@dataclass(frozen=True)
class Launch:
    """How to start a worker.

    Args:
      name: by which a user knows the engine.
      label: in front of the names of its arms.
      python: None for this library's own.
      worker: the module among the workers.
      folder: that holds the folder of workers.
    """

    name: str
    label: str
    python: Path | None
    worker: str
    arguments: tuple[str, ...]
    folder: Path = HERE

    def command(self) -> list[str]:
        if self.python is None:
            return [sys.executable, "-m", f"foredraft.bench.peers.workers.{self.worker}", *self.arguments]
        return [str(self.python), "-I", "-c", _BOOT, str(self.folder), f"workers.{self.worker}", *self.arguments]


class Worker:
    """One engine in a process of its own. It computes only while it is asked.

    Use it as a context manager: the process ends with the block.

    Args:
      log: what the engine writes beside its answers.

    Attributes:
      plain_peak_bytes: the largest resident size of the process that has decoded plainly, and nothing else yet.
      peak_bytes: with all that it has tried since.
      failed: ways to decode that do not work, and why.

    Raises: WorkerError where the engine does not start.
    """

    def __init__(self, launch: Launch, threads: int, log: Path) -> None:
        self.launch = launch
        self.busy_cpu_seconds = self.busy_seconds = 0.0
        self.peak_bytes = self.plain_peak_bytes = 0
        self.arms: list[RemoteArm] = []
        self.failed: dict[str, str] = {}
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [*launch.command(), "--threads", str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the driver, which ends the workers
            )
        try:
            self.engine: str = self._answer()["engine"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The end of its input ends it; if that does not help, it is killed."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer.

        Raises: WorkerError.
        """
        time.sleep(_SETTLING_SECONDS)
        started = time.perf_counter()
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # reading tells how it ended
        found = self._answer()
        self.busy_seconds += time.perf_counter() - started
        self.busy_cpu_seconds += found["cpu_seconds"]
        self.peak_bytes = found["process_peak_bytes"]
        return found

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerError(f"the worker of {self.launch.name} ended (exit code {code}); its log is {self._log}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(found.get("trace", ""))
            raise WorkerError(f"{self.launch.name}: {found['error']}; its log is {self._log}")
        return found

    def enter(self, prompts: Seq[Seq[int]], max_new_tokens: int) -> list[RemoteArm]:
        """Make its arms, each with the settings that are fastest on these prompts.

        Raises: WorkerError.
        """
        found = self.ask(verb="enter", prompts=[list(ids) for ids in prompts], max_new_tokens=max_new_tokens)
        self.plain_peak_bytes, self.failed = found["peak_bytes"], found["failed"]
        self.arms = [RemoteArm(self, facts) for facts in found["arms"]]
        return self.arms

    def cpu_seconds(self) -> float:
        """Of the process so far, whoever asked; 0 where the system does not report it (Linux does)."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class RemoteArm(Arm):
    """An arm in another process, greedy: one row ends where the model ends it, rows of a batch at the budget.

    Args:
      facts: what the worker says of it.
    """

    def __init__(self, worker: Worker, facts: Mapping[str, Any]) -> None:
        self.name = f"{worker.launch.label} {facts['name']}"
        self.worker = worker
        self.facts = facts
        self.num_rows: int = facts["num_rows"]
        self.cpu_seconds = self.seconds = 0.0

    def run(self, prompt_ids: Seq[Any], max_new_tokens: int, sampling: Sampling) -> Run:
        """All prompts of a group, or the first of them for an arm of one row."""
        prompts = [list(ids) for ids in rows_of(prompt_ids)[: self.num_rows]]
        found = self.worker.ask(verb="run", arm=self.facts["name"], prompts=prompts, max_new_tokens=max_new_tokens)
        self.cpu_seconds += found["cpu_seconds"]
        self.seconds += found["first_seconds"] + found["decode_seconds"]
        rows = tuple(tuple(row) for row in found["rows"])
        tokens = tuple(chain.from_iterable(rows))
        return Run(tokens, found["num_first"], found["first_seconds"], found["decode_seconds"], rows=rows)

    @property
    def num_busy_threads(self) -> float:
        """Processor seconds per second of its runs."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0
