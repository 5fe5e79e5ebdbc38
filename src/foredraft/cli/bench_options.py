"""The options of ``foredraft bench``, and the settings that they ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from foredraft.cli.options import Target, TargetOptions, numbers
from foredraft.config.written import by_comma

if TYPE_CHECKING:
    from foredraft.bench.methods import MethodsSettings
    from foredraft.bench.parts import Settings
    from foredraft.bench.peers.environments import Arming
    from foredraft.bench.peers.race import RaceSettings

S = TypeVar("S")

PARTS = ("speed", "copying", "sampling", "efficiency", "lookup-efficiency", "batch")
EXTRA_PARTS = ("profile", "drafting", "accepted")
_QUICK: dict[str, Any] = {
    "num_prompts": 1,
    "max_new_tokens": 16,
    "contexts": (64,),
    "draft_costs": (0.0,),
    "batch_size": 2,
    "vocab_sizes": (4096,),
    "profile_contexts": (64,),
    "draft_contexts": (1000,),
    "datastore_sizes": (10_000,),
    "draft_steps": 20,
    "assisted_lengths": (2,),
    "lookup_lengths": (3,),
}
_QUICK_COMPARISON: dict[str, Any] = {"num_prompts": 2, "num_tuning_prompts": 1, "max_new_tokens": 16}


@dataclass(frozen=True)
class BenchOptions(TargetOptions):
    """What is measured, on which models, and where results go."""

    model: Target = None
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...|all",
            help="Instead of the parts: which of these methods suits the model? By comma; a+b and a>b combine, JSON "
            "gives settings, all takes every method that applies.",
        ),
    ] = None
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...|all",
            help="Instead of the parts: a race beside openvino, llamacpp and transformers, each in a process of its "
            "own; with --methods, those of foredraft that take part.",
        ),
    ] = None
    make_peers: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME,...|all", help="Make the environments in which these engines run, and end."),
    ] = None
    peers_folder: Annotated[
        Path | None, typer.Option(help="Of these environments; by default below foredraft's cache folder.")
    ] = None
    quantised: Annotated[
        bool,
        typer.Option(
            "--quantised", help="With --peers: all engines with int8 and 4-bit weights too, which do not count."
        ),
    ] = False
    batch_sizes: Annotated[
        str, typer.Option(help="With --peers: batches of so many rows, by comma, instead of single rows with drafts.")
    ] = ""
    num_tuning_prompts: Annotated[
        int, typer.Option(help="With --peers: further prompts, on which every engine's settings are chosen.", min=1)
    ] = 4
    draft_model: Annotated[str | None, typer.Option(help="The drafter; a zoo model may bring its own.")] = None
    scale: Annotated[
        str | None,
        typer.Option(help="Width to inflate the target to: none, 100m or HIDDENxFFN. By default 100m for a toy."),
    ] = None
    threads: Annotated[int | None, typer.Option(help="Threads; torch's own choice by default.", min=1)] = None
    parts: Annotated[
        str, typer.Option(help=f"Which of {', '.join(PARTS)}, {', '.join(EXTRA_PARTS)}, by comma; see below.")
    ] = ",".join(PARTS)
    contexts: Annotated[str, typer.Option(help="Tokens of context, by comma.")] = "256,1500"
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Prompts: 4 per table; with --methods 9, with --peers 24, of the kinds in turn.",
            min=1,
            show_default=False,
        ),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", min=2)] = 48
    repeats: Annotated[int, typer.Option(help="Rounds of A B B A per prompt.", min=1)] = 1
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Draft tokens of foredraft's own drafters; by default those of their methods.",
            min=1,
        ),
    ] = None
    draft_costs: Annotated[
        str, typer.Option(help="Costs to inflate the drafter to, by comma; 0 is the drafter as it is.")
    ] = "0,0.05,0.15"
    assisted_lengths: Annotated[
        str, typer.Option(help="Numbers of assistant tokens among which transformers' assisted generation is tuned.")
    ] = "1,2,3,4,5,6,8"
    lookup_lengths: Annotated[
        str, typer.Option(help="Numbers of tokens among which transformers' prompt lookup is tuned.")
    ] = "2,3,5,8,10,15"
    batch_size: Annotated[int, typer.Option(help="Rows of the batch.", min=1)] = 8
    stop_at_eos: Annotated[
        bool | None,
        typer.Option(
            "--stop-at-eos/--ignore-eos",
            help="End where the model ends (with --methods, unless the model is a toy), or at the budget (the parts).",
        ),
    ] = None
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help="Spec-Bench's question.jsonl, JSONL with prompt or text, or .txt; by default the built-in prompts."
        ),
    ] = None
    kinds: Annotated[
        str | None,
        typer.Option(help="With --methods or --peers: kinds of prompts, by comma; again is a question asked again."),
    ] = None
    temperature: Annotated[float, typer.Option(help="With --methods: 0 is greedy.", min=0.0)] = 0.0
    top_p: Annotated[float, typer.Option(help="With --methods: 1 is off.", min=0.0, max=1.0)] = 1.0
    exactness: Annotated[
        str, typer.Option(help="With --methods or --peers: default, strict or relaxed, of the runs that are timed.")
    ] = "default"
    save_config: Annotated[
        Path | None,
        typer.Option(help="With --methods: write the recommended config here, for --speculative-config @FILE."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of sampling.", min=0)] = 0
    profile: Annotated[bool, typer.Option("--profile", help=f"Also the parts {', '.join(EXTRA_PARTS)}.")] = False
    draft_contexts: Annotated[
        str, typer.Option(help="Tokens of context at which the host time of drafting is measured.")
    ] = "1000,16000,128000"
    datastore_sizes: Annotated[
        str,
        typer.Option(
            help="Tokens of the datastores that are built for it, such as 1e5,1e7,1e8; of 1e8 tokens the sorting alone "
            "takes 40 seconds and 1 GB of memory."
        ),
    ] = "1e5"
    quick: Annotated[
        bool, typer.Option("--quick", help="Everything once and small, in minutes; no figures to quote.")
    ] = False
    output: Annotated[Path | None, typer.Option(help="Write all results, with their conditions, to this file.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="The same on standard output instead of tables.")] = False

    def chosen_parts(self) -> list[str]:
        """The parts to run, in order.

        Raises: ConfigError for a name that is none of them.
        """
        from foredraft.errors import ConfigError

        chosen = by_comma(self.parts)
        unknown = [part for part in chosen if part not in (*PARTS, *EXTRA_PARTS)]
        if unknown:
            raise ConfigError(f"--parts holds {unknown[0]!r}; choose among {', '.join((*PARTS, *EXTRA_PARTS))}")
        return chosen + [part for part in EXTRA_PARTS if self.profile]

    def settings(self) -> Settings:
        """Of the parts.

        Raises: ConfigError for text that holds no numbers.
        """
        from foredraft.bench.parts import Settings

        given = {"num_draft_tokens": self.num_speculative_tokens, "ignore_eos": not self.stop_at_eos}
        return self._filled(Settings, given, _QUICK)

    def methods_settings(self, *, is_toy: bool) -> MethodsSettings:
        """Of a comparison of methods; a toy goes on at the end of its text unless that is asked for."""
        from foredraft.bench.methods import MethodsSettings
        from foredraft.bench.trial import Sampling

        ignore_eos = is_toy if self.stop_at_eos is None else not self.stop_at_eos
        sampling = Sampling(self.temperature, self.top_p, self.seed, ignore_eos)
        return self._filled(MethodsSettings, {"sampling": sampling}, _QUICK_COMPARISON)

    def race_settings(self, threads: int) -> RaceSettings:
        """Of a race beside other engines.

        Raises: ConfigError for text that holds no numbers.
        """
        from foredraft.bench.peers.race import RaceSettings

        return self._filled(RaceSettings, {"threads": threads}, _QUICK_COMPARISON)

    def arming(self, has_draft: bool) -> Arming:
        """What takes part in a race beside plain decoding. Batches are of plain decoding, unless methods are named.

        Raises: ConfigError for anything that is not a method, or text that holds no numbers.
        """
        from foredraft.bench.candidates import read_candidates
        from foredraft.bench.peers.environments import Arming, default_methods

        names = self.methods or (None if self.batch_sizes else default_methods(has_draft))
        methods = [] if names is None else read_candidates(names, self.draft_model, self.num_speculative_tokens)
        return self._filled(Arming, {"methods": methods}, {})

    def _filled(self, kind: type[S], given: dict[str, Any], quick: dict[str, Any]) -> S:
        """Settings of a kind: its fields from the options of the same names, where these say anything.

        Args:
          given: fields that are no options.
          quick: fields, as far as it has them, where everything is to be quick.
        """
        every: Any = kind  # a dataclass
        names = {field.name for field in fields(every)}
        options = names & {field.name for field in fields(self)} - set(given)
        wanted = {name: getattr(self, name) for name in options}
        for name, read in _READ.items():
            if wanted.get(name) is not None:
                wanted[name] = numbers(name.replace("_", "-"), wanted[name], read)
        if wanted.get("kinds") is not None:
            wanted["kinds"] = tuple(by_comma(wanted["kinds"]))
        wanted |= given | ({name: quick[name] for name in names & quick.keys()} if self.quick else {})
        return kind(**{name: value for name, value in wanted.items() if value is not None})


def _whole(text: str) -> int:
    """``1e5`` is 100000."""
    return int(float(text))


_LISTS = ("contexts", "draft_contexts", "datastore_sizes", "batch_sizes", "assisted_lengths", "lookup_lengths")
_READ: dict[str, Callable[[str], Any]] = {**dict.fromkeys(_LISTS, _whole), "draft_costs": float}
"""How the numbers of options by comma are read."""
