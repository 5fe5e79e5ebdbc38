"""Acceptance of methods that are forced on: tau with intervals over prompts, by position, and what a draft costs.

    python benchmarks/tau.py --model zoo:smollm2 --prompts question.jsonl --per-kind 4 --max-new-tokens 48 \
        --nodes chain 8 16 60 --bigram answers.jsonl --method ngram --method token_recycling --method eagle3 \
        --method suffix+eagle3 --out tau.jsonl

Every method drafts in every step, and as much as it is allowed: no governor runs, and lengths that a method would
choose by itself are fixed. "chain" is a chain of five, or of num_speculative_tokens where a method's config names them
(a union merges the chains of its parts into a tree of as many nodes); a number is that of nodes, root included, of
trees whose shape the method chooses; without --nodes a method drafts what its config says. Prompts of Spec-Bench's
parts of chat count as one kind. Intervals are bootstraps over prompts. --timed N decodes N of the prompts alone, too:
the least and the median processor time of a draft (propose and observe, where tokens were drafted) and of a step. With
--out, cells that the file holds already, measured under the same settings, are not measured again, so a long list can
be broken off.

Two baselines are no methods of the library. "bigram", with --bigram, drafts what followed a token most often in answers
of the target: the whole text before the pending token does not matter to it. "argmax" chains the target's own argmax
behind nothing but the token before. A method that looks at the text has to do better.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from found import Found, kept, of_record
from successors import CHAIN_LENGTH, Argmax, Bigrams, SuccessorDrafter

from foretoken import LLM, SamplingParams
from foretoken.bench.arms import Sampling
from foretoken.bench.equality import first_difference, preference_gap
from foretoken.bench.provenance import provenance
from foretoken.bench.workload import read_questions
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import Budget, Drafter
from foretoken.engine.engine import Engine
from foretoken.engine.sequence import Sequence
from foretoken.tree import DraftTree

ARGMAX, BIGRAM, CHAIN = "argmax", "bigram", "chain"
CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
NUM_BRANCHES, WIDTH_OF_MANY, MANY = 4, 10, 32
UNSEEN = ("setting", "by_prompt", "conditions")


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
    llm: LLM, drafter: Drafter, asked: Seq[Question], params: SamplingParams, *, is_chain: bool, rows: int
) -> Found:
    """Decode all prompts, so many at a time, with drafts of a fixed budget."""
    found = Found([question.kind for question in asked])
    propose, observe, begun, is_draft = drafter.propose, drafter.observe, [0.0], [False]

    def timed_propose(rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        start = time.process_time()
        if begun[0]:
            found.step_seconds.append(start - begun[0])
        begun[0] = start
        given = [Budget.of(budget) for budget in budgets]
        if is_chain:
            given = [Budget(min(CHAIN_LENGTH, one.depth), one.nodes, chains_only=True) for one in given]
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


def beside(llm: LLM, asked: Seq[Question], plain: Found, found: Found, sampling: Sampling) -> dict[str, Any]:
    """How many texts are those of plain decoding, and by how much the target prefers one to the other where they part.

    Half precision promises equal tokens for chains, and for trees but for near-ties (docs/exactness.md).
    """
    gaps = []
    for question, expected, output in zip(asked, plain.outputs, found.outputs, strict=True):
        place = first_difference(expected, output)
        if place is None:
            continue
        ended = place >= min(len(expected), len(output))
        pair = (-1, -1) if ended else (expected[place], output[place])
        known = (question.token_ids, expected[:place], sampling)
        gaps.append(math.inf if ended else preference_gap(llm.target, *known, *pair))
    return {"num_equal": len(asked) - len(gaps), "largest_gap": round(max(gaps, default=0.0), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--method", action="append", default=[], help="a name, a+b, JSON or NAME=JSON; may be repeated")
    parser.add_argument("--nodes", nargs="+", default=[None], help="chain, or numbers of nodes, root included")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--per-kind", type=int, default=6)
    parser.add_argument("--max-prompt-tokens", type=int, default=700)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, action="append", default=[])
    parser.add_argument("--rows", type=int, default=8, help="prompts that are decoded together")
    parser.add_argument("--bigram", type=Path, help="prompts with answers of the target, as of foretoken train")
    parser.add_argument("--timed", type=int, default=0, help="prompts that are decoded alone too, to time their steps")
    parser.add_argument("--against", default="", help="method whose tau is taken from that of others")
    parser.add_argument(
        "--check", action="store_true", help="compare texts with plain decoding's: how many are equal, and logits apart"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON lines with counts by prompt; what is there is not measured again"
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


def setting(llm: LLM, options: argparse.Namespace, asked: Seq[Question], method: str) -> str:
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
