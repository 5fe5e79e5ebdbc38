"""How far the governor stays behind the best fixed setting in hindsight, on recorded texts and measured costs.

    python benchmarks/governor_regret.py --texts answers.jsonl [--model zoo:smollm2] [--dtype bfloat16]
        [--num-texts 24] [--max-new-tokens 200] [--seeds 3] [--temperature 0.8] [--interval 8] [--out regret.json]
        [--kinds chat rag ...] [--rows 8 [--closed]] [--curve '{"1": 6.8, "8": 9.0, ...}']

Under the rule "match" texts do not depend on drafts, so the texts that a model once gave are all that is needed: the
drafters run along them, and every step costs what the cost curve of the model on this machine says, with 5 % of noise
and one step in a hundred three times as slow. So every other setting can be had exactly: drafts of 0 to 16 tokens,
and those of trees cut to so many nodes. Texts are JSON lines with ``kind``, ``prompt`` and ``answer``. One workload
changes its nature midway, one its number of rows. With ``--interval n`` the governor decides in every n-th step only,
as it does where steps are short, and its last decision is followed between. Regret is 1 - speed by that of the best
setting for the whole. ``--kinds`` replaces the workloads by one of each kind, and one of all of them, shuffled, in
batches of so many ``--rows``; with ``--closed`` no text takes the place of one that has ended, so that a batch takes as
long as its last row: speed is then by that of the same batches decoded plainly.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.bench.provenance import provenance
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.drafters.lookup.suffix import SuffixDrafter, SuffixOptions
from foredraft.engine.budget import DraftSize
from foredraft.engine.cost_model import CostModel
from foredraft.engine.costs import cost_curve
from foredraft.engine.drafter import Drafter
from foredraft.engine.governor import Governor
from foredraft.engine.outputs import RowOutput
from foredraft.engine.stats import Steps
from foredraft.loading.models import load_model
from foredraft.model.lm import CausalLM
from foredraft.tree import DraftTree
from foredraft.tune.walk import RecordedText, Walk

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 16)
NODES = (2, 3, 4, 6, 8, 12, 16, 24)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGramDrafter,
    "suffix": lambda: SuffixDrafter(SuffixOptions(num_speculative_tokens=24)),
}
DRAFTING_SECONDS = {"ngram": 0.00005, "suffix": 0.0001}


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


def workloads_of(kinds: Sequence[str], num_rows: int) -> list[Workload]:
    """Each of these kinds, and all of them, by every drafter."""
    groups = [(kind,) for kind in kinds] + [tuple(kinds)] * (len(kinds) > 1)
    between = ", then " if num_rows == 1 else " and "
    return [Workload(between.join(group), drafter, group, (num_rows,)) for drafter in DRAFTERS for group in groups]


@dataclass
class Costed:
    """Decodes recorded texts at the costs of a curve."""

    curve: CostModel
    workload: Workload
    target: CausalLM
    texts: Sequence[RecordedText]
    seed: int = 0
    interval: int = 1
    is_closed: bool = False
    num_steps: int = 0
    spent: float = 0.0
    plain: float = 0.0
    followed: list[tuple[Sequence[DraftTree], Sequence[RowOutput]]] = field(default_factory=list)

    def speed(self, *, governor: Governor | None = None, length: int = 0, max_nodes: int | None = None) -> float:
        """Speed by plain decoding, governed or at a fixed setting."""
        walk = Walk(self.target, DRAFTERS[self.workload.drafter](), self.texts)
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
        rows = walk.rows
        is_deciding = self.num_steps % self.interval == 0
        self.num_steps += 1
        budgets = walk.budgets()
        if governor is None:
            budgets = [DraftSize(min(budget, length)) for budget in budgets]
        elif is_deciding:
            self._hand_over(governor)
            budgets = governor.budgets(rows, budgets, is_closed=self.is_closed)
        else:
            budgets = governor.habit.budgets(budgets)
        trees = drafts = walk.propose(budgets)
        if governor is not None and not is_deciding:
            trees = governor.cut(rows, drafts)
        elif governor is not None:
            trees = governor.trimmed(rows, drafts)
        elif max_nodes is not None:
            trees = [tree.restricted(range(min(len(tree), max_nodes))) for tree in drafts]
        drafting = DRAFTING_SECONDS[self.workload.drafter] * len(rows) * bool(max(budgets))
        verifying = self.curve.curve(sum(map(len, trees)))
        self.spent += drafting + verifying
        outputs = walk.emit(trees)
        num_tokens = sum(len(output.token_ids) for output in outputs)
        if not self.is_closed:
            self.plain += self.curve.curve(len(rows)) / len(rows) * num_tokens
        factor = math.exp(noise.gauss(0.0, 0.05)) * (3.0 if noise.random() < 0.01 else 1.0)
        if governor is None:
            return
        if is_deciding:
            seconds = {"drafting_seconds": drafting * factor, "other_seconds": verifying * factor}
            governor.learn(trees, outputs, **seconds)
            return
        self.followed.append((drafts, outputs))
        steps = Steps()
        steps.add(len(rows), sum(map(len, trees)) - len(rows), num_tokens, drafting * factor, verifying * factor)
        governor.follow_steps(steps)
        if any(output.row.is_finished for output in outputs):
            self._hand_over(governor)

    def _hand_over(self, governor: Governor) -> None:
        for drafts, outputs in self.followed:
            governor.follow(outputs, drafts)
        self.followed.clear()


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
    parser.add_argument("--temperature", type=float, default=0.0, help="at which the texts were drawn")
    parser.add_argument("--interval", type=int, default=1, help="steps from one decision to the next")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", help="of the texts, in the place of the workloads named here")
    parser.add_argument("--rows", type=int, default=1, help="of a batch, with --kinds")
    parser.add_argument("--closed", action="store_true", help="one batch after the other")
    parser.add_argument("--curve", type=json.loads, help="milliseconds by nodes, in the place of this machine's")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    loaded = load_model(options.model, dtype=options.dtype)
    target = CausalLM(loaded.model)
    curve = options.curve and {int(nodes): taken / 1e3 for nodes, taken in options.curve.items()}
    seconds = curve or cost_curve(target).seconds
    print("ms by nodes:", {nodes: round(1e3 * taken, 1) for nodes, taken in seconds.items()})
    texts = read(options.texts, loaded.tokenizer, options)
    results = []
    print("\n| workload | drafter | best setting | speed | governed | regret | default setting |\n|" + "---|" * 7)
    for workload in workloads_of(options.kinds, options.rows) if options.kinds else WORKLOADS:
        chosen = [text for kind in workload.kinds for text in texts[kind]]
        if options.rows > 1:
            random.Random(0).shuffle(chosen)

        def walk(seed: int = 0, workload: Workload = workload, chosen: list[RecordedText] = chosen) -> Costed:
            return Costed(CostModel(seconds), workload, target, chosen, seed, options.interval, options.closed)

        fixed = {f"K = {length}": walk().speed(length=length) for length in LENGTHS}
        if workload.drafter == "suffix":
            fixed |= {f"{nodes} nodes": walk().speed(length=24, max_nodes=nodes) for nodes in NODES}
        best = max(fixed, key=fixed.__getitem__)
        governed = [walk(seed).speed(governor=Governor(CostModel(seconds))) for seed in range(options.seeds)]
        default = walk().speed(length={"ngram": 10, "suffix": 24}[workload.drafter])
        mean = sum(governed) / len(governed)
        results.append({**vars(workload), "best": best, "fixed": fixed, "governed": governed, "default": default})
        print(
            f"| {workload.name} | {workload.drafter} | {best} | {fixed[best]:.3f} | {mean:.3f} "
            f"({min(governed):.3f}-{max(governed):.3f}) | {1 - mean / fixed[best]:+.3f} | {default:.3f} |"
        )
    if options.out is not None:
        record = {"provenance": provenance(), "curve": seconds, "workloads": results}
        options.out.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
