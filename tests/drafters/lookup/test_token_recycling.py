"""Token recycling: the matrix, the shape of the tree, what requests share, and what survives on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from drafting import made
from foredraft import LLM
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import drafter_factory
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.lookup.token_recycling import TokenRecyclingDrafter, best_tree, filled, last_of_all
from foredraft.drafters.parts.adjacency import AdjacencyMatrix
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.errors import CheckpointError, ConfigError
from foredraft.methods.rank_tree import RankTree
from foredraft.model.lm import CausalLM
from foredraft.testing import PROMPTS, decode, toy_model
from foredraft.tree import DraftTree
from toys import VOCAB_SIZE, target

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def drafter(**options: Any) -> TokenRecyclingDrafter:
    return made("token_recycling", 4, VOCAB_SIZE, max_draft_nodes=16, **options)


def num_steps(one: TokenRecyclingDrafter, prompt: tuple[int, ...] = PROMPTS[0]) -> int:
    return decode(target(), one, [(prompt, GREEDY)]).num_steps


# -- the shape -----------------------------------------------------------------------------------------------------


def test_a_small_shape_is_the_one_computed_by_hand() -> None:
    """Shares 0.5, 0.3, 0.1 and six nodes below the root: 0.5, 0.3, then 0.25, 0.15, 0.15 and 0.125."""
    tree = best_tree(7, 3, 3, (0.5, 0.3, 0.1))
    assert sorted(tree.paths) == [(0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0)]
    assert list(map(list, tree.children)) == [[1, 2], [3, 4], [5], [6], [], [], []]
    assert list(map(list, tree.levels)) == [[0], [1, 2], [3, 4, 5], [6]]


@st.composite
def matrices(draw: Any) -> AdjacencyMatrix:
    rows = draw(st.lists(st.lists(st.integers(0, 5), max_size=3, unique=True), min_size=6, max_size=6))
    matrix = AdjacencyMatrix(6, 3)
    for token, row in enumerate(rows):
        matrix.update([token], np.array([[*row, -1, -1, -1][:3]]))
    return matrix


def filled_slowly(tree: RankTree, pending: int, depth: int, matrix: AdjacencyMatrix) -> list[tuple[int, ...]]:
    """The paths of the tree, node by node."""
    paths: dict[tuple[int, ...], tuple[int, ...] | None] = {(): ()}
    for ranks in sorted(tree.paths, key=lambda ranks: (len(ranks), ranks)):
        above = paths[ranks[:-1]]
        found = -1 if above is None else int(matrix.candidates[(pending, *above)[-1], ranks[-1]])
        paths[ranks] = None if above is None or found < 0 or len(above) == depth else (*above, found)
    return [path for path in paths.values() if path is not None]


def tree_of(shape: RankTree, pending: int, depth: int, matrix: AdjacencyMatrix) -> DraftTree:
    return filled(cast("Row", SimpleNamespace(pending=pending)), shape, depth, matrix).tree("name")


@given(matrices(), st.integers(0, 5), st.integers(1, 20), st.integers(1, 5))
@settings(deadline=None)
def test_the_tree_is_filled_breadth_first_with_what_is_known(
    matrix: AdjacencyMatrix, pending: int, num_nodes: int, depth: int
) -> None:
    best = best_tree(num_nodes + 1, 4, 3)
    tree = tree_of(best, pending, depth, matrix)
    assert tree.tokens[0] == pending
    assert [tree.path_tokens(node) for node in range(len(tree))] == filled_slowly(best, pending, depth, matrix)


# -- the matrix ----------------------------------------------------------------------------------------------------


def test_of_equal_tokens_the_accepted_node_counts() -> None:
    assert last_of_all(5, (0, 2)) == [1, 3, 4, 0, 2]
    matrix = AdjacencyMatrix(9, 2)
    matrix.update([5, 6, 5], np.array([[1, 2], [3, 4], [7, 8]]))
    assert matrix.candidates[[5, 6, 0]].tolist() == [[7, 8], [3, 4], [-1, -1]]


def test_rows_are_the_targets_candidates_along_prompt_and_tree() -> None:
    """After one step: candidates behind every prompt token, its text in front, and behind every node of the draft."""
    one = drafter(num_candidates=4, initial_state="prompt")
    engine = Engine(target(), one)
    row = engine.add_request(PROMPTS[2], GREEDY)[0]
    engine.step()
    tree = one.propose([row], [9])[0]
    text = list(row.token_ids)
    engine.step()
    rows = row.state[one].matrix.candidates

    def best(tokens: list[int]) -> list[int]:
        with torch.no_grad():
            logits = toy_model(VOCAB_SIZE)(input_ids=torch.tensor([tokens])).logits[0, -1]
        return logits.topk(4).indices.tolist()

    assert len(tree) > 8
    for token in set(text) - set(tree.tokens):
        last = max(place for place in range(len(text) - 1) if text[place] == token)
        assert rows[token].tolist() == list(dict.fromkeys([text[last + 1], *best(text[: last + 1])]))[:4]
    seen: dict[int, list[list[int]]] = {}
    for node, token in enumerate(tree.tokens):
        seen.setdefault(token, []).append(best([*text, *tree.path_tokens(node)]))
    assert all(rows[token].tolist() in several for token, several in seen.items())


def test_the_vocabulary_is_asked_token_by_token() -> None:
    model = toy_model(VOCAB_SIZE)
    matrix = AdjacencyMatrix.of_vocabulary(CausalLM(model, execution="eager"), 3, batch_size=7)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(VOCAB_SIZE)[:, None]).logits[:, 0]
    assert matrix.candidates.tolist() == logits.topk(3).indices.tolist()


# -- requests ------------------------------------------------------------------------------------------------------


def test_the_state_of_the_vocabulary_is_kept_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    with_it = num_steps(drafter(initial_state="vocabulary", state_file=file))
    assert (AdjacencyMatrix.load(file, VOCAB_SIZE, 8).candidates >= 0).all()
    lm = target()
    before = lm.num_forwards
    Engine(lm, drafter(initial_state="vocabulary", state_file=file))
    assert lm.num_forwards == before  # read, not made again
    assert num_steps(drafter(state_file=file, initial_state="prompt")) == with_it


# -- files ---------------------------------------------------------------------------------------------------------


def saved(tmp_path: Path, vocab_size: int = 5) -> Path:
    matrix = AdjacencyMatrix(vocab_size, 3)
    matrix.update([0, 3], np.array([[1, 2, 3], [4, 0, 2]]))
    matrix.save(tmp_path / "matrix.safetensors")
    return tmp_path / "matrix.safetensors"


def test_a_saved_matrix_comes_back(tmp_path: Path) -> None:
    loaded = AdjacencyMatrix.load(saved(tmp_path), 5, 3).candidates
    assert loaded.tolist() == [[1, 2, 3], [-1] * 3, [-1] * 3, [4, 0, 2], [-1] * 3]
    assert AdjacencyMatrix.load(saved(tmp_path), 5, 2).candidates[3].tolist() == [4, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["matrix.safetensors"]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def out_of_range(path: Path) -> None:
    _rewrite(path, lambda candidates: candidates * 2)


def twins(path: Path) -> None:
    _rewrite(path, lambda candidates: np.maximum(candidates, 1))


def another_type(path: Path) -> None:
    _rewrite(path, lambda candidates: candidates.astype(np.int64))


def _rewrite(path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    candidates = AdjacencyMatrix.load(path, 5, 3).candidates
    save_file({"candidates": change(candidates)}, path, {"format": "foredraft token_recycling 1"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "cannot be read"),
        (truncated, "cannot be read"),
        (lambda path: path.write_text("no tensors"), "cannot be read"),
        (out_of_range, "outside of 0..4"),
        (twins, "twice"),
        (another_type, "not an int32 matrix"),
    ],
)
def test_damaged_and_foreign_files_are_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = saved(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        made("token_recycling", None, 5, num_candidates=3, state_file=path)


@pytest.mark.parametrize(("vocab_size", "num_candidates"), [(6, 3), (5, 4)])
def test_files_of_another_vocabulary_or_with_too_few_candidates_are_refused(
    tmp_path: Path, vocab_size: int, num_candidates: int
) -> None:
    with pytest.raises(ConfigError, match="contains 3 candidates for each of 5 tokens"):
        AdjacencyMatrix.load(saved(tmp_path), vocab_size, num_candidates)


def test_places_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state_file .* cannot be written"):
        drafter(shared=True, state_file=tmp_path / "no" / "where")
    with pytest.raises(CheckpointError, match="cannot be written"):
        AdjacencyMatrix(3, 2).save(tmp_path / "no" / "where")


# -- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "expected"), [({}, 16), ({"max_draft_nodes": 40}, 40)])
def test_the_tree_is_small_where_nodes_cost(keys: dict[str, int], expected: int) -> None:
    """80 nodes, as published, take three forwards of one in float32, and five at 4,096 tokens of context."""
    config = SpeculativeConfig(method="token_recycling", initial_state="vocabulary", **keys)
    made = drafter_factory(config, DrafterContext(target()))()
    engine = Engine(target(), made)
    (row,) = engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    assert len(made.propose([row], [9])[0]) == expected


def test_more_candidates_than_tokens_are_not_kept() -> None:
    engine = Engine(CausalLM(toy_model(3)), drafter := made("token_recycling", None, 3, num_candidates=8))
    (row,) = engine.add_request((1, 2), GREEDY)
    engine.step()
    assert row.state[drafter].matrix.num_candidates == engine.target.vocab_size == 3
    list(engine.run())
    assert row.is_finished


def test_a_model_of_the_zoo_brings_the_candidates_of_its_vocabulary() -> None:
    plain = LLM("zoo:tiny")
    steps = {}
    for state in ("auto", "prompt"):
        llm = plain.with_speculative_config({"method": "token_recycling", "initial_state": state})
        output = llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=30))[0]
        steps[state] = llm.profile.num_steps
        assert len(output.outputs[0].token_ids) == 30
    assert steps["auto"] < steps["prompt"]
