"""The functions that the survey's listings call, against cases computed by hand and plain forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from classic_models import PROMPT, target
from torch import Tensor
from transformers import LogitsProcessorList, SuppressTokensLogitsProcessor
from transformers.generation import candidate_generator

from foredraft import zoo
from foredraft.classic.adapters import adapter_of
from foredraft.classic.reader import feed
from foredraft.classic.survey import (
    TOPK,
    Datastore,
    PromptLookupCandidateGenerator,
    generate_candidates,
    generate_medusa_buffers,
    tree_decoding,
)
from foredraft.errors import ConfigError, ShapeError, TreeError
from foredraft.retrieval.build import from_tokens

CHOICES = [[0], [0, 0], [1], [0, 1], [0, 0, 0]]
"""Nodes 1 and 2 below the root, 3 and 4 below node 1, 5 below node 3."""

# -- Medusa ------------------------------------------------------------------------------------------------------------


def test_buffers_of_a_tree_by_hand() -> None:
    made = generate_medusa_buffers(CHOICES)
    assert made["medusa_attn_mask"].shape == (1, 1, 6, 6)
    assert made["medusa_attn_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]
    assert made["tree_indices"].tolist() == [0, 1, 2, 11, 12, 21]
    assert made["medusa_position_ids"].tolist() == [0, 1, 1, 2, 2, 3]
    assert made["retrieve_indices"].tolist() == [[0, 1, 3, 5], [0, 1, 4, -1], [0, 2, -1, -1]]


@pytest.mark.parametrize("choices", [[[0, 0]], [[0], [0]], [[]], [[TOPK]]])
def test_choices_that_are_no_tree_are_refused(choices: list[list[int]]) -> None:
    with pytest.raises(TreeError, match="medusa_choices"):
        generate_medusa_buffers(choices)


def scores(best: int, size: int = 16) -> Tensor:
    """Logits whose order from ``best`` on is that of the tokens: 5, 6, 7, .., and around."""
    return -((torch.arange(size) - best) % size).float()


def test_candidates_of_a_tree_by_hand() -> None:
    """The target says 5; the heads 3, 4, .., 7, 8, .. and 1, 2, ..; only the last place counts."""
    made = generate_medusa_buffers(CHOICES)
    logits = torch.stack([scores(9), scores(5)])[None]
    by_head = torch.stack([torch.stack([scores(0), scores(best)])[None] for best in (3, 7, 1)])
    candidates, tree_candidates = generate_candidates(
        by_head,
        logits,
        made["tree_indices"],
        made["retrieve_indices"],
    )
    assert tree_candidates.tolist() == [[5, 3, 4, 7, 8, 1]]
    assert candidates.tolist() == [[5, 3, 7, 1], [5, 3, 8, 0], [5, 4, 0, 0]]
    with pytest.raises(ShapeError, match="3 levels deep, but there are logits of 2 heads"):
        generate_candidates(by_head[:2], logits, made["tree_indices"], made["retrieve_indices"])


def plain(text: list[int]) -> Tensor:
    with torch.no_grad():
        return target()(input_ids=torch.tensor([text]), output_hidden_states=True)


def test_tree_decoding_gives_the_logits_of_every_path() -> None:
    """Of the target and of two heads; what is committed afterwards is the text of a plain forward."""
    made = generate_medusa_buffers(CHOICES)
    rows = made["retrieve_indices"].tolist()
    tokens = [5, 3, 4, 7, 8, 1]
    matrices = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0), dtype=target().dtype)

    def heads(hidden: Tensor) -> Tensor:
        return torch.stack([hidden @ matrix for matrix in matrices])

    cache = adapter_of(target()).target.new_cache(1)
    feed(adapter_of(target()), cache, PROMPT)
    medusa_logits, logits, outputs = tree_decoding(
        torch.tensor([tokens]),
        cache,
        made["medusa_position_ids"],
        made["retrieve_indices"],
        model=target(),
        heads=heads,
    )
    assert outputs.shape == (1, 6, 64)
    assert logits.shape == (3, 4, 64)
    assert medusa_logits.shape == (2, 3, 4, 64)
    compared = 0
    for row, path in enumerate(rows):
        for depth, node in enumerate(path):
            if node < 0:
                continue
            wanted = plain([*PROMPT, *(tokens[i] for i in path[: depth + 1])])
            torch.testing.assert_close(logits[row, depth], wanted.logits[0, -1], rtol=0, atol=1e-9)
            torch.testing.assert_close(outputs[0, node], logits[row, depth])
            own = heads(wanted.hidden_states[-1][0, -1])
            torch.testing.assert_close(medusa_logits[:, row, depth], own, rtol=0, atol=1e-9)
            compared += 1
    assert compared == 9
    cache.commit([rows[0]])
    after = feed(adapter_of(target()), cache, [2])
    torch.testing.assert_close(after[0], plain([*PROMPT, 5, 3, 7, 1, 2]).logits[0, -1], rtol=0, atol=1e-9)


def test_positions_and_paths_of_two_trees_are_refused() -> None:
    made, cache = generate_medusa_buffers(CHOICES), adapter_of(target()).target.new_cache(1)
    tokens = torch.tensor([[5, 3, 4, 7, 8, 1]])
    for positions, paths, message in (
        (made["medusa_position_ids"] + 1, made["retrieve_indices"], "medusa_position_ids are"),
        (made["medusa_position_ids"], made["retrieve_indices"][:2], "node 2 of 6 is on no path"),
    ):
        with pytest.raises(TreeError, match=message):
            tree_decoding(tokens, cache, positions, paths, model=target())


def test_the_three_together_draft_and_verify_as_the_target_decodes() -> None:
    """A step of Medusa on the toy, with heads on board: what is accepted of the tree is what greedy decoding says."""
    model, _, tokenizer = zoo.load("tiny")
    text = tokenizer("Once upon a time").input_ids
    with torch.no_grad():
        ids = model.generate(torch.tensor([text]), max_new_tokens=4, do_sample=False, pad_token_id=0)[0].tolist()
    wanted = ids[len(text) :]
    made = generate_medusa_buffers([[rank] for rank in range(TOPK)])
    cache = adapter_of(model).target.new_cache(1)
    logits = feed(adapter_of(model), cache, text)
    by_head = torch.zeros(1, 1, 1, model.config.vocab_size)
    by_head[0, 0, 0, wanted[1]] = 1.0
    _, tree_candidates = generate_candidates(by_head, logits[None], made["tree_indices"], made["retrieve_indices"])
    _, found, _ = tree_decoding(
        tree_candidates, cache, made["medusa_position_ids"], made["retrieve_indices"], model=model
    )
    (row,) = [i for i, path in enumerate(made["retrieve_indices"].tolist()) if path[-1] == 1]
    assert tree_candidates[0, :2].tolist() == wanted[:2]
    assert found[row].argmax(-1).tolist() == wanted[1:3]


# -- REST --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def datastore(tmp_path: Path) -> Datastore:
    from_tokens([[1, 2, 3, 4], [9, 1, 2, 3, 4], [8, 1, 2, 3, 5], [7, 1, 2, 6, 4]], tmp_path, vocab_size=16)
    return Datastore(tmp_path)


def test_a_search_by_hand(datastore: Datastore) -> None:
    """After 1 2: three times 3, of these twice 4 and once 5; once 6, and then 4."""
    this_token, max_num_draft = [0, 1, 2], 64
    retrieved_token_list, _draft_attn_mask, _tree_indices, _draft_position_ids, _retrieve_indices = datastore.search(
        this_token, choices=max_num_draft
    )
    assert sorted(retrieved_token_list) == [[3, 4], [3, 5], [6, 4]]
    assert retrieved_token_list == [path for path in retrieved_token_list if -2 not in path]
    by_depth = [list(dict.fromkeys(path[depth] for path in retrieved_token_list)) for depth in range(2)]
    flat = [2, *by_depth[0], *[None] * (2 - len(by_depth[0])), *by_depth[1]]
    tokens = [flat[place] for place in _tree_indices.tolist()]
    assert tokens[0] == 2
    assert [[tokens[node] for node in path[1:]] for path in _retrieve_indices.tolist()] == retrieved_token_list
    assert sorted(_draft_position_ids.tolist()) == [0, 1, 1, 2, 2, 2]
    for path in _retrieve_indices.tolist():
        for depth, node in enumerate(path):
            assert sorted(_draft_attn_mask[node].nonzero().reshape(-1).tolist()) == sorted(path[: depth + 1])


def test_a_search_keeps_the_most_frequent_and_pads_short_paths(datastore: Datastore) -> None:
    paths, mask, places, depths, nodes = datastore.search([1, 2], choices=2)
    assert (paths, mask.tolist()) == ([[3, 4]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    assert (places.tolist(), depths.tolist(), nodes.tolist()) == ([0, 1, 2], [0, 1, 2], [[0, 1, 2]])
    paths, _, _, _, nodes = datastore.search([1, 2], choices=3)
    assert sorted(paths) == [[3, 4], [6, -2]]
    assert sorted(map(len, nodes.tolist())) == [3, 3]
    paths, mask, places, depths, nodes = datastore.search([15])
    assert (paths, mask.tolist(), places.tolist(), depths.tolist(), nodes.tolist()) == ([], [[1.0]], [0], [0], [[0]])
    for bad in ({"token_list": []}, {"token_list": [1], "choices": 0}):
        with pytest.raises(ConfigError):
            datastore.search(**bad)


# -- prompt lookup -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text", "chosen"),
    [
        ({}, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [3, 9, 1, 2, 4, 9, 1, 2]),
        ({"match": "latest"}, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),
        ({"num_output_tokens": 2}, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [3, 9]),
        ({"max_matching_ngram_size": 3}, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # 9 1 2 stood before 4
        ({"max_matching_ngram_size": 3}, [5, 6, 7, 6], [7, 6]),  # one token is enough
        ({"max_length": 3}, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [3]),
        ({"max_length": 2}, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], []),
        ({}, [1, 2, 3], []),
        ({}, [1], []),
    ],
)
def test_candidates_of_prompt_lookup_by_hand(options: dict[str, Any], text: list[int], chosen: list[int]) -> None:
    candidates, logits = PromptLookupCandidateGenerator(**options).get_candidates(torch.tensor([text]))
    assert candidates.tolist() == [[*text, *chosen]]
    assert logits is None
    if "match" not in options:  # the same as the class of transformers
        theirs = candidate_generator.PromptLookupCandidateGenerator(**{"max_length": 1 << 30, **options})
        assert theirs.get_candidates(torch.tensor([text]))[0].tolist() == candidates.tolist()


def test_prompt_lookup_is_a_generator_of_transformers_with_its_arguments() -> None:
    """Its arguments by place; ends, forbidden tokens and the last token of a text as transformers does."""
    text = torch.tensor([[1, 2, 3, 9, 1, 2, 4, 9, 1, 2]])
    forbid = LogitsProcessorList([SuppressTokensLogitsProcessor([3])])
    for arguments in (
        (torch.tensor([9]), 5, 2, 100),
        (torch.tensor([3]), 5, 2, 100),
        (None, 5, 2, 100, forbid, 16),
        (torch.tensor([9]), 5, 2, 100, forbid, 16),
        (None, 5, 2, 11),
    ):
        theirs = candidate_generator.PromptLookupCandidateGenerator(*arguments)
        ours = PromptLookupCandidateGenerator(*arguments)
        assert isinstance(ours, candidate_generator.CandidateGenerator)
        wanted, _ = theirs.get_candidates(text, is_first_iteration=True)
        assert ours.get_candidates(text, is_first_iteration=True)[0].tolist() == wanted.tolist()
        ours.update_candidate_strategy(text, torch.zeros(1, 10, 16), 3)
    single = PromptLookupCandidateGenerator(9, 5)
    assert single.get_candidates(text)[0].tolist() == [[*text[0].tolist(), 3]]


@pytest.mark.parametrize(
    "options",
    [
        {"num_output_tokens": 0},
        {"max_matching_ngram_size": 0},
        {"match": "first"},
        {"logits_processor": LogitsProcessorList()},
    ],
)
def test_prompt_lookup_refuses_what_means_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PromptLookupCandidateGenerator(**options)
    with pytest.raises(ShapeError, match="must be one text"):
        PromptLookupCandidateGenerator().get_candidates(torch.zeros(2, 3, dtype=torch.long))
