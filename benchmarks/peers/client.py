"""The driver's side of a worker: a process of its own, asked line by line."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from foretoken.bench.arms import Arm, Run, Sampling

HERE = Path(__file__).parent
_SETTLING_SECONDS = 0.02  # between two requests, so that threads of the worker before have gone to sleep


class WorkerError(RuntimeError):
    """A worker died or reports an exception."""


@dataclass(frozen=True)
class Launch:
    """How to start a worker.

    Args:
      label: in front of the names of its arms.
      suffix: behind them.
    """

    label: str
    python: Path
    script: str
    arguments: tuple[str, ...]
    suffix: str = ""


class Worker:
    """One engine in a process of its own. It computes only while it is asked.

    Use it as a context manager: the process ends with the block.
    """

    def __init__(self, launch: Launch, threads: int, log: Path) -> None:
        self.launch = launch
        self.busy_cpu_seconds = self.busy_seconds = 0.0
        self.peak_bytes = 0
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        command = [str(launch.python), str(HERE / launch.script), *launch.arguments, "--threads", str(threads)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self._log = log
        try:
            self.facts = self._answer()
        except WorkerError:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._end()

    def _end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
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
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        found = self._answer()
        self.busy_seconds += time.perf_counter() - started
        self.busy_cpu_seconds += found["cpu_seconds"]
        self.peak_bytes = found["peak_bytes"]
        return found

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerError(
                f"{self.launch.label or self.launch.script}: the worker ended (exit code {code}); see {self._log}"
            )
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise WorkerError(f"{self.launch.label}: {found['error']}")
        return found

    def cpu_seconds(self) -> float:
        """Of the process so far, whoever asked."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def arms(self) -> list[RemoteArm]:
        return [RemoteArm(self, name) for name in self.facts["arms"]]


class RemoteArm(Arm):
    """An arm in another process; greedy, and the text ends where the model ends it."""

    def __init__(self, worker: Worker, remote_name: str) -> None:
        launch = worker.launch
        self.name = " ".join(part for part in (launch.label, remote_name, launch.suffix) if part)
        self.worker = worker
        self._remote_name = remote_name
        self.cpu_seconds = self.seconds = 0.0

    def run(self, prompt_ids: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Run:
        found = self.worker.ask(
            verb="run", arm=self._remote_name, prompt_ids=list(prompt_ids), max_new_tokens=max_new_tokens
        )
        self.cpu_seconds += found["cpu_seconds"]
        self.seconds += found["first_seconds"] + found["decode_seconds"]
        return Run(tuple(found["token_ids"]), found["num_first"], found["first_seconds"], found["decode_seconds"])

    @property
    def num_busy_threads(self) -> float:
        """Processor seconds per second of its runs."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0
