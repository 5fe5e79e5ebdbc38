"""The race: every engine in a process of its own, all on the same weights and token ids, one computing at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from foredraft.bench.equality import Equality, check
from foredraft.bench.peers.client import Launch, RemoteArm, Worker, WorkerError
from foredraft.bench.peers.export import Exported
from foredraft.bench.peers.outcome import OWN, Heat, RaceOutcome, row_of, verdicts
from foredraft.bench.peers.workers.protocol import PLAIN
from foredraft.bench.trial import Sampling, Trial, in_groups, interleave
from foredraft.bench.workload import BenchPrompt
from foredraft.errors import ConfigError
from foredraft.progress import Watch

_WORTH_TIMING = 0.5  # of the budget: answers shorter than that are left out


@dataclass(frozen=True)
class RaceSettings:
    """Settings of a race. Defaults are those of ``foredraft bench --peers``.

    Args:
      num_prompts: that count; of batches, prompts in all groups together.
      num_tuning_prompts: others, on which every engine's settings are chosen.
      repeats: rounds of forwards and backwards through all arms, per prompt.
      batch_sizes: plain decoding of so many rows instead of single rows with drafts.
    """

    num_prompts: int = 24
    num_tuning_prompts: int = 4
    max_new_tokens: int = 48
    repeats: int = 1
    threads: int = 2
    batch_sizes: tuple[int, ...] = ()
    kinds: tuple[str, ...] | None = None
    prompts_file: Path | None = None


class Race:
    """Holds the processes; use it as a context manager.

    Args:
      exported: in whose folder the engines' logs lie until the next race.
      launches: of all engines, this library's own first.
      missing: engines that take no part, and why.

    Raises: WorkerError where this library's own worker does not start, ConfigError where no other one does.
    """

    def __init__(
        self,
        exported: Exported,
        dtype: str,
        launches: Seq[Launch],
        missing: Mapping[str, str],
        settings: RaceSettings,
        say: Watch,
    ) -> None:
        self._exported = exported
        self._dtype = dtype
        self._settings = settings
        self._say = say
        self._missing = dict(missing)
        self._counting: list[BenchPrompt] = []
        self._tuning: list[BenchPrompt] = []
        self._skipped: list[str] = []
        self._heats: list[Heat] = []
        self._gaps: dict[tuple[object, ...], float] = {}
        self._stack = ExitStack()
        self._workers: list[Worker] = []
        try:
            self._start(launches, exported.folder / "logs")
        except BaseException:
            self._stack.close()
            raise

    def _start(self, launches: Seq[Launch], logs: Path) -> None:
        logs.mkdir(exist_ok=True)
        for place, launch in enumerate(launches):
            self._say("starting engines", place, len(launches))
            try:
                worker = Worker(launch, self._settings.threads, logs / f"{launch.name}.log")
            except WorkerError as error:
                if launch.name == OWN:
                    raise
                self._missing[launch.name] = str(error)
                continue
            self._workers.append(self._stack.enter_context(worker))
        if len(self._workers) < 2:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._missing.items())
            raise ConfigError(f"no other engine takes part ({reasons}), so there is nothing to compare with")

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    # -- prompts -----------------------------------------------------------------------------------------------

    def answer(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """This library's greedy answer to a prompt, to the end of the text or the budget."""
        own, length = self._workers[0], self._settings.max_new_tokens
        return tuple(own.ask(verb="answer", prompt=list(ids), max_new_tokens=length)["token_ids"])

    def _choose(self, prompts: Iterator[BenchPrompt]) -> None:
        """The first prompts whose answers are long enough count; the next ones are for tuning.

        Raises: ConfigError when there are too few.
        """
        settings = self._settings
        wanted = settings.num_prompts + settings.num_tuning_prompts
        chosen: list[BenchPrompt] = []
        for prompt in prompts:
            if len(chosen) == wanted:
                break
            self._say("choosing prompts", len(chosen), wanted)
            is_long = settings.batch_sizes or len(self.answer(prompt.token_ids)) >= self._shortest
            if is_long:
                chosen.append(prompt)
            else:
                self._skipped.append(prompt.name)
        if len(chosen) < wanted:
            found_ones = "are there" if settings.batch_sizes else f"have answers of {self._shortest} tokens"
            raise ConfigError(
                f"{settings.num_prompts} prompts are to count and {settings.num_tuning_prompts} are for choosing "
                f"settings, and {len(chosen)} {found_ones}; ask for fewer with "
                "--num-prompts, or give more with --prompts-file"
            )
        self._counting, self._tuning = chosen[: settings.num_prompts], chosen[settings.num_prompts :]

    @property
    def _shortest(self) -> int:
        return max(2, round(_WORTH_TIMING * self._settings.max_new_tokens))

    # -- heats -------------------------------------------------------------------------------------------------

    def run(self, prompts: Iterator[BenchPrompt], on_prompt: Callable[[RaceOutcome], None]) -> RaceOutcome:
        """Choose settings on some prompts and race on others.

        Args:
          prompts: as many as are needed are taken.
          on_prompt: told of what is known so far, after every prompt.

        Raises: ConfigError, WorkerError.
        """
        self._choose(prompts)
        self._enter()
        for size in self._settings.batch_sizes or (1,):
            self._heats.append(self._heat(size, on_prompt))
            on_prompt(self.outcome())
        return self.outcome()

    def _enter(self) -> None:
        """An engine that breaks off takes no further part, nor does a way to decode none of whose settings works."""
        tuning = [prompt.token_ids for prompt in self._tuning]
        for place, worker in enumerate(list(self._workers)):
            self._say(f"choosing settings: {worker.launch.label}", place, len(self._workers))
            try:
                worker.enter(tuning, self._settings.max_new_tokens)
            except WorkerError as error:
                if worker.launch.name == OWN:
                    raise
                self._missing[worker.launch.name] = str(error)
                self._workers.remove(worker)
                continue
            self._missing |= {f"{worker.launch.label} {name}": reason for name, reason in worker.failed.items()}
        if len(self._workers) < 2:
            raise ConfigError(f"no other engine works: {self._missing}")

    def _heat(self, size: int, on_prompt: Callable[[RaceOutcome], None]) -> Heat:
        arms = [arm for worker in self._workers for arm in worker.arms if arm.num_rows in (1, size)]
        for arm in arms:
            arm.cpu_seconds = arm.seconds = 0.0
        items = self._counting if size == 1 else in_groups(self._counting, size)
        title = f"one row, {len(items)} prompts" if size == 1 else f"{size} rows, {len(items)} groups"
        before = [(worker.cpu_seconds(), worker.busy_cpu_seconds, worker.busy_seconds) for worker in self._workers]
        started = time.perf_counter()

        def heat(trial: Trial, is_complete: bool) -> Heat:
            found = check(trial, self._gap, self._reference(size), [arm.name for arm in arms])
            return Heat(
                title=title,
                num_rows=size,
                prompts=tuple(prompt.name for prompt in trial.prompts),
                runs_per_prompt=2 * self._settings.repeats,
                other_cpu_share=trial.other_cpu_share,
                idle_shares=self._idle_shares(before, time.perf_counter() - started),
                rows=tuple(row_of(trial, arm, same) for arm, same in zip(arms, found, strict=True)),
                verdicts=tuple(verdicts(trial, arms)),
                wrong=tuple(arm.name for arm, same in zip(arms, found, strict=True) if self._is_wrong(arm, same)),
                is_complete=is_complete,
            )

        def note(trial: Trial) -> None:
            self._say(title, len(trial.prompts), len(items))
            on_prompt(self.outcome(heat(trial, False)))

        self._say(title, 0, len(items))
        settings = self._settings
        trial = interleave(
            arms, items, Sampling(), settings.max_new_tokens, settings.repeats, note, self._own_cpu_seconds
        )
        return heat(trial, True)

    def _own_cpu_seconds(self) -> float:
        """Of the driver and all workers."""
        return time.process_time() + sum(worker.cpu_seconds() for worker in self._workers)

    def _idle_shares(self, before: Seq[tuple[float, float, float]], wall: float) -> dict[str, float]:
        shares = {}
        for worker, (cpu, busy_cpu, busy) in zip(self._workers, before, strict=True):
            idle_cpu = worker.cpu_seconds() - cpu - (worker.busy_cpu_seconds - busy_cpu)
            idle = wall - (worker.busy_seconds - busy)
            shares[worker.launch.name] = max(0.0, idle_cpu) / idle if idle > 0 else 0.0
        return shares

    # -- texts -------------------------------------------------------------------------------------------------

    def _reference(self, size: int) -> str:
        """This library's plain decoding of as many rows."""
        arms = self._workers[0].arms
        return next(arm.name for arm in arms if arm.facts["kind"] == PLAIN and arm.num_rows == size)

    def _gap(self, ids: Seq[int], output: Seq[int], one: int, other: int) -> float:
        """By how much this library's target prefers one token to another, in logits; asked for once."""
        key = tuple(ids), tuple(output), one, other
        if key not in self._gaps:
            request = {"prompt": list(ids), "output": list(output), "one": one, "other": other}
            self._gaps[key] = self._workers[0].ask(verb="gap", **request)["gap"]
        return self._gaps[key]

    def _is_wrong(self, arm: RemoteArm, found: Equality) -> bool:
        """Own arms always say the same again; in float32 they and transformers say what plain decoding says, but those
        with other weights."""
        engine = arm.worker.launch.name
        if engine == OWN and not found.is_repeatable:
            return True
        if self._dtype != "float32" or engine not in (OWN, "transformers"):
            return False
        if engine == OWN and arm.facts["numerics"] != self._workers[0].arms[0].facts["numerics"]:
            return False  # it has other weights
        return not (found.is_repeatable and found.passes(torch.float32))

    def outcome(self, unfinished: Heat | None = None) -> RaceOutcome:
        """What is known so far."""
        arms = [arm for worker in self._workers for arm in worker.arms]
        return RaceOutcome(
            models=self._exported.models,
            dtype=self._dtype,
            engines={worker.launch.name: worker.engine for worker in self._workers},
            plain_peak_bytes={worker.launch.name: worker.plain_peak_bytes for worker in self._workers},
            missing=dict(self._missing),
            prompts=tuple(prompt.name for prompt in self._counting),
            tuning_prompts=tuple(prompt.name for prompt in self._tuning),
            skipped=tuple(self._skipped),
            tried={arm.name: arm.facts["tried"] for arm in arms},
            heats=(*self._heats, *([unfinished] if unfinished is not None else [])),
        )
