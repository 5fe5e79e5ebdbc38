"""The measurement behind ``foredraft tune profile``: its options, and what it found, as data and for people."""

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
from foredraft.cli.running import choose_model, load_llm
from foredraft.engine.profiles import Profile

if TYPE_CHECKING:
    from foredraft.engine.drafter import Drafter

_LONGEST = 15


@dataclass(frozen=True)
class ProfileOptions(TuneOptions):
    """Options of the measurement."""

    method: Annotated[
        str, typer.Option(help="One that drafts chains of a length to choose: ngram, draft_model, ...")
    ] = "ngram"
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="Keys of the method, instead of --method.")
    ] = None
    num_prompts: NumPrompts = 12
    batch_sizes: Annotated[str, typer.Option(help="Numbers of rows, by comma.")] = "1,8"
    contexts: Annotated[str, typer.Option(help="Tokens before the draft, by comma.")] = "256,1024"
    repeats: Annotated[int, typer.Option(help="Timings of every step; the shortest counts.", min=1)] = 5
    check: Annotated[
        bool, typer.Option("--check", help="Decode the prompts with the best length of one row, and compare.")
    ] = False


def find_profile(options: ProfileOptions, say: Callable[[str], None]) -> tuple[Profile, dict[str, Any]]:
    """Measure; the profile, and what is to be known about it. Ctrl-C ends the texts, once steps are timed.

    Raises: ConfigError, CheckpointError, PromptError, UnsupportedModelError.
    """
    from foredraft.bench.provenance import provenance
    from foredraft.config.speculative import SpeculativeConfig
    from foredraft.errors import ConfigError
    from foredraft.tune import profile as profiles
    from foredraft.tune.objective import beside_plain

    model = choose_model(options.model)
    config = SpeculativeConfig.parse(options.speculative_config or options.method)
    if "num_speculative_tokens" not in config.definition.keys or config.definition.combines:
        raise ConfigError(f"method {config.title!r} has no length to choose; name one that has, such as ngram")
    batch_sizes, contexts = (
        _counts(name, text) for name, text in (("batch-sizes", options.batch_sizes), ("contexts", options.contexts))
    )
    fixed = {**config.as_dict(), "length_policy": "fixed"}  # which nothing but the method itself cuts
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
            raise ConfigError("there is nothing to check: plain decoding is expected to be best at one row")
        say("checking by decoding")
        drafter = new_drafter(best.num_speculative_tokens)
        trial = beside_plain(llm.target, {"drafting": drafter}, prompts, options.max_new_tokens, 1)
        speed, low, high = profiles.measured_speed(trial)
        details["check"] = {"expected": best.speedup, "measured": speed, "low": low, "high": high}
    conditions = provenance()
    details["measured"] = {name: conditions[name] for name in ("time", "commit") if name in conditions}
    return found, details


def _counts(option: str, text: str) -> list[int]:
    """Raises: ConfigError, naming the option."""
    from foredraft.errors import ConfigError

    found = sorted(set(numbers(option, text, int)))
    if not found or found[0] < 1:
        raise ConfigError(f"--{option} is {text!r}; give whole numbers of 1 or more by comma, such as 1,8")
    return found


def show_profile(found: Profile, details: dict[str, Any], out: Path | None) -> None:
    """The profile for people."""
    console = Console(highlight=False)
    if details["is_interrupted"]:
        console.print("interrupted: this is what the texts said by then")
    rates = ", ".join(f"{rate:.2f}" for rate in found.acceptance[:8])
    console.print(f"{found.method}: {details['share_of_steps']:.0%} of the steps had a draft")
    console.print(f"chance of the next drafted token, by depth: {rates}")
    table = Table()
    for column in ("rows", "context", "T(5)/T(1)", "best length", "expected speed by plain"):
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
            f"one row, decoded: {check['measured']:.2f} ({check['low']:.2f}-{check['high']:.2f}) times plain decoding; "
            f"{check['expected']:.2f} were expected"
        )
    if out is not None:
        console.print(f"written to {out}; --profile-file {out} begins with it", soft_wrap=True)
