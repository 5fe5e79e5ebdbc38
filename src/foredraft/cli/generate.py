"""``foredraft generate``: text for prompts. With ``--out`` results go to a file, and an interrupted run continues."""

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

from foredraft.cli.help import OUTPUT
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
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Text to answer or continue; - reads standard input."),
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSONL with prompt, text or turns, or .txt lines."),
    ] = None,
    model: ModelChoice,
    drafting: DraftingOptions,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Limit on tokens per sample. Default: the model's or {DEFAULTS.max_tokens}."),
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
            hidden=True,
            rich_help_panel=OUTPUT,
            help="Write the drafted, accepted and rejected tokens of every step, for foredraft report.",
        ),
    ] = None,
    as_json: AsJson = False,
    stats: Annotated[
        bool,
        typer.Option("--stats", rich_help_panel=OUTPUT, help="Explain the speed: drafts, cuts, prompt time."),
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            rich_help_panel=OUTPUT,
            help="Write results to a file, or continue it.",
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, hidden=True, rich_help_panel=OUTPUT, help="With --out: number of Ray workers.")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            hidden=True, rich_help_panel=OUTPUT, help="With --out: Ray cluster. Default: one on this machine."
        ),
    ] = None,
) -> None:
    """Generate text for one prompt or for many.

    Text appears while it is generated; on a terminal, drafted tokens are green. Standard output has the text only.

    Examples:
      foredraft generate "Why is the sky blue?"
      foredraft generate "Name a colour" --temperature 0.8 -n 3
      foredraft generate --prompts-file prompts.jsonl --json --method none
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
                raise typer.BadParameter(
                    f"{', '.join(given)}: cannot be used with --out, which always writes results as JSON"
                )
            job = Job(name, drafting.config(loading.profile_file), options, params, read, chat, raw)
            run_job(job, out, replicas=replicas, address=ray_address)
            return
        if replicas is not None or ray_address is not None:
            raise typer.BadParameter("--replicas and --ray-address need --out")
        llm = load_llm(name, drafting.config(loading.profile_file), **options)
        llm.logs_low_gain = stats
        params = params.filled(llm.sampling_defaults)
        asked = ask(llm.tokenizer, name, read, chat=chat, raw=raw)
        if llm.tokenizer is None and not as_json:
            say(f"{name} has no tokenizer, so no text can be shown; --json shows token ids")
        writer = JsonWriter(asked) if as_json else TextWriter(params, shows_details=stats)
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
    """Write the output that was generated before the end.

    Args:
      writer: writer of the text; None if text can no longer be written.
    """
    stream.close()
    try:
        if writer is not None:
            writer.interrupt(stream)
    finally:
        if traced is not None:
            traced.write(stream)


BATCH = 32
"""Prompts per batch. A batch is generated again if a machine fails or the command is interrupted."""
RETRIES = 3
"""Limit on failures of machines per batch."""
ROUNDING = ("dtype", "quantization", "weights", "gguf_file", "kv_cache_dtype", "activations", "generation_config")
"""Options of `LLM` that change the output. Drafting does not."""
WITHOUT = ("metrics", "timings")
"""Fields of a result that differ from run to run."""


@dataclass(frozen=True)
class Job:
    """A job: many prompts and a model, which is loaded for the first batch.

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
        """Digest of everything that determines the results."""
        rounding = {name: self.options.get(name) for name in ROUNDING}
        facts = [self.model, rounding, repr(self.params), list(self.prompts), self.chat, self.raw]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    @cached_property
    def _llm(self) -> LLM:
        return load_llm(self.model, self.config, **self.options)

    def generate(self, prompts: list[Any]) -> list[dict[str, Any]]:
        """Records of the results of some prompts."""
        asked = ask(self._llm.tokenizer, self.model, prompts, chat=self.chat, raw=self.raw)
        outputs = self._llm.generate([one.prompt for one in asked], self.params, use_tqdm=False)
        records = []
        for one, output in zip(asked, outputs, strict=True):
            record = as_record(output, one.given if one.is_templated else None)
            records.append({name: value for name, value in record.items() if name not in WITHOUT})
        return records

    def batches(self, start: int) -> list[list[Any]]:
        """Batches of the job, beginning with this prompt. The boundaries of batches are the same in every run."""
        first = start // BATCH * BATCH
        places = range(first, len(self.prompts), BATCH)
        return [list(self.prompts[max(place, start) : place + BATCH]) for place in places]


def run_job(job: Job, out: str, *, replicas: int | None, address: str | None) -> None:
    """Generate the results that the file does not contain yet, one line per prompt, in order.

    Raises: ConfigError if the file contains results of another job or cannot be written.
    """
    if replicas or address:
        check_ray(address)
    path = Path(out).expanduser()
    if path.exists() and not path.is_file():  # devices may have no end
        raise ConfigError(
            f"{path} is not a regular file, and an interrupted job reads its results again; give a file, or use --json"
        )
    with _opened(path):
        start = _resume(path, job)
        if start:
            say(f"{out} contains {start} of {len(job.prompts)} results; continuing with the next one")
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
                        f"{out} cannot be written ({error.strerror or error}); it contains {start} of "
                        f"{len(job.prompts)} results. Run the same command again to continue"
                    ) from None
                start += len(records)
                say(f"{start} of {len(job.prompts)} prompts are done")


@contextmanager
def _opened(path: Path) -> Iterator[None]:
    """Lock the file of results, so that no other job writes to it.

    Raises: ConfigError if another job has it, or it cannot be written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(only_writer(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
        yield


def _append(file: FileIO, data: bytes) -> None:
    """Write all data and flush it to the disk."""
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def _resume(path: Path, job: Job) -> int:
    """Number of results in the file. An incomplete last line is removed."""
    try:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        for number, line in enumerate(lines):
            if not _is_result(line, job, number):
                raise ConfigError(
                    f"{path}, line {number + 1}, is a result of another job; give another file, or remove this one"
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
    """Results in order. Ray replaces a worker that dies and repeats its batches."""
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
        raise ConfigError(f"a batch failed: {str(error)[-300:]}. Run the same command again to continue") from None
    finally:
        ray.shutdown()
