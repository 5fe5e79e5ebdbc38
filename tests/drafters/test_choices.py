"""What drafters can learn from a step: the target's own token at every node, accepted or not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter, Needs, StepResult
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.testing import decode, toy_model
from foredraft.tree import DraftTree


class Probing(Drafter):
    """Drafts fixed trees and keeps what it is told."""

    name = "probing"

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], StepResult, torch.Tensor]] = []

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        return Needs(choices=True)

    def propose(self, rows: Sequence[Row], budgets: Sequence[int]) -> list[DraftTree]:
        paths = [[5, 6], [7], [5, 8]]
        return [DraftTree.from_paths(row.pending, paths).cut(budget) for row, budget in zip(rows, budgets, strict=True)]

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            before = row.token_ids[: len(row.token_ids) - len(result.emitted)]
            self.seen.append((before, result, result.features.top_ids(3, range(len(result.tree)))))


@pytest.mark.sample(2)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("acceptance", ["match", "standard"])
def test_choices_are_what_plain_decoding_would_emit_after_every_node(params: dict[str, float], acceptance: str) -> None:
    target = CausalLM(toy_model())
    drafter = Probing()
    sampling = SamplingParams(max_tokens=6, **params)
    requests = [([1, 2, 3], sampling), ([4, 5], sampling)]
    decode(target, drafter, requests, config=EngineConfig(acceptance=acceptance))
    assert len(drafter.seen) > 4
    for tokens, result, top_ids in drafter.seen:
        choices = result.features.choices
        assert len(choices) == len(result.tree) == len(top_ids)
        for node in range(len(result.tree)):
            text = [*tokens, *result.tree.path_tokens(node)]
            assert choices[node] == next_token(target, text, tokens, sampling, requests)
            if sampling.is_greedy:
                assert choices[node] == int(top_ids[node, 0])


def next_token(
    target: CausalLM,
    text: list[int],
    tokens: list[int],
    params: SamplingParams,
    requests: Sequence[tuple[list[int], object]],
) -> int:
    """Plain decoding's choice after a text, under the seed and positions of the row it belongs to."""
    engine = Engine(target, EmptyDrafter())
    prompt = next(list(prompt) for prompt, _ in requests if tokens[: len(prompt)] == prompt)
    row = engine.add_request(prompt, params)[0]
    row.extend(text[len(prompt) :])
    row.max_length += len(text)
    row.num_prompt_tokens = len(text)  # so that all of it is prefilled; the sampler was told what is output
    first = next(outputs[0] for outputs in engine.run() if outputs)
    return first.token_ids[0]
