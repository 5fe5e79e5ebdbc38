"""What pads a rectangle of rows reaches none of their nodes, even where the embedding of some token is NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from drafting import made
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine, EngineConfig
from foredraft.model.lm import CausalLM, Nodes
from foredraft.testing import GREEDY, SAMPLED, perturbed, toy_model
from foredraft.tree import DraftTree
from harness import random_ids

VOCAB_SIZE = 64
UNTRAINED = 0
"""A token whose embedding nobody has trained, as some published models have it: the number that zeroed memory holds."""
PATTERN = [token or 1 for token in random_ids(4, 7, VOCAB_SIZE)]
PROMPTS = (
    [token or 1 for token in random_ids(21, 1, VOCAB_SIZE)],
    PATTERN * 4,  # whose drafts are long
    [5],
    [token or 1 for token in random_ids(6, 2, VOCAB_SIZE)],
)


@cache
def target(has_untrained: bool) -> CausalLM:
    model = toy_model(VOCAB_SIZE)
    if has_untrained:
        with torch.no_grad():
            model.get_input_embeddings().weight[UNTRAINED] = torch.nan
    return CausalLM(model, execution="eager", probe=False)


def small(num_branches: int) -> Drafter:
    """A drafter whose model has the same untrained row."""
    model = perturbed(toy_model(VOCAB_SIZE), 0.1, seed=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[UNTRAINED] = torch.nan
    lm = CausalLM(model, execution="eager", probe=False)
    return DraftModelDrafter(lm, target_vocab_size=VOCAB_SIZE, num_branches=num_branches)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: made("ngram", 4, prompt_lookup_min=1),
    "ngram-tree": lambda: made("ngram", 4, prompt_lookup_min=1, num_prompt_lookup_candidates=3),
    "draft-model": lambda: small(1),
    "draft-model-tree": lambda: small(3),
}


def outputs(lm: CausalLM, drafter: Drafter, config: EngineConfig) -> tuple[list[list[int]], int]:
    """Texts of all prompts, greedy and sampled in turns, and how many steps gave a row no token; rows come and go."""
    engine = Engine(lm, drafter, config)
    rows = []
    for number, prompt in enumerate(PROMPTS):
        params = replace(GREEDY if number % 2 else SAMPLED, n=1, bad_words_ids=((UNTRAINED,),), ignore_eos=True)
        rows.append(engine.add_request(prompt, replace(params, max_tokens=8 + 6 * (number % 3)))[0])
    num_empty = 0
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            num_empty += not output.token_ids
    return [row.output_ids for row in rows], num_empty


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", DRAFTERS)
def test_an_untrained_token_that_no_row_has_spoils_none(method: str) -> None:
    """Ragged prompts in chunks, and ragged drafts."""
    config = EngineConfig(max_num_seqs=3, prefill_chunk_size=4, max_model_len=48)
    expected, _ = outputs(target(False), EmptyDrafter(), config)
    found, num_empty = outputs(target(True), DRAFTERS[method](), config)
    assert found == expected
    assert num_empty == 0


def test_padding_is_the_first_token_of_its_row() -> None:
    """Rows without any token have one of another row, which lies in none of their columns that count."""
    assert Nodes.from_chains([[7, 8, 9], [4], []]).tokens.tolist() == [[7, 8, 9], [4, 4, 4], [7, 7, 7]]
    trees = [DraftTree((7, 8, 9), (-1, 0, 0)), DraftTree.root(4)]
    assert Nodes.from_trees(trees).tokens.tolist() == [[7, 8, 9], [4, 4, 4]]
