"""Measure acceptance without the governor: tau (tokens per step) with intervals, by position, and draft costs.

    python benchmarks/tau.py --model zoo:smollm2 --prompts question.jsonl --per-kind 4 --max-new-tokens 48 \\
        --nodes chain 8 16 60 --bigram answers.jsonl --method ngram --method token_recycling --method eagle3 \\
        --method suffix+eagle3 --out tau.jsonl

Every method drafts in every step, as much as it is allowed: no governor runs, and lengths that a method would choose by
itself are fixed. In --nodes, "chain" is a chain of five tokens, or of num_speculative_tokens if the method's config
sets it (a union merges the chains of its parts into a tree of as many nodes). A number is the number of nodes, root
included, of trees whose shape the method chooses. Without --nodes, the method's config decides. Spec-Bench's prompts of
its chat parts count as one kind. Intervals are bootstraps over prompts. --timed N also decodes N of the prompts alone
and gives the minimum and the median processor time of a draft (propose and observe, in steps with drafted tokens) and
of a step. Results that the --out file contains already, measured with the same settings, are not measured again, so a
long list can be interrupted.

Two baselines are not methods of the library. "bigram", with --bigram, drafts the tokens that most often followed a
token in answers of the target; it ignores all text before the pending token. "argmax" chains the target's own argmax,
given only the previous token. A method that reads the text has to do better.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from foredraft import LLM, SamplingParams
from foredraft.beginnings import first_difference
from foredraft.bench.equality import gap_of
from foredraft.bench.provenance import provenance
from foredraft.bench.trial import Sampling, bootstrap
from foredraft.bench.workload import read_questions
from foredraft.config.engine import EngineConfig
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import ContextDrafter, Drafter, DrafterFacts, DraftSize
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.engine.stats import RowStats
from foredraft.model.lm import CausalLM, Nodes
from foredraft.train.examples import read_prompts
from foredraft.tree import DraftTree

ARGMAX, BIGRAM, CHAIN = "argmax", "bigram", "chain"
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
NUM_BRANCHES, WIDTH_OF_MANY, MANY = 4, 10, 32
CHAIN_LENGTH, NUM_POSITIONS = 5, 5
UNSEEN = ("setting", "by_prompt", "conditions")


# -- what was found --------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Counters of one method, by prompt, and the processor time of its drafts and steps.

    Args:
      kinds: of the prompts.
      counts: emitted tokens and steps, by prompt.
      accepted: number of accepted tokens -> number of steps, over all prompts.
      num_drafted: drafted tokens of all steps.
      outputs: token ids, by prompt; none where a record was read.
      draft_seconds, step_seconds: of one step each.
    """

    kinds: Sequence[str]
    counts: list[tuple[int, int]] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)
    num_drafted: int = 0
    outputs: list[list[int]] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def add(self, stats: Iterable[RowStats]) -> None:
        for one in stats:
            self.counts.append((one.num_emitted_tokens, one.num_steps))
            self.accepted.update(one.acceptance_histogram)
            self.num_drafted += one.num_draft_tokens

    def tau(self, places: Iterable[int] | None = None) -> float:
        several = self.counts if places is None else [self.counts[place] for place in places]
        return sum(emitted for emitted, _ in several) / max(1, sum(steps for _, steps in several))

    def interval(self) -> tuple[float, float]:
        """Of tau over all prompts, 95 %, by bootstrap over them."""
        return bootstrap(range(len(self.counts)), self.tau)

    def gain_over(self, other: Found) -> tuple[float, float, float]:
        """Difference of tau, with its interval by bootstrap over prompts, the same ones on both sides."""
        gains = bootstrap(range(len(self.counts)), lambda places: self.tau(places) - other.tau(places))
        return (self.tau() - other.tau(), *gains)

    @property
    def num_accepted(self) -> int:
        return sum(length * count for length, count in self.accepted.items())

    def by_position(self) -> list[float]:
        """Share of steps in which at least 1, 2, .. drafted tokens were accepted."""
        steps = max(1, sum(steps for _, steps in self.counts))
        deeper = (
            sum(count for length, count in self.accepted.items() if length >= k) for k in range(1, NUM_POSITIONS + 1)
        )
        return [round(count / steps, 3) for count in deeper]

    def record(self) -> dict[str, Any]:
        """What is printed and kept; times in milliseconds of one step, the least and the median."""
        places: dict[str, list[int]] = defaultdict(list)
        for place, kind in enumerate(self.kinds):
            places[kind].append(place)
        low, high = self.interval()
        steps = max(1, sum(steps for _, steps in self.counts))
        record: dict[str, Any] = {
            "tau": round(self.tau(), 3), "low": round(low, 3), "high": round(high, 3),
            "by_position": self.by_position(),
            "by_kind": {kind: round(self.tau(several), 2) for kind, several in places.items()},
            "nodes_per_step": round(1 + self.num_drafted / steps, 1),
            "acceptance_rate": round(self.num_accepted / max(1, self.num_drafted), 3),
        }  # fmt: skip
        for name, seconds in (("draft_ms", self.draft_seconds), ("step_ms", self.step_seconds)):
            if seconds:
                record[name] = [round(1000 * min(seconds), 2), round(1000 * median(seconds), 2)]
        return record


def kept(file: Path | None, cell: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a cell that was measured before under the same settings, the newest one; None where none was."""
    if file is None or not file.exists():
        return None
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return next((record for record in reversed(records) if cell.items() <= record.items()), None)


def of_record(kinds: Sequence[str], record: dict[str, Any]) -> Found:
    """Enough of a measurement to compare others with."""
    return Found(kinds, [(emitted, steps) for emitted, steps in record["by_prompt"]])


# -- baselines -------------------------------------------------------------------------------------------------------


class Argmax:
    """The target's argmax behind every token alone, asked for once per token that occurs."""

    def __init__(self, target: CausalLM) -> None:
        self._target = target
        self._known: dict[int, list[tuple[int, float]]] = {}

    @torch.inference_mode()
    def after(self, token: int) -> list[tuple[int, float]]:
        if token not in self._known:
            logits = self._target.forward(Nodes.from_chains([[token]]), self._target.new_cache(1, capacity=1))
            self._known[token] = [(int(logits[0, 0].argmax()), 1.0)]
        return self._known[token]


class Bigrams:
    """What has followed a token in answers, likeliest first, with its share."""

    def __init__(self, llm: LLM, answers: Path) -> None:
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for asked in read_prompts(answers):
            ids = [*llm.tokenizer(asked.answer or "", add_special_tokens=False)["input_ids"]]
            ids += [llm.tokenizer.eos_token_id] if asked.ended else []
            for first, second in pairwise(ids):
                counts[first][second] += 1
        self._ranked = {
            token: [(successor, count / found.total()) for successor, count in found.most_common(10)]
            for token, found in counts.items()
        }

    def after(self, token: int) -> list[tuple[int, float]]:
        return self._ranked.get(token, [])


class SuccessorDrafter(ContextDrafter):
    """The likeliest nodes of the tree that successors of single tokens span."""

    def __init__(self, name: str, successors: Argmax | Bigrams, num_nodes: int | None) -> None:
        self.facts = DrafterFacts(name)
        self._successors, self._num_nodes = successors, num_nodes

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        tokens, parents, depths = [row.pending], [-1], [0]
        is_chain = self._num_nodes is None
        size, depth = (CHAIN_LENGTH + 1 if self._num_nodes is None else self._num_nodes), int(budget)
        heap: list[tuple[float, int, int, int]] = []  # minus the chance of the path, order, parent, token

        def open_(node: int, chance: float) -> None:
            for token, share in self._successors.after(tokens[node])[: 1 if is_chain else None]:
                heappush(heap, (-chance * share, len(heap) + len(tokens), node, token))

        open_(0, 1.0)
        while heap and len(tokens) < min(size, budget.max_nodes()):
            negative, _, parent, token = heappop(heap)
            if depths[parent] + 1 > depth:
                continue
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            open_(len(tokens) - 1, -negative)
        return DraftTree(tuple(tokens), tuple(parents), source=self.name)


# -- methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    kind: str
    token_ids: tuple[int, ...]


def questions(llm: LLM, options: argparse.Namespace) -> list[Question]:
    """Prompts of every kind as chats, evenly spread over those of the file that are short enough."""
    fitting: dict[str, list[Question]] = defaultdict(list)
    for question in read_questions(options.prompts):
        kind = "chat" if question.category in CHAT else question.category
        if options.kind and kind not in options.kind:
            continue
        ids = tuple(llm.chat_prompt([{"role": "user", "content": question.text}])["prompt_token_ids"])
        longest = min(options.max_prompt_tokens, (llm.target.context_length or 1 << 20) - 256)
        if len(ids) <= longest:
            fitting[kind].append(Question(kind, ids))
    return [
        several[place * len(several) // options.per_kind]
        for several in fitting.values()
        for place in range(min(options.per_kind, len(several)))
    ]


def forced(method: str, nodes: str | None) -> SpeculativeConfig:
    """A config that drafts as many nodes as it may, whatever it would decide by itself."""
    given: dict[str, Any] = json.loads(method) if method.startswith("{") else {"method": method}
    if nodes is None:
        return SpeculativeConfig.parse(given)
    return SpeculativeConfig.parse(_forced(SpeculativeConfig.parse(given), given, nodes))


def _forced(config: SpeculativeConfig, given: dict[str, Any], nodes: str) -> dict[str, Any]:
    known = config.definition.keys
    size = CHAIN_LENGTH + 1 if nodes == CHAIN else int(nodes)
    wanted: dict[str, Any] = {"max_draft_nodes": size, "length_policy": "fixed"}
    if nodes == CHAIN:
        wanted["num_draft_branches"] = 1
    else:
        wanted |= {"num_draft_branches": NUM_BRANCHES, "draft_rerank": True}
        if size >= MANY:  # as published: ten children each of the ten best of a level
            wanted |= {"num_draft_branches": WIDTH_OF_MANY, "draft_beam_width": WIDTH_OF_MANY}
    if nodes == CHAIN:
        length = int(given.get("num_speculative_tokens", CHAIN_LENGTH))
        wanted |= {
            "num_speculative_tokens": length,
            "speculative_token_tree": "x".join("1" * length),
            "num_candidates": 1,
        }
    elif config.method in ("ngram", "suffix"):  # their drafts may be as deep as they are large
        wanted["num_speculative_tokens"] = size - 1
    if config.method == "union":
        parts = [_forced(part, part.as_dict(), nodes) for part in config.parts]
        return {"method": "union", "drafters": parts, "max_draft_nodes": size}
    if config.method == "suffix":
        wanted |= {"suffix_decoding_max_spec_factor": 1000.0, "suffix_decoding_min_token_prob": 0.0}
    return {**given, **{key: value for key, value in wanted.items() if key in known}}


def named(method: str) -> tuple[str, str]:
    """The name and the config of "NAME={json}"; others are named as they are given."""
    name, sign, config = method.partition("=")
    return (name, config) if sign and not method.startswith("{") else (method, method)


def run(
    llm: LLM, drafter: Drafter, asked: Sequence[Question], params: SamplingParams, *, is_chain: bool, rows: int
) -> Found:
    """Decode all prompts, so many at a time, with drafts of a fixed budget."""
    found = Found([question.kind for question in asked])
    propose, observe, begun, is_draft = drafter.propose, drafter.observe, [0.0], [False]

    def timed_propose(rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        start = time.process_time()
        if begun[0]:
            found.step_seconds.append(start - begun[0])
        begun[0] = start
        given = [DraftSize.of(budget) for budget in budgets]
        if is_chain:
            given = [DraftSize(min(CHAIN_LENGTH, one.depth), one.nodes, chains_only=True) for one in given]
        trees = propose(rows, given)
        is_draft[0] = any(tree.num_draft_tokens for tree in trees)
        if is_draft[0]:
            found.draft_seconds.append(time.process_time() - start)
        return trees

    def timed_observe(*told: Any) -> None:
        start = time.process_time()
        observe(*told)
        if is_draft[0]:  # neither what is read of a prompt before its first draft, nor where nothing was drafted
            found.draft_seconds[-1] += time.process_time() - start

    drafter.propose, drafter.observe = timed_propose, timed_observe  # type: ignore[method-assign, assignment]
    engine = Engine(llm.target, drafter, EngineConfig(max_num_seqs=rows), eos_token_ids=llm._eos_token_ids)
    running = [engine.add_request(question.token_ids, params)[0] for question in asked]
    for _ in engine.run():
        pass
    found.add(row.stats for row in running)
    found.outputs = [list(row.output_ids) for row in running]
    return found


def beside(llm: LLM, asked: Sequence[Question], plain: Found, found: Found, sampling: Sampling) -> dict[str, Any]:
    """How many texts are those of plain decoding, and by how much the target prefers one to the other where they part.

    Half precision promises equal tokens for chains, and for trees but for near-ties (docs/exactness.md).
    """
    gaps, gap = [], gap_of(llm.target, sampling)
    for question, expected, output in zip(asked, plain.outputs, found.outputs, strict=True):
        place = first_difference(expected, output)
        if place is None:
            continue
        ended = place >= min(len(expected), len(output))
        pair = (-1, -1) if ended else (expected[place], output[place])
        gaps.append(math.inf if ended else gap(question.token_ids, expected[:place], *pair))
    return {"num_equal": len(asked) - len(gaps), "largest_gap": round(max(gaps, default=0.0), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--execution", default="auto")
    parser.add_argument(
        "--method", action="append", default=[], help="method: a name, a+b, JSON or NAME=JSON; repeatable"
    )
    parser.add_argument("--nodes", nargs="+", default=[None], help="chain, or numbers of nodes, root included")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--per-kind", type=int, default=6)
    parser.add_argument("--max-prompt-tokens", type=int, default=700)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, action="append", default=[])
    parser.add_argument("--rows", type=int, default=8, help="batch size")
    parser.add_argument(
        "--bigram", type=Path, help="file of prompts with answers of the target, as foredraft train writes it"
    )
    parser.add_argument(
        "--timed", type=int, default=0, help="number of prompts that are also decoded alone, to time steps"
    )
    parser.add_argument("--against", default="", help="method whose tau is subtracted from that of others")
    parser.add_argument(
        "--check", action="store_true", help="compare outputs with plain decoding: number of equal ones, gaps in logits"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON lines with counts by prompt; results in it are not measured again"
    )
    options = parser.parse_args()
    llm = LLM(options.model, dtype=options.dtype, execution=options.execution)
    asked = questions(llm, options)
    baseline = Bigrams(llm, options.bigram) if options.bigram else Argmax(llm.target)
    first = BIGRAM if options.bigram else ARGMAX

    def drafter_of(method: str, nodes: str | None) -> Drafter:
        if method == first:
            size = None if first == ARGMAX or nodes in (None, CHAIN) else int(nodes or 0)
            return SuccessorDrafter(method, baseline, size)
        return llm.with_speculative_config(forced(method, nodes)).drafting.new_drafter()

    print(f"{len(asked)} prompts: {dict(Counter(one.kind for one in asked))}", flush=True)
    for temperature in options.temperature or [0.0, 1.0]:
        params = SamplingParams(temperature=temperature, max_tokens=options.max_new_tokens, seed=1)
        plain = run(llm, EmptyDrafter(), asked, params, is_chain=True, rows=options.rows) if options.check else None
        for nodes in options.nodes:
            results: dict[str, Found] = {}
            for name, method in [(first, first), *map(named, options.method)]:
                cell = {
                    "method": name, "temperature": temperature, "nodes": nodes,
                    "setting": setting(llm, options, asked, method),
                }  # fmt: skip
                record = kept(options.out, cell)
                if record is None:
                    is_chain = nodes == CHAIN
                    found = run(llm, drafter_of(method, nodes), asked, params, is_chain=is_chain, rows=options.rows)
                    if options.timed:
                        alone = asked[:: max(1, len(asked) // options.timed)][: options.timed]
                        timed = run(llm, drafter_of(method, nodes), alone, params, is_chain=is_chain, rows=1)
                        found.draft_seconds, found.step_seconds = timed.draft_seconds, timed.step_seconds
                    else:
                        found.draft_seconds, found.step_seconds = [], []
                    record = cell | found.record()
                    if plain is not None:
                        record |= beside(llm, asked, plain, found, Sampling(temperature, seed=1))
                    record |= {"by_prompt": found.counts, "conditions": provenance()}
                    if options.out is not None:
                        with options.out.open("a", encoding="utf-8") as lines:
                            lines.write(json.dumps(record) + "\n")
                print(" ".join(f"{key}={record[key]}" for key in record if key not in UNSEEN), flush=True)
                results[name] = of_record([one.kind for one in asked], record)
            for name, found in results.items():
                if options.against in results and name != options.against:
                    gain, low, high = found.gain_over(results[options.against])
                    print(f"    {name} - {options.against}: {gain:+.3f} ({low:+.3f} to {high:+.3f})", flush=True)


def setting(llm: LLM, options: argparse.Namespace, asked: Sequence[Question], method: str) -> str:
    """Names all that tau depends on beside the method's name, temperature and nodes."""
    parts = [
        llm.model_info.name,
        str(llm.target.dtype),
        options.execution,
        options.max_new_tokens,
        options.rows,
        method,
    ]
    parts += [options.timed, options.check, str(options.bigram) if method == BIGRAM else ""]
    parts += [question.token_ids for question in asked]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
