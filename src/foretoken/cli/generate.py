"""``foretoken generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.jobs import Job, run
from foretoken.cli.options import (
    DEFAULTS,
    AsJson,
    DraftingOptions,
    EngineOptions,
    LoadingOptions,
    ModelChoice,
    SamplingOptions,
    StructureOptions,
    takes_groups,
)
from foretoken.cli.prompts import Chat, Raw, ask, check_template, read_prompts
from foretoken.cli.running import EXIT_INTERRUPTED, exit_codes, load_llm, say
from foretoken.cli.writers import JsonWriter, TextWriter
from foretoken.ending import finishing
from foretoken.folders import check_place
from foretoken.views.traceplot import check_picture, plot_traces

if TYPE_CHECKING:
    from foretoken.cli.tracing import TraceFile
    from foretoken.engine.stats import StepTrace
    from foretoken.sessions.outputs import RequestOutput
    from foretoken.sessions.runner import Stream


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
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Budget of every sample.")] = DEFAULTS.max_tokens,
    sampling: SamplingOptions,
    structure: StructureOptions,
    chat: Chat = False,
    raw: Raw = False,
    loading: LoadingOptions,
    rows: Annotated[EngineOptions, "max_num_seqs", "max_kv_bytes", "prefill_chunk_size"],
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Write what every step planned, drafted, kept and rejected, for foretoken report.",
        ),
    ] = None,
    trace_plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw what every step planned, drafted and accepted.")
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
        params = sampling.params(max_tokens=max_new_tokens, structured_outputs=structure.wanted())
        check_template(chat, raw)
        read = read_prompts(prompts or (), prompts_file, raw=raw)
        if trace_plot is not None:
            check_picture(trace_plot)
        trace_place = None if trace is None else check_place(trace)
        name = model.chosen()
        options = {**vars(loading), **vars(rows), "gguf_file": model.gguf_file}
        if out is not None:
            unused = {"--json": as_json, "--trace": trace is not None, "--trace-plot": trace_plot is not None}
            if given := [option for option, is_given in unused.items() if is_given]:
                raise typer.BadParameter(f"{', '.join(given)}: not with --out, whose lines are results as JSON alone")
            job = Job(name, drafting.config(name, loading.profile_file), options, params, read, chat, raw)
            run(job, out, replicas=replicas, address=ray_address)
            return
        if replicas is not None or ray_address is not None:
            raise typer.BadParameter("--replicas and --ray-address are for jobs; give --out")
        llm = load_llm(name, drafting.config(name, loading.profile_file), **options)
        asked = ask(llm.tokenizer, name, read, chat=chat, raw=raw)
        if llm.tokenizer is None and not as_json:
            say(f"{name} has no tokenizer, so there is no text to show; --json shows token ids")
        writer = JsonWriter(asked) if as_json else TextWriter(params)
        traced = None
        if trace_place is not None:
            from foretoken.cli.tracing import TraceFile  # which loads torch

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
        if trace_plot is not None:
            plot_traces(titled_traces(stream.outputs()), trace_plot)


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


def titled_traces(outputs: Sequence[RequestOutput]) -> list[tuple[str, list[StepTrace]]]:
    """The steps of every sample of every prompt, under a title."""
    return [
        (
            f"prompt {place}" + (f", sample {sample.index}" if len(output.outputs) > 1 else ""),
            [step for step in output.metrics.trace if step.sample == sample.index],
        )
        for place, output in enumerate(outputs)
        for sample in output.outputs
    ]
