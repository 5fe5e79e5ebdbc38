"""What the settings of n-gram assisted decoding do to its acceptance, for dev/measurements/lookup.md.

    python benchmarks/nasd_guidance.py record --model zoo:tiny --texts tiny.json [--num-prompts 54] [--check]
    python benchmarks/nasd_guidance.py tables --texts tiny.json
    python benchmarks/nasd_guidance.py topics --model zoo:smollm2 --texts answers.jsonl.xz [--num-prompts 200]

Under "match" the text does not depend on the drafter. So it is generated once, plainly, and written down with the ten
tokens that the target ranked highest in every place; then the drafter of ``nasd`` itself is led along the text, once
per setting, and no forward is needed. ``record --check`` holds one such walk against the engine's own counters.

"topics" asks what a kept storage does where the subject changes: it is led along recorded greedy answers of one kind
(commands), then of another (maths), and back; beside one that is kept from the second kind on, and fresh ones. The file
has lines of JSON with kind, prompt, answer and temperature.

Storages are "fresh" for every prompt, or "kept" from prompt to prompt. Intervals are 95 % bootstraps over prompts;
changes are by the same prompts with ``filler_top_k=1``, or with n = 3.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foretoken import LLM, SamplingParams
from foretoken.bench.workload import load_prompts, read_questions, select
from foretoken.config.engine import EngineConfig
from foretoken.drafters.lookup.nasd import NasdDrafter, NGramStorage
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import Budget, Drafter, Features, StepResult
from foretoken.engine.engine import Engine

TOP = 10
NUM_RESAMPLES = 2000
LAWS = {"greedy": 0.0, "T = 1": 1.0}


# -- texts ---------------------------------------------------------------------------------------------------------


class Recorder(EmptyDrafter):
    """Drafts nothing and writes down what the target ranked high in every place."""

    def __init__(self) -> None:
        self.ranked_of: dict[int, list[list[int]]] = {}

    def observe(self, rows: Any, results: Any) -> None:
        for row, result in zip(rows, results, strict=True):
            ranked = result.committed.top_ids(TOP, range(len(result.emitted))).tolist()
            self.ranked_of.setdefault(row.id, []).extend(ranked)


def generated(llm: LLM, drafter: Drafter, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Any]:
    """The rows of all prompts."""
    engine = Engine(llm.target, drafter, EngineConfig(max_num_seqs=8), eos_token_ids=llm._eos_token_ids)
    rows = [engine.add_request(prompt, params)[0] for prompt in prompts]
    for _ in engine.run():
        pass
    return rows


def record(model: str, file: Path, num_prompts: int, max_new_tokens: int, check: bool) -> None:
    llm = LLM(model)
    questions = select(read_questions(None), num_prompts)
    prompts = [prompt.token_ids for prompt in load_prompts(llm.tokenizer, questions, None, 600)]
    texts: dict[str, Any] = {"model": model, "dtype": str(llm.target.dtype), "vocab_size": llm.target.vocab_size}
    for law, temperature in LAWS.items():
        params = SamplingParams(temperature=temperature, max_tokens=max_new_tokens, seed=1)
        recorder = Recorder()
        rows = generated(llm, recorder, prompts, params)
        texts[law] = [
            {
                "prompt": list(prompt),
                "output": list(row.output_ids),
                "ranked": recorder.ranked_of.get(row.id, []),
                "limit": max_new_tokens,
            }
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        if check:
            drafted = generated(llm, NasdDrafter(), prompts, params)
            walked = walks(texts[law], NasdDrafter)
            counters = [(row.stats.num_draft_tokens, row.stats.num_accepted_draft_tokens) for row in drafted]
            same = sum(tuple(walk[:2]) == counter for walk, counter in zip(walked.tolist(), counters, strict=True))
            equal = sum(list(row.output_ids) == text["output"] for row, text in zip(drafted, texts[law], strict=True))
            print(f"{law}: of {len(rows)} texts {equal} are equal with nasd; counters of {same} are those of the walk")
    file.write_text(json.dumps(texts), encoding="utf-8")


# -- walks ---------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """As much of a sequence as the drafter uses."""

    id: int
    token_ids: list[int]
    seed: int = 1


class Ranked(Features):
    """The target's best tokens in the next places; none is known of the step that ends a row."""

    def __init__(self, ranked: list[list[int]]) -> None:
        self._ranked = ranked

    def top_ids(self, k: int, nodes: Any) -> torch.Tensor:
        return torch.tensor([self._ranked[node][:k] for node in nodes if node < len(self._ranked)])


def walk(drafter: NasdDrafter, text: dict[str, Any], number: int) -> tuple[int, int, int, int]:
    """Drafted, accepted and emitted tokens and steps along one text."""
    row: Any = Row(number, list(text["prompt"]))
    output, ranked = text["output"], text["ranked"]
    drafter.start([row])
    drafted = accepted = steps = place = 0
    while place < len(output):
        tree = drafter.propose([row], [Budget.of(text["limit"] - place - 1)])[0]
        tree = tree.cut(text["limit"] - place - 1)
        num_right, rest = 0, output[place:]
        while num_right < min(tree.depth, len(rest)) and tree.tokens[num_right + 1] == rest[num_right]:
            num_right += 1
        emitted = tuple(output[place : place + num_right + 1])
        row.token_ids.extend(emitted)
        features = Ranked(ranked[place : place + len(emitted)])
        drafter.observe([row], [StepResult(tree, tuple(range(num_right + 1)), emitted, text_features=features)])
        drafted, accepted, steps = drafted + tree.num_draft_tokens, accepted + num_right, steps + 1
        place += len(emitted)
    assert row.token_ids == text["prompt"] + output
    drafter.forget([row])
    return drafted, accepted, len(output), steps


def walks(texts: Sequence[dict[str, Any]], make: Callable[..., NasdDrafter], kept: bool = False) -> np.ndarray:
    """Counters of every text, (P, 4)."""
    shared = make(shared=True) if kept else None
    return np.array([walk(shared or make(), text, number) for number, text in enumerate(texts)])


class AsListed(NGramStorage):
    """Weighs as listed: all of the top k count 1, the token that was said 1 more, the oldest of equals stays."""

    def extend(self, tokens: Sequence[int], ranked: Sequence[Sequence[int]], first: int) -> None:
        for place in range(max(first, 1), len(tokens)):
            top = ranked[place - first] if place - first < len(ranked) else ()
            for order in self._orders:
                if order <= place:
                    known = self._known(tuple(tokens[place - order : place]))
                    for token in (tokens[place], *top):
                        weight = known._weight_of.get(token, 0.0) + 1.0
                        known._weight_of[token] = weight
                        known.total += 1.0
                        if not known._best or weight > known._weight_of[known._best[0]]:
                            known._best[:] = [token]


def as_listed(**options: Any) -> NasdDrafter:
    """The drafter over storages that weigh as listed."""
    drafter = NasdDrafter(**options)
    drafter._new_storage = partial(AsListed, options.get("ngram_size", 3), 1)  # type: ignore[assignment]
    if drafter.learned is not None:
        drafter._shared = drafter._new_storage()
    return drafter


# -- topics --------------------------------------------------------------------------------------------------------


def answers(file: Path, model: str, kind: str, number: int) -> list[dict[str, Any]]:
    """Greedy answers of one kind, as texts to be led along, in the order of the file."""
    from transformers import AutoTokenizer

    from foretoken.zoo import path

    tokenizer = AutoTokenizer.from_pretrained(path(model, "tokenizer"))
    found = []
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            if line["kind"] == kind and line["temperature"] == 0 and len(found) < number:
                turns = [{"role": "user", "content": line["prompt"]}]
                prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
                output = tokenizer(line["answer"], add_special_tokens=False)["input_ids"]
                found.append({"prompt": prompt, "output": output, "ranked": [], "limit": len(output)})
    return found


PLACES = ((-50, 0), (0, 10), (10, 50), (50, 100))
"""Texts by their distance from a change of the subject: the last before it, and those behind it."""


def topics(file: Path, model: str, number: int) -> None:
    before, after = answers(file, model, "command", 2 * number), answers(file, model, "maths", number)
    num = min(len(before) // 2, len(after))
    back = before[num : 2 * num]
    texts = [*before[:num], *after[:num], *back]
    print(f"{model}: {num} answers on commands, {num} on maths, {num} on other commands; tokens per step")
    print("| storage | place | kept all along | kept from the change on | fresh |\n|---|---|---|---|---|")
    for storage in ("levels", "single"):
        make = partial(NasdDrafter, ngram_size=3, storage=storage, filler_top_k=1)
        kept, fresh = walks(texts, make, kept=True), walks(texts, make)
        from_change = [walks(after[:num], make, kept=True), walks(back, make, kept=True)]
        for change, since in zip((num, 2 * num), from_change, strict=True):
            for first, end in PLACES:
                shown = [
                    kept[change + first : change + end],
                    since[max(first, 0) : end],
                    fresh[change + first : change + end],
                ]
                cells = [_per_step(counts) if len(counts) else "" for counts in shown]
                subject = "maths" if change == num else "commands"
                where = f"{-first} before {subject}" if first < 0 else f"{subject} {first + 1} to {end}"
                print(f"| {storage} | {where} | {' | '.join(cells)} |", flush=True)


def _per_step(counts: np.ndarray) -> str:
    total = counts.sum(axis=0)
    return f"{total[2] / total[3]:.3f} ({interval(resampled(counts, 2, 3))})"


# -- tables --------------------------------------------------------------------------------------------------------


def interval(values: np.ndarray) -> str:
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return f"{low:.3f}-{high:.3f}"


def resampled(counts: np.ndarray, above: int, below: int) -> np.ndarray:
    """The ratio of two counters over prompts drawn with replacement, the same draws for every setting."""
    draws = np.random.default_rng(0).integers(len(counts), size=(NUM_RESAMPLES, len(counts)))
    sums = counts[draws].sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums[:, above] / sums[:, below]


def show(title: str, counts: np.ndarray, base: np.ndarray) -> None:
    total = counts.sum(axis=0)
    rates = resampled(counts, 1, 0)
    cells = [
        f"{total[0] / total[3]:.2f}",
        f"{total[1] / total[0]:.3f} ({interval(rates)})",
        f"{total[2] / total[3]:.3f} ({interval(resampled(counts, 2, 3))})",
    ]
    first = base.sum(axis=0)
    change = (total[1] / total[0]) / (first[1] / first[0]) - 1
    with np.errstate(invalid="ignore", divide="ignore"):
        low, high = np.nanpercentile(rates / resampled(base, 1, 0) - 1, [2.5, 97.5])
    tau = (total[2] / total[3]) / (first[2] / first[3]) - 1
    least, most = np.percentile(resampled(counts, 2, 3) / resampled(base, 2, 3) - 1, [2.5, 97.5])
    cells.append(f"{change:+.0%} ({low:+.0%} to {high:+.0%}); {tau:+.1%} ({least:+.1%} to {most:+.1%})")
    print(f"| {title} | {' | '.join(cells)} |", flush=True)


def bytes_per_context(texts: Sequence[dict[str, Any]], **options: Any) -> tuple[float, float]:
    """Memory of one kept storage by its contexts, and its contexts per token of text."""
    tracemalloc.start()
    drafter = NasdDrafter(shared=True, **options)
    for number, text in enumerate(texts):
        walk(drafter, text, number)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drafter.learned is not None
    num_tokens = sum(len(text["prompt"]) + len(text["output"]) for text in texts)
    return size / len(drafter.learned), len(drafter.learned) / num_tokens


def tables(file: Path) -> None:
    texts = json.loads(file.read_text(encoding="utf-8"))
    random = {"unknown": "random", "vocab_size": texts["vocab_size"]}
    print(f"{texts['model']}, {texts['dtype']}, {len(texts['greedy'])} prompts")
    for law in LAWS:
        for kept in (False, True):
            measure = partial(walks, texts[law], kept=kept)
            print(f"\n### {law}, {'kept' if kept else 'fresh'}\n")
            print("| setting | drafted per step | acceptance rate | tokens per step | change of rate; of tokens |")
            print("|---|---|---|---|---|")
            base = measure(partial(NasdDrafter, ngram_size=3))
            for storage in ("levels", "single"):
                for n in (2, 3, 4, 5):
                    show(f"{storage}, n = {n}", measure(partial(NasdDrafter, ngram_size=n, storage=storage)), base)
            for title, make, others in (
                ("weigh 0.25", NasdDrafter, {}),
                ("weigh 1", NasdDrafter, {"filler_weight": 1.0}),
                ("as listed", as_listed, {}),
            ):
                for words, more in (("", {}), (", random", random)):
                    arm = partial(make, ngram_size=3, **others, **more)
                    base = measure(partial(arm, filler_top_k=1))
                    for k in (1, 3, 10):
                        counts = measure(partial(arm, filler_top_k=k))
                        show(f"{title}, top {k}{words}", counts, base)
    print("\n| filler_top_k | n | bytes per context | contexts per token |\n|---|---|---|---|")
    for k in (1, 3, 10):
        for n in (2, 3, 4, 5):
            size, share = bytes_per_context(texts["greedy"], filler_top_k=k, ngram_size=n)
            print(f"| {k} | {n} | {size:.0f} | {share:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "tables", "topics"))
    parser.add_argument("--model", default="zoo:tiny")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="hold one walk against the engine's counters")
    given = parser.parse_args()
    if given.what == "record":
        record(given.model, given.texts, given.num_prompts, given.max_new_tokens, given.check)
    elif given.what == "tables":
        tables(given.texts)
    else:
        topics(given.texts, given.model, given.num_prompts)


if __name__ == "__main__":
    main()
