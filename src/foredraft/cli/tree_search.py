"""Search of ``foredraft tune tree``: options, and its result as data and as text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from foredraft.cli.prompts import TuneOptions
from foredraft.cli.running import choose_model, load_llm, show_loading

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.methods.rank_tree import RankTree

_SHOWN_RANKS = 5


@dataclass(frozen=True)
class TreeOptions(TuneOptions):
    """Options of the search for a tree."""

    heads: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder or hub id of Medusa or Hydra heads."),
    ] = None
    speculative_config: Annotated[
        str | None, typer.Option(metavar="JSON|@FILE", help="Settings of medusa, hydra or eagle, instead of --heads.")
    ] = None
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0
    nodes: Annotated[
        int | None, typer.Option(help="Nodes of the tree with its root. Default: the fastest number.", min=2)
    ] = None
    max_nodes: Annotated[int, typer.Option(help="Limit on nodes to consider, root included.", min=2)] = 64
    repeats: Annotated[int, typer.Option(help="Timings per size; the shortest counts.", min=1)] = 9
    seed: Annotated[int, typer.Option(help="Seed of sampling.", min=0)] = 0


def find_tree(options: TreeOptions) -> tuple[RankTree, dict[str, Any]]:
    """Measure accuracies and step times; return the best tree and a report.

    Ctrl-C ends the decoding; steps are then timed once.

    Raises: ConfigError, CheckpointError, PromptError, UnsupportedModelError.
    """
    model = choose_model(options.model)
    show_loading(model)
    from foredraft.bench.provenance import conditions
    from foredraft.config.sampling import SamplingParams
    from foredraft.drafters.heads.eagle import EagleDrafter
    from foredraft.errors import ConfigError
    from foredraft.tune.trees import measured_costs, measured_hits, search, watched_hits

    llm = _loaded(model, options)
    drafter = _drafter(llm)
    prompts = [prompt.token_ids for prompt in options.read_prompts(model, llm.tokenizer)]
    params = SamplingParams(
        temperature=options.temperature, max_tokens=options.max_new_tokens, ignore_eos=True, seed=options.seed
    )
    interrupted = Event()
    try:
        if isinstance(drafter, EagleDrafter):
            depth = llm.speculative_config.num_speculative_tokens
            hits = watched_hits(llm.target, drafter, prompts, params, depth, interrupted)
        else:
            hits = measured_hits(llm.target, drafter, prompts, params, interrupted)
    except ConfigError:
        if interrupted.is_set():  # before the first result
            raise KeyboardInterrupt from None
        raise
    longest, repeats = max(prompts, key=len), 1 if interrupted.is_set() else options.repeats
    best, sizes = search(
        hits,
        options.max_nodes,
        lambda tree: measured_costs(llm.target, drafter, tree, longest, repeats),
        options.nodes,
    )
    details = {
        "found_by": "foredraft tune tree",
        "is_interrupted": interrupted.is_set(),
        "method": llm.speculative_config.method,
        "num_nodes": best.num_nodes,
        "tokens_per_step": best.tokens_per_step,
        "tokens_per_step_if_independent": best.tree.value(hits.accuracies),
        "step_cost": best.cost,
        "speedup": best.speedup,
        "accuracies": hits.accuracies,
        "num_places": len(hits.ranks),
        "sizes": [[one.num_nodes, one.tokens_per_step, one.cost] for one in sizes],
        "search": {
            key: getattr(options, key)
            for key in ("prompts", "num_prompts", "max_new_tokens", "temperature", "nodes", "max_nodes", "seed")
        },
        "conditions": conditions(),
    }
    return best.tree, details


def _loaded(model: str, options: TreeOptions) -> LLM:
    """Load the target with its heads."""
    from foredraft.config.speculative import SpeculativeConfig
    from foredraft.errors import ConfigError

    if (options.heads is None) == (options.speculative_config is None):
        raise ConfigError("give the heads with either --heads or --speculative-config")
    config = SpeculativeConfig.parse(
        {"model": options.heads} if options.speculative_config is None else options.speculative_config
    )
    return load_llm(model, config, **options.loading())


def _drafter(llm: LLM) -> Any:
    """Drafter with heads and a static tree.

    Raises: ConfigError for any other method.
    """
    from foredraft.drafters.heads.eagle import EagleDrafter
    from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
    from foredraft.errors import ConfigError

    drafter = llm.drafting.new_drafter()
    if not isinstance(drafter, (MultiHeadDrafter, EagleDrafter)):
        method = llm.speculative_config.method
        raise ConfigError(f"the search supports the static trees of medusa, hydra and eagle, not {method!r}")
    return drafter


def show_tree(details: dict[str, Any], out: Path | None) -> None:
    """Print a report."""
    console = Console(highlight=False)
    if details["is_interrupted"]:
        console.print("interrupted: the result uses the text so far and single timings")
    accuracies = Table(title=f"accuracy of candidates by rank, at {details['num_places']} positions")
    accuracies.add_column("head")
    for rank in range(_SHOWN_RANKS):
        accuracies.add_column(f"rank {rank}", justify="right")
    for depth, shares in enumerate(details["accuracies"]):
        accuracies.add_row(str(depth), *(f"{share:.3f}" for share in shares[:_SHOWN_RANKS]))
    console.print(accuracies)
    sizes = Table(title="tokens per step and cost of a tree of n nodes, relative to a plain step")
    for column in ("n", "tokens per step", "cost", "x plain"):
        sizes.add_column(column, justify="right")
    shown = {2, 4, 8, 12, 16, 24, 32, 48, 64, details["num_nodes"]}
    for nodes, tokens, cost in details["sizes"]:
        if nodes in shown:
            mark = " <" if nodes == details["num_nodes"] else ""
            sizes.add_row(str(nodes), f"{tokens:.2f}", f"{cost:.2f}", f"{tokens / cost:.2f}{mark}")
    console.print(sizes)
    if details["speedup"] < 1:
        console.print("none of these trees is faster than plain decoding")
    if out is not None:
        console.print(
            f"written to {out}; use it with --speculative-config "
            f'\'{{"method": "{details["method"]}", "model": ..., "speculative_token_tree": "{out}"}}\'',
            markup=False,
            soft_wrap=True,
        )
