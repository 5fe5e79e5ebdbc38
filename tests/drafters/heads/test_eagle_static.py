"""EAGLE's static tree, and output layers of frequent tokens alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_eagle import from_scratch

from eagle_heads import VOCAB_SIZE, HandsOn, kept_vocabulary, logits_of, model, random_head, target, trained
from foredraft import LLM, SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.heads.eagle import EagleDrafter
from foredraft.drafters.parts.reduced_output import rows_of_output
from foredraft.engine.drafter import DraftSize
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.errors import CheckpointError, ConfigError
from foredraft.heads.checkpoint import write_checkpoint
from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle_layouts import write_eagle
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.rank_tree import RankTree
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, toy_model
from foredraft.tree import DraftTree

EAGLE_TREE = RankTree.published("eagle")


def drafter(
    head: EagleHead, depth: int, tree: RankTree = EAGLE_TREE, lm: CausalLM | None = None, **options: Any
) -> EagleDrafter:
    lm = lm or target()
    return EagleDrafter(head, lm, tree=tree, target_vocab_size=lm.vocab_size, max_depth=depth, **options)


class Watched(HandsOn):
    """Hands everything on, and compares drafts of greedy rows with a head that is run from scratch."""

    def __init__(self, drafter: EagleDrafter) -> None:
        super().__init__(drafter)
        self.num_trees = 0

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        trees = self.drafter.propose(rows, budgets)
        for row, tree, budget in zip(rows, trees, budgets, strict=True):
            if row.sampler.is_greedy and len(row.token_ids) > 1:
                assert {tree.path_tokens(node) for node in range(1, len(tree))} == self.wanted(row, min(3, budget))
                self.num_trees += 1
        return trees

    def wanted(self, row: Row, depth: int) -> set[tuple[int, ...]]:
        """The tokens of every path of ranks."""
        tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        ranked: dict[tuple[int, ...], list[int]] = {}
        for path in sorted((path for path in EAGLE_TREE.paths if len(path) <= depth), key=len):
            above = path[:-1]
            if above not in ranked:
                output = from_scratch(self.drafter.head, row.token_ids, tokens[above])[1]
                distribution = logits_of(self.drafter.head, output).float()
                ranked[above] = distribution.argsort(descending=True, stable=True).tolist()
            tokens[path] = (*tokens[above], ranked[above][path[-1]])
        return {tokens[path] for path in tokens if path}


@pytest.mark.parametrize("name", ["trained", pytest.param("random", marks=pytest.mark.full)])
def test_drafts_are_those_of_a_head_that_is_run_from_scratch(name: str) -> None:
    """Ragged rows of which one samples, the whole published tree to its third level."""
    watched = Watched(drafter(random_head(1) if name == "random" else trained(1), 3))
    engine = Engine(target(), watched)
    with torch.inference_mode():
        for i, prompt in enumerate(PROMPTS[:4]):
            engine.add_request(prompt, replace(SAMPLED if i == 1 else GREEDY, max_tokens=8))
        list(engine.run())
    assert watched.num_trees >= 6


# -- configs -------------------------------------------------------------------------------------------------------


@cache
def plain_llm() -> LLM:
    return LLM(model())


def same_text(config: dict[str, Any], **params: Any) -> float:
    """Tokens per step of a config whose tokens are those of plain decoding."""
    prompt = {"prompt_token_ids": list(PROMPTS[0])}
    given = SamplingParams(**{"temperature": 0, "max_tokens": 20, **params})
    (want,) = plain_llm().generate(prompt, given)
    (got,) = plain_llm().with_speculative_config(config).generate(prompt, given)
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    return float(got.metrics.speculative_decoding["mean_acceptance_length"])


@pytest.mark.parametrize("method", ["EAGLE-1", "eagle2"])
def test_methods_of_one_head(method: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *write_eagle(trained(1)))
    config = {"method": method, "model": str(tmp_path)}
    assert same_text(config) > 3
    assert same_text({**config, "rejection_sample_method": "match", "num_speculative_tokens": 2}) > 1.8
    assert same_text(config, temperature=0.9, top_p=0.95, seed=1234) > 2


def test_trees_are_chosen_by_name() -> None:
    config = {"method": "eagle", "model": trained(1)}
    assert SpeculativeConfig(**config, speculative_token_tree="eagle").method == "eagle"
    for others in ({"speculative_token_tree": "eagle"}, {"speculative_token_tree": "3x2"}, {"max_draft_nodes": 4}):
        assert same_text({**config, **others}) > 2
    with pytest.raises(ConfigError, match="without"):
        same_text({**config, "speculative_token_tree": [[0, 1]]})


# -- frequent tokens alone -----------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("execution", ["eager", "packed"])
def test_rows_of_an_output_layer_are_those_of_the_whole(execution: str) -> None:
    own = CausalLM(toy_model(4096, dtype=torch.float32, hidden_size=64), execution=execution)
    vocabulary = DraftVocabulary.of(range(0, 4096, 3), 4096)
    reduced = rows_of_output(own.shadow.get_output_embeddings(), vocabulary)
    states = torch.randn(3, 64)
    whole = own.shadow.get_output_embeddings()(states)
    torch.testing.assert_close(reduced(states), whole[:, vocabulary.target_ids], rtol=0, atol=1e-4)
    assert not reduced.weight.requires_grad


def test_heads_and_models_draft_frequent_tokens_alone(tmp_path: Path) -> None:
    """What they know is accepted as before; nothing else is drafted."""
    kept_vocabulary().save(tmp_path / "tokens.json")
    known = set(kept_vocabulary().target_ids.tolist())
    file = str(tmp_path / "tokens.json")
    own = EagleDrafter(
        trained(1),
        target(),
        vocabulary=kept_vocabulary(),
        target_vocab_size=VOCAB_SIZE,
        policy=LengthPolicy(4),
        num_branches=3,
        reranks=True,
        max_nodes=12,
    )
    engine = Engine(target(), own)
    (row,) = engine.add_request(PROMPTS[0], replace(GREEDY, max_tokens=30))
    while not row.output_ids:
        engine.step()
    (tree,) = own.propose([row], [DraftSize(4)])
    assert set(tree.tokens[1:]) <= known
    for config in (
        {"method": "eagle2", "model": trained(1), "draft_vocabulary": file},
        {"method": "eagle", "model": trained(1), "draft_vocabulary": sorted(known)},
        {"method": "draft_model", "model": model(), "draft_vocabulary": file, "num_draft_branches": 3},
    ):
        assert same_text(config) > 3
        assert same_text(config, temperature=0.9, top_p=0.95, seed=1234) > 2
        assert same_text(config, temperature=0.7, repetition_penalty=1.2, seed=5) > 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.json", "cannot be read"),
        ([1, 2, 64], "another target"),
        ([-1, 2], "another target"),
        ({1, 2}, "give a file or a list"),
    ],
)
def test_vocabularies_that_cannot_be_are_refused(given: Any, message: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        LLM(model(), {"method": "eagle2", "model": trained(1), "draft_vocabulary": given})


def test_files_that_are_no_vocabulary_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    for content in ("{", "{}", "[]", '["a"]', "[true]"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(CheckpointError, match="draft vocabulary"):
            DraftVocabulary.load(file, 64)
    file.write_text(json.dumps([3, 1]), encoding="utf-8")
    assert DraftVocabulary.load(file, 64).target_ids.tolist() == [1, 3]
    with pytest.raises(ConfigError, match="leave draft_vocabulary"):
        LLM(model(), {"method": "eagle3", "model": trained(3), "draft_vocabulary": str(file)})
