"""``foredraft demo``: plain and speculative decoding of the same questions. Texts are compared before the speed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from foredraft.cli.help import OUTPUT, SAMPLING
from foredraft.cli.options import AsJson, DraftingOptions, LoadingOptions, ModelChoice, SamplingOptions, takes_groups
from foredraft.cli.prompts import Asked, Raw, ask, check_text
from foredraft.cli.running import EXIT_DIFFERS, EXIT_INTERRUPTED, exit_codes, load_llm, put_json, say, show_loading
from foredraft.config.sampling import SamplingParams
from foredraft.ending import finishing

if TYPE_CHECKING:
    from foredraft.cli.comparison import BothAnswers
    from foredraft.llm import LLM

MAX_QUESTIONS = 8
WARM_UP_TOKENS = 24


@takes_groups
def demo(
    *,
    questions: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUESTION]...", help="Questions to ask instead of the built-in questions."),
    ] = None,
    model: ModelChoice,
    drafting: DraftingOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Limit on tokens per answer.", min=2)] = 128,
    sampling: Annotated[SamplingOptions, "temperature"],
    seed: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Seed of sampling, for both.")] = 0,
    num_prompts: Annotated[
        int,
        typer.Option(help="Number of built-in questions to ask.", min=1, max=MAX_QUESTIONS),
    ] = MAX_QUESTIONS,
    raw: Raw = False,
    loading: LoadingOptions,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", rich_help_panel=OUTPUT, help="Draw one question and the table.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer questions with and without drafting, side by side, and compare texts and speed.

    Plain and speculative decoding take turns, so both have had the same time at every moment. Speed is all tokens
    divided by all seconds. The exit code is 3 if a text differs.

    Examples:
      foredraft demo
      foredraft demo "Write a haiku about the sea." --model path/to/model
    """
    console = Console(stderr=as_json, highlight=False)
    with exit_codes():
        for place, question in enumerate(questions or ()):
            check_text(question, place, raw=raw)
        name = model.chosen()
        show_loading(name)
        from foredraft.cli import demo_screen
        from foredraft.cli.comparison import TOY, WARM_UP, DemoReport, questions_for

        if svg is not None:
            demo_screen.check_picture(svg)
        config = drafting.config(loading.profile_file)
        params = sampling.params(max_tokens=max_new_tokens, seed=seed)
        own = questions_for(name)
        llm = load_llm(name, config, gguf_file=model.gguf_file, **vars(loading))
        params = params.filled(llm.sampling_defaults)
        label = f"{llm.model_info.name}, {llm.model_info.num_parameters / 1e6:.1f} M parameters"
        llms = (llm.with_speculative_config(None), llm)
        asked = ask(llms[0].tokenizer, name, questions or own[:num_prompts], chat=name == TOY and not raw, raw=raw)
        warm_up = ask(llms[0].tokenizer, name, [WARM_UP], chat=name == TOY and not raw, raw=raw)[0].prompt
        with console.status("warming up"):
            for either in llms:
                either.generate(warm_up, replace(params, max_tokens=WARM_UP_TOKENS), use_tqdm=False)
        answers = _answers(console, llms, asked, params)
        report = DemoReport(label, llm, params, answers)
        is_interrupted = len(answers) < len(asked)
        with finishing() if is_interrupted else nullcontext():
            if as_json:
                put_json(report.as_dict())
            else:
                demo_screen.show(console, report)
        if not report.is_identical:
            if svg is not None:
                say(f"{svg} was not drawn, because the texts differ")
            raise typer.Exit(EXIT_DIFFERS)
        if is_interrupted:
            say(f"interrupted after {len(answers)} of {len(asked)} questions")
            raise typer.Exit(EXIT_INTERRUPTED)
        if svg is not None:
            demo_screen.picture(report, svg)


def _answers(
    console: Console, llms: tuple[LLM, LLM], asked: list[Asked], params: SamplingParams
) -> tuple[BothAnswers, ...]:
    """Answers of all questions, shown on a terminal while they grow. Ctrl-C keeps the finished part of the answers.

    Raises: KeyboardInterrupt before the first answer.
    """
    from foredraft.cli.comparison import race
    from foredraft.cli.demo_screen import watching

    answers: list[BothAnswers] = []
    try:
        for number, one in enumerate(asked, 1):
            with watching(console, number, len(asked)) if console.is_terminal else nullcontext(lambda _: None) as watch:
                answers.append(race(llms, str(one.given), one.prompt, params, watch))
    except KeyboardInterrupt:
        if not answers:
            raise
    return tuple(answers)
