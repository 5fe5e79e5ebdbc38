"""``foretoken demo``: plain beside speculative decoding of real questions; equality first, then the speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status

from foretoken.cli.options import (
    DEFAULTS,
    EXIT_DIFFERS,
    AsJson,
    Device,
    DraftModel,
    Dtype,
    Exactness,
    Execution,
    GgufFile,
    Method,
    Model,
    NumSpeculativeTokens,
    SpeculativeOption,
    Temperature,
    choose_model,
    exit_codes,
    load_llm,
    put_json,
    sampling,
    speculative,
)
from foretoken.cli.prompts import Raw, ask
from foretoken.config.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from foretoken.cli.comparison import Answer, Report
    from foretoken.cli.prompts import Asked
    from foretoken.config.sampling import SamplingParams
    from foretoken.llm import LLM

EXACTNESS = "default"
"""The mode in which plain and speculative texts are compared; the table names it."""

MAX_QUESTIONS = 4
WARM_UP_TOKENS = 8
TOY = "zoo:tiny"
INFLATED = {"hidden_size": 1024, "intermediate_size": 4096}
LABEL = (
    "zoo:tiny's target, inflated in width to {size:.1f} M parameters: "
    "it computes the same function at the cost of a bigger model"
)


def demo(
    questions: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUESTION]...", help="Questions of your own, instead of the built-in ones."),
    ] = None,
    model: Model = None,
    gguf_file: GgufFile = None,
    draft_model: DraftModel = None,
    method: Method = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    speculative_config: SpeculativeOption = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens of an answer; most answers end earlier.", min=2)
    ] = 256,
    temperature: Temperature = DEFAULTS.temperature,
    seed: Annotated[int, typer.Option(help="Both ways use the same one.")] = 0,
    num_prompts: Annotated[
        int, typer.Option(help="How many of the built-in questions to ask.", min=1, max=MAX_QUESTIONS)
    ] = MAX_QUESTIONS,
    raw: Raw = False,
    inflate: Annotated[
        bool, typer.Option(help="Give zoo:tiny the cost of a 98.6 M model. It is too small to gain anything as it is.")
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    execution: Execution = "auto",
    exactness: Exactness = EXACTNESS,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="A picture of one question and the table.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer the same questions plainly and speculatively, side by side; then compare the texts, and then the speed.

    The two take turns, so that both have had the same time at every moment. Exit code 3 when a text differs.
    """
    console = Console(stderr=as_json, highlight=False)
    with exit_codes(), console.status("starting") as status:
        from foretoken.cli import demo_screen
        from foretoken.cli.comparison import QUESTIONS, TOY_QUESTIONS

        if svg is not None:
            demo_screen.check_picture(svg)
        model = choose_model(model)
        config = speculative(model, speculative_config, method, draft_model, num_speculative_tokens)
        params = sampling(max_tokens=max_new_tokens, temperature=temperature, seed=seed)
        own = TOY_QUESTIONS if model == TOY else QUESTIONS
        options = {
            "gguf_file": gguf_file,
            "dtype": dtype,
            "device": device,
            "execution": execution,
            "exactness": exactness,
        }
        llms, label = _load(model, config, status, inflate=inflate and model == TOY, options=options)
        asked = ask(llms[0].tokenizer, model, questions or own[:num_prompts], chat=model == TOY and not raw, raw=raw)
        status.update("warming up")
        for llm in llms:
            llm.generate(asked[-1].prompt, replace(params, max_tokens=WARM_UP_TOKENS), use_tqdm=False)
        status.stop()
        report = _report(llms, label, params, _answers(console, llms, asked, params))
        if as_json:
            put_json(report.as_dict())
        else:
            demo_screen.show(console, report)
        if not report.is_identical:
            if svg is not None:
                typer.echo(f"foretoken: {svg} was not drawn: it would show the speed of another text", err=True)
            raise typer.Exit(EXIT_DIFFERS)
        if svg is not None:
            demo_screen.picture(report, svg)


def _load(
    model: str, config: SpeculativeConfig, status: Status, *, inflate: bool, options: dict[str, Any]
) -> tuple[tuple[LLM, LLM], str]:
    """Plain and speculative decoding of one target in memory, and what to call it."""
    status.update(f"loading {model}")
    if not inflate:
        drafting = load_llm(model, config, **options)
        info = drafting.model_info
        return _both(drafting), f"{info.name}, {info.num_parameters / 1e6:.1f} M parameters"
    from foretoken import zoo
    from foretoken.loading.models import load_model
    from foretoken.testing.inflation import inflate as inflated

    bigger = inflated(load_model(model, dtype=options["dtype"], device=options["device"]).model, **INFLATED)
    if config.method == "draft_model" and config.model is None:
        config = SpeculativeConfig(config.method, config.options, model=str(zoo.path(model, "draft")))
    drafting = load_llm(bigger, config, tokenizer=model, **{**options, "dtype": "auto", "gguf_file": None})
    return _both(drafting), LABEL.format(size=sum(weight.numel() for weight in bigger.parameters()) / 1e6)


def _both(drafting: LLM) -> tuple[LLM, LLM]:
    return drafting.with_speculative_config(None), drafting


def _answers(console: Console, llms: tuple[LLM, LLM], asked: list[Asked], params: SamplingParams) -> tuple[Answer, ...]:
    """Every question in turn; on a terminal one sees it happen."""
    from foretoken.cli.comparison import race
    from foretoken.cli.demo_screen import watching

    answers = []
    for number, one in enumerate(asked, 1):
        if console.is_terminal:
            with watching(console, number, len(asked)) as watch:
                answers.append(race(llms, str(one.given), one.prompt, params, watch))
        else:
            answers.append(race(llms, str(one.given), one.prompt, params))
    return tuple(answers)


def _report(llms: tuple[LLM, LLM], label: str, params: SamplingParams, answers: tuple[Answer, ...]) -> Report:
    import torch

    from foretoken.bench.provenance import cpu_name
    from foretoken.cli.comparison import Report, promise_of

    drafting = llms[1]
    return Report(
        model=label,
        method=drafting.speculative_config.title,
        num_speculative_tokens=drafting.speculative_config.num_speculative_tokens,
        dtype=drafting.model_info.dtype,
        execution=drafting.model_info.execution,
        exactness=drafting.engine_config.exactness,
        promise=promise_of(drafting),
        num_threads=torch.get_num_threads(),
        cpu=cpu_name(),
        params=params,
        answers=answers,
    )
