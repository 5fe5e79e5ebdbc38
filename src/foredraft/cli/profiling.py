"""Measurement of ``foredraft tune profile``: options, and its result as data and as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli.options import numbers
from foredraft.cli.prompts import NumPrompts, TuneOptions
from foredraft.cli.running import choose_model, load_llm, show_loading
from foredraft.engine.profiles import Profile

if TYPE_CHECKING:
    from foredraft.engine.drafter import Drafter

_LONGEST = 15


@dataclass(frozen=True)
class ProfileOptions(TuneOptions):
    """Options of the measurement."""

    method: Annotated[str, typer.Option(metavar="NAME", help="Method with a draft length: ngram, draft_model, ...")] = (
        "ngram"
    )
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="Settings of the method, instead of --method.")
    ] = None
    num_prompts: NumPrompts = 12
    batch_sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Batch sizes.")] = "1,8"
    contexts: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens in the cache.")] = "256,1024"
    repeats: Annotated[int, typer.Option(help="Timings per step; the shortest counts.", min=1)] = 5
    check: Annotated[bool, typer.Option("--check", help="Check the best length by decoding.")] = False


def find_profile(options: ProfileOptions, say: Callable[[str], None]) -> tuple[Profile, dict[str, Any]]:
    """Measure; return the profile and details for the report. Ctrl-C ends the decoding once steps are timed.

    Raises: ConfigError, CheckpointError, PromptError, UnsupportedModelError.
    """
    model = choose_model(options.model)
    show_loading(model)
    from foredraft.bench.provenance import provenance
    from foredraft.config.speculative import SpeculativeConfig
    from foredraft.errors import ConfigError
    from foredraft.tune import profile as profiles
    from foredraft.tune.objective import beside_plain

    config = SpeculativeConfig.parse(options.speculative_config or options.method)
    if "num_speculative_tokens" not in config.definition.keys or config.definition.combines:
        raise ConfigError(f"method {config.title!r} has no draft length; give one that has, such as ngram")
    batch_sizes, contexts = (
        _counts(name, text) for name, text in (("batch-sizes", options.batch_sizes), ("contexts", options.contexts))
    )
    fixed = {**config.as_dict(), "length_policy": "fixed"}  # only the method itself may then end a draft earlier
    llm = load_llm(model, SpeculativeConfig(**fixed), **options.loading())
    prompts = options.read_prompts(model, llm.tokenizer)
    longest = max(1, min(config.num_speculative_tokens, _LONGEST))

    def new_drafter(length: int) -> Drafter:
        wanted = SpeculativeConfig(**{**fixed, "num_speculative_tokens": length})
        return llm.with_speculative_config(wanted).drafting.new_drafter()

    interrupted = Event()
    found, share = profiles.measure(
        llm.target,
        config.method,
        new_drafter,
        longest,
        prompts,
        max_new_tokens=options.max_new_tokens,
        batch_sizes=batch_sizes,
        contexts=contexts,
        repeats=options.repeats,
        say=say,
        interrupted=interrupted,
    )
    details: dict[str, Any] = {
        "found_by": "foredraft tune profile",
        "is_interrupted": interrupted.is_set(),
        "share_of_steps": share,
    }
    if options.check and not interrupted.is_set():
        best = profiles.nearest_setting(found.settings, prompts, options.max_new_tokens)
        if best is None or best.num_speculative_tokens == 0:
            raise ConfigError(
                "there is nothing to check: plain decoding is expected to be the fastest for one sequence"
            )
        say("checking by decoding")
        drafter = new_drafter(best.num_speculative_tokens)
        trial = beside_plain(llm.target, {"drafting": drafter}, prompts, options.max_new_tokens, 1)
        speed, low, high = profiles.measured_speed(trial)
        details["check"] = {"expected": best.speedup, "measured": speed, "low": low, "high": high}
    conditions = provenance()
    details["measured"] = {name: conditions[name] for name in ("time", "commit") if name in conditions}
    return found, details


def _counts(option: str, text: str) -> list[int]:
    """Positive whole numbers of an option, sorted.

    Raises: ConfigError that contains the option.
    """
    from foredraft.errors import ConfigError

    found = sorted(set(numbers(option, text, int)))
    if not found or found[0] < 1:
        raise ConfigError(f"--{option} is {text!r}; give whole numbers of 1 or more separated by commas, such as 1,8")
    return found


def show_profile(found: Profile, details: dict[str, Any], out: Path | None) -> None:
    """Print the profile."""
    console = Console(highlight=False)
    if details["is_interrupted"]:
        console.print("interrupted: the profile uses the text so far")
    rates = ", ".join(f"{rate:.2f}" for rate in found.acceptance[:8])
    console.print(f"{found.method}: {details['share_of_steps']:.0%} of the steps had a draft")
    console.print(f"acceptance rate by position: {rates}")
    table = Table()
    for column in ("rows", "context", "T(5)/T(1)", "best length", "expected speed"):
        table.add_column(column, justify="right")
    for curve, setting in zip(found.curves, found.settings, strict=True):
        table.add_row(
            str(curve.num_rows),
            str(curve.context),
            f"{curve.seconds[5] / curve.seconds[1]:.2f}",
            str(setting.num_speculative_tokens),
            f"{setting.speedup:.2f} ({setting.low:.2f}-{setting.high:.2f})",
        )
    console.print(table)
    if "check" in details:
        check = details["check"]
        console.print(
            f"measured for one sequence: {check['measured']:.2f}x plain ({check['low']:.2f}-{check['high']:.2f})"
            f"; expected: {check['expected']:.2f}x"
        )
    if out is not None:
        console.print(f"written to {out}; use it with --profile-file {out}", soft_wrap=True)
