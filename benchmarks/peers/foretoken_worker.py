"""This library and transformers in the race: run by race.py in the library's own environment.

Verbs beside "run": "tune" (transformers' settings, on the prompts that will be raced) and "gap" (by how much the model
prefers one token to another).
"""

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from protocol import Answer, Arms, Decode, first_prompt, folder_and_threads, has_draft, serve

from foretoken.bench.arms import Arm, Sampling
from foretoken.bench.equality import preference_gap
from foretoken.bench.lineup import PLAIN
from foretoken.bench.models import load_pair
from foretoken.bench.provenance import provenance
from foretoken.bench.settings import Settings
from foretoken.bench.suite import Suite
from foretoken.bench.workload import Prompt

WITH_DRAFT = ("draft_model", "ngram", "suffix+draft_model")
WITHOUT = ("ngram", "suffix")
GREEDY = Sampling()


def decode(arm: Arm) -> Decode:
    def run(prompt_ids: list[int], max_new_tokens: int) -> Answer:
        done = arm.run(prompt_ids, max_new_tokens, GREEDY)
        return Answer(list(done.token_ids), done.num_first, done.first_seconds, done.decode_seconds)

    return run


def say(text: str) -> None:
    """Into the worker's log."""
    print(f"{perf_counter():.1f}", text, file=sys.stderr, flush=True)


class Engines:
    """Own arms at the library's defaults; transformers' arms at their best settings, once they are tuned."""

    def __init__(self, folder: Path, dtype: str, settings: Settings, plain_only: bool) -> None:
        draft = str(folder / "draft") if has_draft(folder) and not plain_only else None
        self._suite = Suite(load_pair(str(folder / "target"), draft, dtype), "none", settings, say)
        self._plain_only = plain_only
        methods = () if plain_only else WITHOUT if draft is None else WITH_DRAFT
        self.arms = Arms(first_prompt(folder))
        self.arms.add(f"ours {PLAIN}", decode(self._suite.lineup.plain_arm()))
        for name in methods:
            self.arms.add(f"ours {name}", decode(self._suite.lineup.engine_arm(name, {"method": name})))
        for name, candidates in self._candidates().items():
            self.arms.add(name, decode(candidates[0]))

    def _candidates(self) -> dict[str, Any]:
        found = {"transformers plain": self._suite.lineup.plain_candidates()}
        if self._suite.pair.drafter is not None:
            found["transformers assisted"] = self._suite.lineup.assisted_candidates()
        if not self._plain_only:
            found["transformers prompt lookup"] = self._suite.lineup.lookup_candidates()
        return found

    def tune(self, request: dict[str, Any]) -> dict[str, Any]:
        """The fastest settings of transformers on these prompts replace those in use."""
        prompts = [Prompt(str(place), "", tuple(ids)) for place, ids in enumerate(request["prompts"])]
        tuned = {}
        for name, candidates in self._candidates().items():
            best, speeds = self._suite.lineup.tuned(name, candidates, prompts, GREEDY)
            say(f"{best.name} of {speeds}")
            self.arms.runs[name] = decode(best)
            tuned[best.name] = speeds
        return {"tuned": tuned}

    def gap(self, request: dict[str, Any]) -> dict[str, Any]:
        found = preference_gap(
            self._suite.pair.target, request["prompt"], request["output"], GREEDY, request["one"], request["other"]
        )
        return {"gap": found}


def main() -> None:
    parser, parse = folder_and_threads(__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--assisted-lengths", type=int, nargs="+", default=list(Settings.assisted_lengths))
    parser.add_argument("--lookup-lengths", type=int, nargs="+", default=list(Settings.lookup_lengths))
    options = parse()
    torch.set_num_threads(options.threads)
    settings = Settings(
        max_new_tokens=options.max_new_tokens,
        ignore_eos=False,
        assisted_lengths=tuple(options.assisted_lengths),
        lookup_lengths=tuple(options.lookup_lengths),
    )
    engines: list[Engines] = []

    def start() -> tuple[Arms, dict[str, Any]]:
        engines.append(Engines(options.folder, options.dtype, settings, options.plain_only))
        facts = provenance()
        return engines[0].arms, {
            "engine": " and ".join(f"{name} {facts['versions'][name]}" for name in ("foretoken", "transformers")),
            "numerics": options.dtype,
            "eos_token_ids": list(engines[0]._suite.pair.eos_token_ids),
            "provenance": facts,
        }

    verbs = {"tune": lambda request: engines[0].tune(request), "gap": lambda request: engines[0].gap(request)}
    serve(start, verbs)


if __name__ == "__main__":
    main()
