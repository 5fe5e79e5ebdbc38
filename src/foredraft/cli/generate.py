"""``foredraft generate``; with ``--out`` many prompts into a file, from where it ends, on one machine or many."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.options import (
    DEFAULTS,
    AsJson,
    DraftingOptions,
    EngineOptions,
    LoadingOptions,
    ModelChoice,
    SamplingOptions,
    takes_groups,
)
from foredraft.cli.prompts import Chat, Raw, ask, check_template, read_prompts
from foredraft.cli.running import EXIT_INTERRUPTED, exit_codes, load_llm, say
from foredraft.cli.writers import JsonWriter, TextWriter, as_record
from foredraft.config.sampling import SamplingParams
from foredraft.ending import finishing
from foredraft.errors import ConfigError
from foredraft.folders import check_place, only_writer
from foredraft.serve.ray import check_ray

if TYPE_CHECKING:
    from foredraft.cli.tracing import TraceFile
    from foredraft.engine.frontend import Stream
    from foredraft.llm import LLM


@takes_groups
def generate(
    *,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Text; - is stdin.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSONL with turns, prompt or text; a .txt has one prompt per line."),
    ] = None,
    model: ModelChoice,
    drafting: DraftingOptions,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Budget of every sample; by default the model's, else {DEFAULTS.max_tokens}."),
    ] = None,
    sampling: SamplingOptions,
    chat: Chat = False,
    raw: Raw = False,
    loading: LoadingOptions,
    rows: Annotated[EngineOptions, "max_num_seqs", "max_kv_bytes", "prefill_chunk_size"],
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Write what every step planned, drafted, kept and rejected, for foredraft report.",
        ),
    ] = None,
    as_json: AsJson = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE.jsonl", help="Write results there, in batches; started again, it goes on."),
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="With --out: workers, by Ray.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Their cluster; by default one begins on this machine.")
    ] = None,
) -> None:
    """Generate text for one prompt or many; tokens appear as they come, coloured by who proposed them.

    An instruct model gets text as a message, through its chat template; --raw gives it the text as it is. Every
    prompt's samples are written in order. Statistics go to standard error. Ctrl-C keeps what has been generated.
    """
    with exit_codes():
        params = sampling.params(max_tokens=max_new_tokens)
        check_template(chat, raw)
        read = read_prompts(prompts or (), prompts_file, raw=raw)
        trace_place = None if trace is None else check_place(trace)
        name = model.chosen()
        options = {**vars(loading), **vars(rows), "gguf_file": model.gguf_file}
        if out is not None:
            unused = {"--json": as_json, "--trace": trace is not None}
            if given := [option for option, is_given in unused.items() if is_given]:
                raise typer.BadParameter(f"{', '.join(given)}: not with --out, whose lines are results as JSON alone")
            job = Job(name, drafting.config(loading.profile_file), options, params, read, chat, raw)
            run_job(job, out, replicas=replicas, address=ray_address)
            return
        if replicas is not None or ray_address is not None:
            raise typer.BadParameter("--replicas and --ray-address are for jobs; give --out")
        llm = load_llm(name, drafting.config(loading.profile_file), **options)
        params = params.filled(llm.sampling_defaults)
        asked = ask(llm.tokenizer, name, read, chat=chat, raw=raw)
        if llm.tokenizer is None and not as_json:
            say(f"{name} has no tokenizer, so there is no text to show; --json shows token ids")
        writer = JsonWriter(asked) if as_json else TextWriter(params)
        traced = None
        if trace_place is not None:
            from foredraft.cli.tracing import TraceFile  # which loads torch

            traced = TraceFile(trace_place, llm)
        with llm.stream([one.prompt for one in asked], params) as stream:
            try:
                for delta in stream:
                    if traced is not None:
                        traced.note(delta)
                    writer.write(delta, stream)
            except BaseException as error:
                with finishing():
                    _end_early(stream, writer if isinstance(error, KeyboardInterrupt) else None, traced)
                if isinstance(error, KeyboardInterrupt):
                    raise typer.Exit(EXIT_INTERRUPTED) from None
                raise
        writer.finish(stream)
        if traced is not None:
            traced.write(stream)


def _end_early(stream: Stream, writer: JsonWriter | TextWriter | None, traced: TraceFile | None) -> None:
    """Keep what has been generated.

    Args:
      writer: of the text; None where that cannot be written any more.
    """
    stream.close()
    try:
        if writer is not None:
            writer.interrupt(stream)
    finally:
        if traced is not None:
            traced.write(stream)


BATCH = 32
"""Prompts that are lost, and generated anew, where a machine fails or the command is broken off."""
RETRIES = 3
"""Machines that one batch may lose."""
ROUNDING = ("dtype", "quantization", "weights", "gguf_file", "kv_cache_dtype", "generation_config")
"""Options of `LLM` that change what a model says; drafting does not."""
WITHOUT = ("metrics", "timings")
"""Fields of a result that differ from run to run."""


@dataclass(frozen=True)
class Job:
    """Many prompts and the model that continues them, which is loaded for the first batch.

    Args:
      options: arguments of `LLM`.
      chat, raw: see `foredraft.cli.prompts.ask`.
    """

    model: str
    config: Any
    options: Mapping[str, Any]
    params: SamplingParams
    prompts: Sequence[Any]
    chat: bool
    raw: bool

    @property
    def digest(self) -> str:
        """Changes with whatever results follow from."""
        rounding = {name: self.options.get(name) for name in ROUNDING}
        facts = [self.model, rounding, repr(self.params), list(self.prompts), self.chat, self.raw]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @cached_property
    def _llm(self) -> LLM:
        return load_llm(self.model, self.config, **self.options)

    def generate(self, prompts: list[Any]) -> list[dict[str, Any]]:
        """Records of some of the prompts."""
        asked = ask(self._llm.tokenizer, self.model, prompts, chat=self.chat, raw=self.raw)
        outputs = self._llm.generate([one.prompt for one in asked], self.params, use_tqdm=False)
        records = []
        for one, output in zip(asked, outputs, strict=True):
            record = as_record(output, one.given if one.is_templated else None)
            records.append({name: value for name, value in record.items() if name not in WITHOUT})
        return records

    def batches(self, start: int) -> list[list[Any]]:
        """Batches from this prompt on. They begin at the same prompts in every run."""
        first = start // BATCH * BATCH
        places = range(first, len(self.prompts), BATCH)
        return [list(self.prompts[max(place, start) : place + BATCH]) for place in places]


def run_job(job: Job, out: str, *, replicas: int | None, address: str | None) -> None:
    """Generate what the file does not hold yet; a line for each prompt, in order, each exactly once.

    Raises: ConfigError where the file holds results of something else, or cannot be written.
    """
    if replicas or address:
        check_ray(address)
    path = Path(out).expanduser()
    if path.exists() and not path.is_file():  # devices may have no end
        raise ConfigError(f"{path} is no regular file, and results are read again to go on; name one, or take --json")
    with _opened(path):
        start = _resume(path, job)
        if start:
            say(f"{out} holds {start} of {len(job.prompts)} results; going on from there")
        batches = job.batches(start)
        done = _by_ray(job, batches, replicas or 1, address) if replicas or address else map(job.generate, batches)
        with open(path, "ab", buffering=0) as file:
            for records in done:
                lines = [
                    json.dumps({"number": start + place, "job": job.digest} | one) for place, one in enumerate(records)
                ]
                try:
                    _append(file, "".join(line + "\n" for line in lines).encode())
                except OSError as error:
                    raise ConfigError(
                        f"{out} cannot be written ({error.strerror or error}); it holds {start} of {len(job.prompts)} "
                        "results: start again to go on from there"
                    ) from None
                start += len(records)
                say(f"{start} of {len(job.prompts)}")


@contextmanager
def _opened(path: Path) -> Iterator[None]:
    """Keep other jobs out of the file: their lines would come between these.

    Raises: ConfigError where another one is in it, or it cannot be written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(only_writer(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
        yield


def _append(file: FileIO, data: bytes) -> None:
    """All of it, on the disk."""
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def _resume(path: Path, job: Job) -> int:
    """The number of results in the file; a line that was broken off is cut away."""
    try:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        for number, line in enumerate(lines):
            if not _is_result(line, job, number):
                raise ConfigError(
                    f"{path}, line {number + 1}, is a result of something else; name another file, or remove this one"
                )
        if len(whole) < len(data):
            os.truncate(path, len(whole))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    return len(lines)


def _is_result(line: bytes, job: Job, number: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and (record.get("job"), record.get("number")) == (job.digest, number)


def _by_ray(job: Job, batches: list[list[Any]], replicas: int, address: str | None) -> Iterator[list[dict[str, Any]]]:
    """Results in order. A worker that dies is replaced, by Ray, and its batches are done anew."""
    import ray
    from ray.exceptions import RayError

    from foredraft.serve.ray.launch import start_ray

    start_ray(address, replicas)
    try:
        kind = ray.remote(Job).options(num_cpus=1, max_restarts=-1, max_task_retries=RETRIES)
        workers = [kind.remote(**vars(job)) for _ in range(min(replicas, len(batches)))]
        waiting: deque[Any] = deque()
        for place, batch in enumerate(batches):
            if len(waiting) >= 2 * len(workers):
                yield ray.get(waiting.popleft())
            waiting.append(workers[place % len(workers)].generate.remote(batch))
        while waiting:
            yield ray.get(waiting.popleft())
    except RayError as error:
        raise ConfigError(f"a batch was given up: {str(error)[-300:]}; start again to go on from there") from None
    finally:
        ray.shutdown()
