"""``foretoken demo``: plain beside speculative decoding; first the same text, then the speed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from foretoken.cli_generate import DRAFTED_STYLE
from foretoken.cli_options import (
    DEFAULT_MODEL,
    DEFAULTS,
    EXIT_DIFFERS,
    AsJson,
    Device,
    DraftModel,
    Dtype,
    Execution,
    Method,
    Model,
    NumSpeculativeTokens,
    SpeculativeOption,
    Temperature,
    exit_codes,
    load_llm,
    sampling,
    speculative,
)

if TYPE_CHECKING:
    from foretoken.llm import LLM
    from foretoken.params import SamplingParams, SpeculativeConfig

QUESTIONS = (
    "Tell me a story about a lion and a mouse.",
    "Tom has 5 apples and buys 7 more. How many apples does he have?",
    "What is your favorite movie?",
    "How do I list all files in a directory?",
    "Which countries border France?",
    "Tell me a story about a girl who finds a seed.",
)
INFLATED = {"hidden_size": 1024, "intermediate_size": 4096}
LABEL = (
    "zoo:tiny's target, inflated in width to {size:.1f} M parameters: "
    "it computes the same function at the cost of a bigger model"
)


@dataclass
class Arm:
    """One way of decoding, and what it did."""

    title: str
    llm: LLM
    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)


def demo(
    model: Model = DEFAULT_MODEL,
    draft_model: DraftModel = None,
    method: Method = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    speculative_config: SpeculativeOption = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", min=2)] = 96,
    temperature: Temperature = DEFAULTS.temperature,
    seed: Annotated[int, typer.Option(help="Both ways use the same one.")] = 0,
    num_prompts: Annotated[int, typer.Option(help="How many of the questions.", min=1, max=len(QUESTIONS))] = 4,
    inflate: Annotated[
        bool, typer.Option(help="Give zoo:tiny the cost of a 98.6 M model. It is too small to gain anything as it is.")
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    execution: Execution = "auto",
    as_json: AsJson = False,
) -> None:
    """Decode the same prompts plainly and speculatively; check that the texts are equal, then compare the speed."""
    with exit_codes():
        config = speculative(model, speculative_config, method, draft_model, num_speculative_tokens)
        params = sampling(max_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        target, label = _target(model, dtype, device) if inflate and model == DEFAULT_MODEL else (model, model)
        options = {"dtype": dtype if isinstance(target, str) else "auto", "device": device, "execution": execution}
        arms = _arms(target, config, model, options)
        prompts = [_prompt(arms[0].llm, question) for question in QUESTIONS[:num_prompts]]
        console = Console(stderr=as_json, highlight=False)
        if console.is_terminal:
            _watch(console, arms, prompts[0], params)
        measure(arms, prompts, params)
        report = summarise(arms, prompts, label, config, params)
        if as_json:
            sys.stdout.write(json.dumps(report) + "\n")
        else:
            show(console, report, arms)
        if report["num_identical"] < report["num_prompts"]:
            raise typer.Exit(EXIT_DIFFERS)


def _target(model: str, dtype: str, device: str) -> tuple[Any, str]:
    """The zoo's target at the cost of a bigger model, and what to call it."""
    from foretoken.inflate import inflate
    from foretoken.loading import load_model

    small = load_model(model, dtype=dtype, device=device).model
    bigger = inflate(small, **INFLATED)
    size = sum(weight.numel() for weight in bigger.parameters()) / 1e6
    return bigger, LABEL.format(size=size)


def _arms(target: Any, config: SpeculativeConfig, model: str, options: dict[str, Any]) -> tuple[Arm, Arm]:
    """Plain and speculative decoding of the same target."""
    if not isinstance(target, str):
        from foretoken import zoo

        options["tokenizer"] = model
        if config.method == "draft_model" and config.model is None:
            config = replace(config, model=str(zoo.path(model, "draft")))
    plain = load_llm(target, None, **options)
    return Arm("plain", plain), Arm(str(config.method), plain.with_speculative_config(config))


def _prompt(llm: LLM, question: str) -> Any:
    if llm.tokenizer is not None and llm.tokenizer.chat_template:
        return llm.chat_prompt([{"role": "user", "content": question}])
    return question


def _watch(console: Console, arms: tuple[Arm, Arm], prompt: Any, params: SamplingParams) -> None:
    """Show both ways at work, one after the other, side by side."""
    texts = [Text(), Text()]
    titles = [arm.title for arm in arms]
    with Live(console=console, refresh_per_second=20) as live:
        for place, arm in enumerate(arms):
            with arm.llm.stream(prompt, params) as stream:
                for delta in stream:
                    for piece, source in delta.segments:
                        texts[place].append(piece, "" if source == "target" else DRAFTED_STYLE)
                    live.update(_panels(console, titles, texts))
                metrics = stream.output(0).metrics
            titles[place] = f"{arm.title}: {metrics.decode_seconds:.2f} s"
            live.update(_panels(console, titles, texts))


def _panels(console: Console, titles: list[str], texts: list[Text]) -> Columns:
    width = max(20, console.width // 2 - 1)
    return Columns([Panel(text, title=title, width=width) for title, text in zip(titles, texts, strict=True)])


def measure(arms: tuple[Arm, Arm], prompts: list[Any], params: SamplingParams) -> None:
    """Decode every prompt both ways, in the order A B B A, after a warm-up of both."""
    for arm in arms:
        arm.llm.generate(prompts[0], params, use_tqdm=False)
    for place, prompt in enumerate(prompts):
        for arm in (*arms, *reversed(arms)):
            output = arm.llm.generate(prompt, params, use_tqdm=False)[0]
            arm.token_ids[place] = output.outputs[0].token_ids
            arm.rates.setdefault(place, []).append(output.metrics.tokens_per_second)
            for key in ("num_accepted_draft_tokens", "num_spec_steps", "num_steps"):
                arm.stats[key] = arm.stats.get(key, 0) + output.metrics.speculative_decoding[key]
            arm.stats["num_tokens"] = arm.stats.get("num_tokens", 0) + len(output.outputs[0].token_ids)


def summarise(
    arms: tuple[Arm, Arm], prompts: list[Any], label: str, config: SpeculativeConfig, params: SamplingParams
) -> dict[str, Any]:
    """The outcome as plain data. A ratio is there only when all texts are equal."""
    plain, drafting = arms
    places = range(len(prompts))
    identical = sum(plain.token_ids[place] == drafting.token_ids[place] for place in places)
    steps, spec_steps = drafting.stats["num_steps"], drafting.stats["num_spec_steps"]
    accepted = drafting.stats["num_accepted_draft_tokens"]
    report: dict[str, Any] = {
        "model": label,
        "method": config.method,
        "num_speculative_tokens": config.num_speculative_tokens,
        "dtype": plain.llm.model_info.dtype,
        "execution": plain.llm.model_info.execution,
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
        "num_prompts": len(prompts),
        "num_identical": identical,
        "mean_acceptance_length": 1 + accepted / spec_steps if spec_steps else 1.0,
        "tokens_per_step": drafting.stats["num_tokens"] / steps if steps else 0.0,
        "speedup": None,
    }
    if identical == len(prompts):
        ratios = [median(drafting.rates[place]) / median(plain.rates[place]) for place in places]
        report["speedup"] = {"median": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        for arm in arms:
            report[f"{arm.title}_tokens_per_second"] = median(median(arm.rates[place]) for place in places)
    return report


def show(console: Console, report: dict[str, Any], arms: tuple[Arm, Arm]) -> None:
    """The outcome for people."""
    console.print(f"model: {report['model']}")
    console.print(f"{report['dtype']}, {report['execution']}, {report['max_new_tokens']} tokens per prompt")
    for place in arms[0].token_ids if not console.is_terminal else ():
        console.print(Panel(_text(arms[0], place), title=QUESTIONS[place]))
    if report["speedup"] is None:
        console.print(
            f"[red]{report['num_prompts'] - report['num_identical']} of {report['num_prompts']} texts differ between "
            f"plain and {arms[1].title}[/red]; no speed is given. In half precision near-ties may fall differently: "
            "try --dtype float32"
        )
        return
    speedup = report["speedup"]
    console.print(f"texts: {report['num_identical']} of {report['num_prompts']} identical, token for token")
    for arm in arms:
        console.print(f"{arm.title}: {report[arm.title + '_tokens_per_second']:.1f} tokens/s")
    console.print(
        f"speed: {speedup['median']:.2f}x plain (median of {report['num_prompts']} prompts, {speedup['lowest']:.2f} to "
        f"{speedup['highest']:.2f}, measured in turns); mean acceptance length "
        f"{report['mean_acceptance_length']:.2f}, tokens per step {report['tokens_per_step']:.2f}"
    )


def _text(arm: Arm, place: int) -> Text:
    tokenizer = arm.llm.tokenizer
    ids = arm.token_ids[place]
    return Text(str(tokenizer.decode(ids)) if tokenizer is not None else str(ids))
