"""Measure how far the governor stays behind the best fixed setting, on recorded outputs and measured costs.

    python benchmarks/governor_regret.py --texts answers.jsonl [--model zoo:smollm2] [--dtype bfloat16]
        [--num-texts 24] [--max-new-tokens 200] [--seeds 3] [--temperature 0.8] [--interval 4] [--out regret.json]
        [--kinds chat rag ...] [--drafters ngram head] [--rows 8 [--closed]] [--curve '{"1": 6.8, "8": 9.0, ...}']
        [--spread 0.05] [--pauses 0.01]

Under the rule "match" outputs do not depend on drafts, so recorded outputs of a model are sufficient. The drafters
draft along them, and the cost of every step is taken from the cost curve of the model on this machine, with 5 % of
noise (``--spread``) and one step in a hundred three times as slow (``--pauses``). So every other setting can be
computed exactly: drafts of 0 to 16 tokens, and trees cut to as many nodes. ``--texts`` are JSON lines with ``kind``,
``prompt`` and ``answer``. One workload changes its nature midway, and one its number of rows. With ``--interval n`` the
governor decides in every n-th step. Regret is 1 minus the speed relative to that of the best setting for the whole
workload. ``--kinds`` replaces the workloads by one for each kind and one of all kinds, shuffled, in batches of
``--rows``. With ``--closed`` no row replaces one that has ended, so a batch takes as long as its last row. Speed is
then relative to plain decoding of the same batches.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from foredraft.bench.provenance import provenance
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.engine import governor as governing
from foredraft.engine.cost_model import CostModel
from foredraft.engine.costs import cost_curve
from foredraft.engine.drafter import Drafter
from foredraft.engine.governor import INTERVAL, Governor
from foredraft.engine.stats import StepSeconds
from foredraft.loading.models import load_model
from foredraft.methods.lookup import SuffixOptions
from foredraft.model.lm import CausalLM
from foredraft.tree import DraftSize
from foredraft.tune.walk import RecordedText, Walk

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 16)
NODES = (2, 3, 4, 6, 8, 12, 16, 24)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGramDrafter,
    "suffix": lambda: SuffixDrafter(SuffixOptions(num_speculative_tokens=24)),
    "head": lambda: SuffixDrafter(SuffixOptions(num_speculative_tokens=8)),
}


class Costs(NamedTuple):
    """Seconds of a drafter: of a row that is drafted for, of a level of all rows, and of a row that it is told of."""

    row: float
    level: float = 0.0
    observing: float = 0.0


DRAFTING_SECONDS = {"ngram": Costs(0.00005), "suffix": Costs(0.0001), "head": Costs(0.0002, 0.0008, 0.0003)}
"""The last drafts what "suffix" does, at the costs of a head beside steps of a model of 135 M on two cores."""


@dataclass(frozen=True)
class Workload:
    """Texts of these kinds, one after the other; batches of these sizes, the first half of the texts by the first."""

    name: str
    drafter: str
    kinds: tuple[str, ...]
    batches: tuple[int, ...] = (1,)


WORKLOADS = (
    Workload("chat", "ngram", ("self",)),
    Workload("maths", "suffix", ("maths",)),
    Workload("commands", "suffix", ("command",)),
    Workload("passages", "ngram", ("passage",)),
    Workload("passages, 8 rows", "ngram", ("passage",), (8,)),
    Workload("chat, 8 rows", "suffix", ("self",), (8,)),
    Workload("chat, then passages", "suffix", ("self", "passage")),
    Workload("commands, 1 row, then 8", "suffix", ("command",), (1, 8)),
)


def workloads_of(kinds: Sequence[str], drafters: Sequence[str], num_rows: int) -> list[Workload]:
    """Each of these kinds, and all of them, by every drafter."""
    groups = [(kind,) for kind in kinds] + [tuple(kinds)] * (len(kinds) > 1)
    between = ", then " if num_rows == 1 else " and "
    return [Workload(between.join(group), drafter, group, (num_rows,)) for drafter in drafters for group in groups]


@dataclass
class Costed:
    """Decodes recorded texts at the costs of a curve."""

    curve: CostModel
    workload: Workload
    target: CausalLM
    texts: Sequence[RecordedText]
    seed: int = 0
    is_closed: bool = False
    spread: float = 0.05
    pauses: float = 0.01
    num_steps: int = 0
    num_resting: int = 0
    spent: float = 0.0
    plain: float = 0.0

    def speed(self, *, governor: Governor | None = None, length: int = 0, max_nodes: int | None = None) -> float:
        """Speed by plain decoding, governed or at a fixed setting."""
        acceptance = None if governor is None else governor.acceptance
        walk = Walk(self.target, DRAFTERS[self.workload.drafter](), self.texts, acceptance)
        noise = random.Random(self.seed)
        batches = self.workload.batches
        while walk.enter(batches[-1 if len(batches) > 1 and walk.num_waiting < len(self.texts) // 2 else 0]):
            lengths = sorted(row.num_remaining_tokens for row in walk.rows)
            if self.is_closed:  # three rows with 1, 1 and 4 tokens to come: a step of three, and three of one
                gaps = zip(lengths, [0, *lengths], strict=False)
                self.plain += sum(
                    (to - since) * self.curve.curve(len(lengths) - i) for i, (to, since) in enumerate(gaps)
                )
            self._step(walk, noise, governor, length, max_nodes)
            while self.is_closed and walk.rows:
                self._step(walk, noise, governor, length, max_nodes)
        return self.plain / self.spent

    def _step(
        self, walk: Walk, noise: random.Random, governor: Governor | None, length: int, max_nodes: int | None
    ) -> None:
        """One step at its costs. A drafter that rests is not told of steps, which costs nothing."""
        rows, num_rows = walk.rows, len(walk.rows)
        costs = DRAFTING_SECONDS[self.workload.drafter]
        sizes = walk.budgets()
        is_resting = governor is not None and not governor.attends(num_rows)
        self.num_resting += is_resting
        self.num_steps += 1
        if governor is None:
            sizes = [DraftSize(min(size, length)) for size in sizes]
        elif is_resting:
            sizes = [DraftSize(0)] * num_rows
        else:
            sizes = governor.plan(rows, sizes, is_closed=self.is_closed)
        trees = walk.propose(sizes)
        if governor is not None and not is_resting:
            trees = governor.select(rows, trees)
        elif max_nodes is not None:
            trees = [tree.restricted(range(min(len(tree), max_nodes))) for tree in trees]
        depth = max(sizes)
        drafting = num_rows * (costs.row * bool(depth) + costs.observing * (not is_resting)) + costs.level * depth
        verifying = self.curve.curve(sum(map(len, trees)))
        self.spent += drafting + verifying
        outputs = walk.emit(trees)
        if not self.is_closed:
            num_tokens = sum(len(output.token_ids) for output in outputs)
            self.plain += self.curve.curve(num_rows) / num_rows * num_tokens
        factor = math.exp(noise.gauss(0.0, self.spread)) * (3.0 if noise.random() < self.pauses else 1.0)
        if governor is not None:
            governor.observe(trees, outputs, StepSeconds(drafting * factor, verifying * factor))


def read(file: Path, tokenizer: Any, options: argparse.Namespace) -> dict[str, list[RecordedText]]:
    """Texts by kind; answers of 50 tokens and more."""
    found: dict[str, list[RecordedText]] = {}
    with lzma.open(file, "rt", encoding="utf8") if file.suffix == ".xz" else file.open(encoding="utf8") as lines:
        for line in lines:
            one = json.loads(line)
            texts = found.setdefault(one.get("kind", "self"), [])
            if len(texts) >= options.num_texts or one.get("temperature", 0) != options.temperature:
                continue
            messages = [{"role": "user", "content": one["prompt"]}]
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            answer = tokenizer(one["answer"], add_special_tokens=False)["input_ids"][: options.max_new_tokens]
            if len(answer) >= 50:
                ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
                params = SamplingParams(temperature=options.temperature, max_tokens=len(answer), seed=0)
                texts.append(RecordedText(one.get("kind", "self"), tuple(ids), tuple(answer), params))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--model", default="zoo:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-texts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature of the recorded outputs")
    parser.add_argument("--interval", type=int, default=INTERVAL, help="steps from one decision to the next")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", help="kinds of recorded outputs to use instead of the built-in workloads")
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch, with --kinds")
    parser.add_argument("--closed", action="store_true", help="do not refill a batch when rows end")
    parser.add_argument(
        "--curve", type=json.loads, help="milliseconds by number of nodes; by default those of this machine"
    )
    parser.add_argument(
        "--drafters", nargs="+", choices=DRAFTERS, default=["ngram", "suffix"], help="drafters, with --kinds"
    )
    parser.add_argument("--spread", type=float, default=0.05, help="standard deviation of the logarithm of step times")
    parser.add_argument("--pauses", type=float, default=0.01, help="share of the steps that take three times as long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    governing.INTERVAL = options.interval
    loaded = load_model(options.model, dtype=options.dtype)
    target = CausalLM(loaded.model)
    curve = options.curve and {int(nodes): taken / 1e3 for nodes, taken in options.curve.items()}
    seconds = curve or cost_curve(target).seconds
    print("ms by nodes:", {nodes: round(1e3 * taken, 1) for nodes, taken in seconds.items()})
    texts = read(options.texts, loaded.tokenizer, options)
    results = []
    print(
        "\n| workload | drafter | best setting | speed | governed | regret | resting | default setting |\n|"
        + "---|" * 8
    )
    for workload in workloads_of(options.kinds, options.drafters, options.rows) if options.kinds else WORKLOADS:
        chosen = [text for kind in workload.kinds for text in texts[kind]]
        if options.rows > 1:
            random.Random(0).shuffle(chosen)

        def walk(seed: int = 0, workload: Workload = workload, chosen: list[RecordedText] = chosen) -> Costed:
            return Costed(
                CostModel(seconds),
                workload,
                target,
                chosen,
                seed,
                is_closed=options.closed,
                spread=options.spread,
                pauses=options.pauses,
            )

        fixed = {f"K = {length}": walk().speed(length=length) for length in LENGTHS}
        if workload.drafter != "ngram":
            fixed |= {f"{nodes} nodes": walk().speed(length=24, max_nodes=nodes) for nodes in NODES}
        best = max(fixed, key=fixed.__getitem__)
        walks = [walk(seed) for seed in range(options.seeds)]
        facts = DRAFTERS[workload.drafter]().facts
        governed = [one.speed(governor=Governor(CostModel(seconds), facts)) for one in walks]
        resting = sum(one.num_resting for one in walks) / sum(one.num_steps for one in walks)
        default = walk().speed(length={"ngram": 10, "suffix": 24, "head": 5}[workload.drafter])
        mean = sum(governed) / len(governed)
        results.append({**vars(workload), "best": best, "fixed": fixed, "governed": governed, "default": default})
        print(
            f"| {workload.name} | {workload.drafter} | {best} | {fixed[best]:.3f} | {mean:.3f} "
            f"({min(governed):.3f}-{max(governed):.3f}) | {1 - mean / fixed[best]:+.3f} | {resting:.2f} | "
            f"{default:.3f} |"
        )
    if options.out is not None:
        record = {"provenance": provenance(), "curve": seconds, "workloads": results}
        options.out.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
