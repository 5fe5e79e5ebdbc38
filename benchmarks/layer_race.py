"""A searched layer set against hand-picked ones on a deep model: processor time of decoding, all sets in turns.

    python benchmarks/layer_race.py --model zoo:smollm2 --set set.json --prompts question.jsonl --length 4

Every set drafts in every step (no governor), chains that end behind an unsure token (``length_policy`` "acceptance") or
are as long as --length ("fixed"). Prompts run through plain decoding and all sets forwards and backwards; the time
of one processor does not count what other processes take, though their use of caches and bandwidth shows. --singles
adds the sublayers that are best left out alone, together, by the trials of the search.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tau import Question, questions

from foretoken import LLM, SamplingParams
from foretoken.bench.measure import bootstrap_median, no_garbage_collection
from foretoken.bench.provenance import provenance
from foretoken.config.engine import EngineConfig
from foretoken.drafters.none import EmptyDrafter
from foretoken.drafters.parts.layer_set import LayerSet
from foretoken.engine.engine import Engine
from foretoken.engine.stats import SequenceStats

PLAIN, SEARCHED = "plain", "searched"


def hand_picked(num_layers: int) -> dict[str, LayerSet]:
    """What one would leave out without a search."""
    second, last = tuple(range(1, num_layers - 1, 2)), tuple(range(2 * num_layers // 3, num_layers))
    middle = tuple(range(num_layers // 3, 2 * num_layers // 3))
    return {
        "every second layer": LayerSet(second, second, num_layers),
        "attention of every second layer": LayerSet(second, (), num_layers),
        "last third": LayerSet(last, last, num_layers),
        "attention of the middle third": LayerSet(middle, (), num_layers),
        "one attention in the middle": LayerSet((num_layers // 2,), (), num_layers),
    }


def best_singles(trials: Path, num_layers: int, count: int) -> LayerSet:
    """The sublayers that cost least when each is left out alone, together."""
    from foretoken.tune.layer_sets import require_optuna

    optuna: Any = require_optuna()
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(trials)))
    study = optuna.load_study(study_name="layer-skip", storage=storage)
    single = []
    for trial in study.get_trials(deepcopy=False):
        names = [name for name, is_out in trial.params.items() if is_out]
        if len(names) == 1 and trial.value is not None:
            single.append((trial.value, names[0]))
    chosen = [name.split(".") for _, name in sorted(single)[:count]]
    kinds = {kind: tuple(sorted(int(layer) for own, layer in chosen if own == kind)) for kind in ("attention", "mlp")}
    return LayerSet(kinds["attention"], kinds["mlp"], num_layers)


class ProcessorArm:
    """One way to decode, timed by processor seconds from the first emission on."""

    def __init__(self, llm: LLM, config: dict[str, Any] | None) -> None:
        drafter = EmptyDrafter() if config is None else llm.with_speculative_config(config).drafting.new_drafter()
        self._engine = Engine(llm.target, drafter, EngineConfig(max_num_seqs=1))
        self.stats = SequenceStats()
        self.outputs: list[list[int]] = []

    def run(self, question: Question, max_new_tokens: int) -> float:
        """Seconds per token."""
        params = SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True)
        (row,) = self._engine.add_request(question.token_ids, params)
        while row.num_output_tokens == 0:
            self._engine.step()
        before, start = row.num_output_tokens, time.process_time()
        while not row.is_finished:
            self._engine.step()
        seconds = time.process_time() - start
        self.stats.add(row.stats)
        self.outputs.append(list(row.output_ids))
        return seconds / max(1, row.num_output_tokens - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--execution", default="packed")
    parser.add_argument("--set", type=Path, required=True, help="of foretoken tune layer-skip")
    parser.add_argument("--singles", type=Path, help="trials of the search")
    parser.add_argument("--num-singles", type=int, default=4)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--per-kind", type=int, default=1)
    parser.add_argument("--max-prompt-tokens", type=int, default=400)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--policy", default="acceptance", choices=("acceptance", "fixed"))
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, dtype=options.dtype, execution=options.execution)
    asked = questions(llm, options)
    num_layers = llm.target.num_layers
    sets = {SEARCHED: LayerSet.load(options.set), **hand_picked(num_layers)}
    if options.singles is not None:
        sets["best single ones together"] = best_singles(options.singles, num_layers, options.num_singles)
    arms = {PLAIN: ProcessorArm(llm, None)}
    for name, one in sets.items():
        config = {"method": "layer_skip", "skipped_attention": list(one.attention), "skipped_mlp": list(one.mlp)}
        given = {"length_policy": options.policy, "num_speculative_tokens": options.length}
        arms[name] = ProcessorArm(llm, {**config, **given})
    times: dict[str, list[list[float]]] = {name: [] for name in arms}
    for arm in arms.values():
        arm.run(asked[0], 4)
        arm.stats, arm.outputs = SequenceStats(), []
    for place, question in enumerate(asked):
        for found in times.values():
            found.append([])
        for name in [*arms, *reversed(arms)]:
            with no_garbage_collection():
                times[name][place].append(arms[name].run(question, options.max_new_tokens))
        report(times, arms, sets, options.out)
    print(f"{len(asked)} prompts: {dict(Counter(one.kind for one in asked))}", flush=True)


def report(
    times: dict[str, list[list[float]]], arms: dict[str, ProcessorArm], sets: dict[str, LayerSet], out: Path | None
) -> None:
    """The table so far: speeds by plain decoding's, and the searched set's by those of others."""
    medians = {name: [statistics.median(runs) for runs in found] for name, found in times.items()}
    rows = []
    for name, one in sets.items():
        over_plain = [p / own for p, own in zip(medians[PLAIN], medians[name], strict=True)]
        gain = [own / s for s, own in zip(medians[SEARCHED], medians[name], strict=True)]
        rows.append(
            {
                "set": name, "attention": one.attention, "mlp": one.mlp,
                "accepted": round(arms[name].stats.draft_acceptance_rate, 3),
                "tokens_per_step": round(arms[name].stats.tokens_per_step, 2),
                "over_plain": round(statistics.median(over_plain), 3), "interval": bootstrap_median(over_plain),
                "searched_over_this": round(statistics.median(gain), 3), "searched_interval": bootstrap_median(gain),
            }
        )  # fmt: skip
    print(f"\n{len(medians[PLAIN])} prompts, plain {statistics.median(medians[PLAIN]) * 1000:.1f} ms per token")
    for row in rows:
        print(json.dumps(row), flush=True)
    if out is not None:
        out.write_text(json.dumps({"rows": rows, "times": times, "conditions": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
