"""Searched against hand-picked layer sets, on zoo:tiny inflated to about 100 M parameters (width only).

    python benchmarks/layer_sets.py costs  --out costs.json            # what forwards cost; quiet machine
    python benchmarks/layer_sets.py search --costs costs.json --out DIR # no clock: acceptance, and these costs
    python benchmarks/layer_sets.py race   --searched DIR --out race.json  # all sets in turns; quiet machine

The inflated model computes what the small one does, so that sets are searched on the small one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from foretoken import zoo
from foretoken.bench.arms import EngineArm, Sampling
from foretoken.bench.measure import Trial, compare, interleave
from foretoken.bench.models import load_pair, scaled
from foretoken.bench.provenance import provenance
from foretoken.bench.workload import Prompt, load_prompts, read_questions, select
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, drafter_factory
from foretoken.drafters.none import EmptyDrafter
from foretoken.drafters.parts.layer_set import LayerSet
from foretoken.engine.drafter import Drafter
from foretoken.model.lm import CausalLM
from foretoken.tune.layer_sets import LayerSearch
from foretoken.tune.objective import Costs, ExpectedTime, Task
from foretoken.tune.space import Space

HAND_PICKED = {
    "by single losses": LayerSet((1, 2), (2,), 6),
    "every other middle attention": LayerSet((1, 3), (), 6),
    "all middle attention": LayerSet((1, 2, 3, 4), (), 6),
    "SWIFT's start": LayerSet((1, 3), (1, 3), 6),
    "middle layer": LayerSet((2,), (2,), 6),
    "early exit at 4": LayerSet.exit_at(4, 6),
}
LENGTHS = (1, 2, 3, 4)


def drafter_of(target: CausalLM, length: int) -> Callable[[LayerSet], Drafter]:
    """Drafts of a fixed length, so that sets are compared, not policies; 0 for the method's own policy and length."""
    keys: dict[str, Any] = {"length_policy": "fixed", "num_speculative_tokens": length} if length else {}

    def make(layer_set: LayerSet) -> Drafter:
        config = SpeculativeConfig(
            method="layer_skip",
            skipped_attention=layer_set.attention,
            skipped_mlp=layer_set.mlp,
            **keys,
        )
        return drafter_factory(config, DrafterContext(target))()

    return make


def prompts_of(tokenizer: Any, first: int, count: int) -> tuple[Prompt, ...]:
    """Built-in prompts; searched on the first ones, raced on the rest."""
    return tuple(load_prompts(tokenizer, select(read_questions(), first + count)[first:]))


def costs(arguments: argparse.Namespace) -> None:
    pair = scaled(load_pair("zoo:tiny", None, "float32"), arguments.scale)
    measured = Costs.measured(CausalLM(pair.target), 8, repeats=15)
    arguments.out.write_text(json.dumps(asdict(measured) | {"conditions": provenance()}, indent=1) + "\n")


def search(arguments: argparse.Namespace) -> None:
    """For every draft length the best set that is not empty."""
    known = json.loads(arguments.costs.read_text())
    known.pop("conditions")
    cost = Costs(**{**known, "verify": tuple(known["verify"])})
    pair = load_pair("zoo:tiny", None, "float32")
    target = CausalLM(pair.target)
    prompts = prompts_of(pair.tokenizer, 0, 16)
    arguments.out.mkdir(exist_ok=True)
    for length in arguments.lengths:
        objective = ExpectedTime(Task(target, prompts, 32, drafter_of(target, length)), cost)
        search = LayerSearch(
            Space.of(target.num_layers), objective, journal=arguments.out / f"k{length}.trials", resume=True
        )
        result = search.run(arguments.trials)
        best = result.best
        details = {
            "found_by": "benchmarks/layer_sets.py search: LayerSearch over ExpectedTime",
            "num_trials": len(result.trials),
            "num_speculative_tokens": length,
            **asdict(best.score),
            "costs": asdict(cost),
            "prompts": "16 built-in, 32 tokens each, greedy",
        }
        replace(best.layer_set, details=details).save(arguments.out / f"k{length}.json")
        print(length, best.layer_set.attention, best.layer_set.mlp, best.score, flush=True)
        for name, one in HAND_PICKED.items():
            print("   ", name, objective.score(one), flush=True)


def race(arguments: argparse.Namespace) -> None:
    """Time every set at one draft length, on prompts that no search saw; the table so far after every prompt.

    Without a searched set of that length in ``--searched``, the one that ships with the package.
    """
    length = arguments.length
    pair = scaled(load_pair("zoo:tiny", None, "float32"), arguments.scale)
    target = CausalLM(pair.target)
    prompts = prompts_of(pair.tokenizer, 16 + arguments.first, arguments.num_prompts)
    make = drafter_of(target, length)
    rivals = {name: HAND_PICKED[name] for name in arguments.rivals}
    found = (arguments.searched or Path()) / f"k{length}.json"
    shipped = zoo.asset("zoo:tiny", "layer_set.json")
    sets = {"searched": LayerSet.load(found if arguments.searched and found.exists() else shipped), **rivals}
    config = EngineConfig(max_num_seqs=1)
    arms = [EngineArm("plain", target, EmptyDrafter(), (), config)]
    arms += [EngineArm(name, target, make(one), (), config) for name, one in sets.items()]

    def note(trial: Trial) -> None:
        rows = race_rows(trial, sets)
        same = all(trial.outputs(name) == trial.outputs("plain") for name in sets)
        result = {"length": length, "num_prompts": len(trial.prompts), "outputs_equal": same}
        result |= {"other_cpu_share": trial.other_cpu_share, "rows": rows, "conditions": provenance()}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{len(trial.prompts)}/{len(prompts)} prompts, K = {length or 'own policy'}, outputs equal: {same}, "
              f"others used {trial.other_cpu_share:.0%}")  # fmt: skip
        print("| set | attention | MLP | accepted | x plain | searched by this |\n" + "|---" * 6 + "|")
        for row in rows:
            print(f"| {row['set']} | {row['attention']} | {row['mlp']} | {row['acceptance_rate']:.2f} | "
                  f"{ratio(row['over_plain'])} | {ratio(row['searched_over_this'])} |", flush=True)  # fmt: skip

    interleave(arms, prompts, Sampling(ignore_eos=True), arguments.max_new_tokens, arguments.repeats, note)


def ratio(found: dict[str, Any]) -> str:
    return f"{found['ratio']:.3f} ({found['low']:.3f}-{found['high']:.3f})"


def race_rows(trial: Trial, sets: dict[str, LayerSet]) -> list[dict[str, Any]]:
    rows = []
    for name, one in sets.items():
        stats = [run.stats for runs in trial.runs[name] for run in runs if run.stats is not None]
        drafted = sum(stat.num_draft_tokens for stat in stats)
        rows.append(
            {
                "set": name,
                "attention": one.attention,
                "mlp": one.mlp,
                "acceptance_rate": sum(stat.num_accepted_draft_tokens for stat in stats) / max(1, drafted),
                "over_plain": asdict(compare(trial, name, "plain")),
                "searched_over_this": asdict(compare(trial, "searched", name)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("costs", "search", "race"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--searched", type=Path)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--length", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rivals", nargs="+", choices=HAND_PICKED, default=list(HAND_PICKED))
    parser.add_argument("--first", type=int, default=0, help="of the prompts that no search saw")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32, help="per prompt of the race")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of A B B A per prompt of the race")
    parser.add_argument("--scale", default="100m", help="none, 100m or HIDDENxFFN")
    arguments = parser.parse_args()
    {"costs": costs, "search": search, "race": race}[arguments.part](arguments)


if __name__ == "__main__":
    main()
