"""What drafters learn: as new as the text, of the right places, kept where requests share it and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_drafters import KNOWING, VOCAB_SIZE, stored

from drafting import made, started
from foredraft import LLM, SamplingParams
from foredraft.drafters.lookup.nasd import NGramStorage
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.engine.drafter import Drafter, StepResult
from foredraft.errors import ConfigError, TokenizerMismatchError
from foredraft.retrieval.history import OutputHistory
from foredraft.testing import PROMPTS, toy_model
from foredraft.tree import DraftTree

# -- as new as the text --------------------------------------------------------------------------------------------


def proposal(drafter: Drafter, row: Any, budget: int = 8) -> DraftTree:
    return drafter.propose([row], [budget])[0]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tree.path_tokens(node) for node in range(1, len(tree))}


@pytest.mark.parametrize("method", ["ngram-tree", "suffix", "rest"])
def test_a_text_that_grew_is_drafted_for_like_one_that_was_given(method: str) -> None:
    drafter = KNOWING[method]()
    row = started(drafter, *PROMPTS[0])
    for emitted in ((8, 3, 1), (4,), (1, 5, 9, 2), (6, 8), (3,)):
        tree = proposal(drafter, row)
        row.token_ids += emitted
        drafter.observe([row], [StepResult(tree, (0,), emitted)])
        fresh = KNOWING[method]()
        whole = started(fresh, *row.token_ids)
        grown, given = proposal(drafter, row), proposal(fresh, whole)
        assert (grown.tokens, grown.parents, grown.scores) == (given.tokens, given.parents, given.scores)
    assert len(proposal(drafter, row)) > 1


def test_rest_reads_what_followed_the_end_of_the_text() -> None:
    """The pending token is part of the context, and the budget is the depth."""
    drafter = made("rest", 9, stored(), retrieval_match_min=2, retrieval_dynamic_index=False)
    assert paths(proposal(drafter, started(drafter, 60, 0, 1))) == {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 5)}
    assert paths(proposal(drafter, started(drafter, 60, 0, 1), 2)) == {(2,), (2, 3)}
    assert paths(proposal(drafter, started(drafter, 60, 61))) == set()


def test_rest_merges_the_datastore_with_the_text() -> None:
    drafter = made("rest", 1, stored(), retrieval_match_min=2)
    row = started(drafter, 5, 6, 50, 5, 6)
    assert paths(proposal(drafter, row)) == {(8,), (50,)}


def test_a_place_in_the_history_outlives_what_is_added_meanwhile() -> None:
    history = OutputHistory(8)
    history.add([1, 2, 3, 4])
    spot = history.match([1, 2])
    assert spot is not None
    history.add([1, 2, 9])
    assert {candidate.token: candidate.score for candidate in history.candidates(spot)} == {
        candidate.token: candidate.score for candidate in history.candidates(history.match([1, 2]))
    }


def test_an_output_that_was_right_is_forgotten_later() -> None:
    history = OutputHistory(6, max_outputs=2)
    for start in (10, 20):
        history.add(range(start, start + 4))
    drafter = SuffixDrafter(history=history)
    row = started(drafter, 1, 10, 11)
    tree = proposal(drafter, row)
    assert tree.tokens[1] == 12
    drafter.observe([row], [StepResult(tree, (0, 1), (12, 5))])
    history.add(range(30, 34))
    assert history.match([10, 11]) is not None
    assert history.match([20, 21]) is None


def test_every_node_of_a_tree_of_counts_follows_its_own_path() -> None:
    """Trigrams: what follows 1 7 is not what follows 2 7."""
    storage = NGramStorage(3, 2)
    storage.extend([0, 1, 7, 8, 0, 2, 7, 9, 0, 1, 7, 8, 0, 2, 7, 9, 0], [], first=1)
    tree = storage.draft([7, 50, 0], 3)
    assert paths(tree) == {(1,), (1, 7), (1, 7, 8), (2,), (2, 7), (2, 7, 9)}


# -- between requests ----------------------------------------------------------------------------------------------

LEARNING = ("suffix", "token_recycling", "nasd")


def drafted(llm: LLM, prompt: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    params = SamplingParams(max_tokens=30, temperature=0.0, seed=1)
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params)
    metrics = output.metrics.speculative_decoding
    return tuple(output.outputs[0].token_ids), metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]


def sharing(method: str, **keys: Any) -> LLM:
    return LLM(toy_model(VOCAB_SIZE), speculative_config={"method": method, "shared": True, **keys})


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", LEARNING)
def test_nothing_passes_from_one_call_to_the_next_unless_asked(method: str) -> None:
    """Where requests share what is learned, it helps the next call and changes no token."""
    llm = LLM(toy_model(VOCAB_SIZE), speculative_config={"method": method})
    first = drafted(llm, PROMPTS[0])
    drafted(llm, [*PROMPTS[0], *first[0][:20]])  # a request that knows how the other went on
    assert drafted(llm, PROMPTS[0]) == first
    together = sharing(method)
    before, after = drafted(together, PROMPTS[0]), drafted(together, PROMPTS[0])
    assert before[0] == after[0] == first[0]
    assert after[2] > before[2]


@pytest.mark.parametrize("method", LEARNING)
def test_a_state_file_survives_a_restart_and_is_of_one_vocabulary(method: str, tmp_path: Path) -> None:
    """A history was once read by a smaller model: without a tokenizer nothing told the two apart, and ids led out of
    the embedding. A place that cannot be written is refused before anything runs; `suffix` used to say so when
    everything had been generated."""
    file = str(tmp_path / "state")
    first, again = (drafted(sharing(method, state_file=file), PROMPTS[0]) for _ in range(2))
    assert first[0] == again[0]
    assert again[2] > first[2]
    assert max(first[0]) >= 32
    small = {"method": method, "shared": True, "state_file": file}
    with pytest.raises((TokenizerMismatchError, ConfigError), match="the target has 32"):
        drafted(LLM(toy_model(32), speculative_config=small), [1, 2, 1])
    with pytest.raises(ConfigError, match="cannot be written: it needs to be a file in a folder that exists"):
        sharing(method, state_file=str(tmp_path / "nowhere" / "state"))


@pytest.mark.parametrize("method", LEARNING)
def test_a_state_file_that_cannot_be_saved_costs_no_text(method: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    llm = sharing(method, state_file=str(folder / "state"))
    folder.rmdir()
    with pytest.warns(RuntimeWarning, match="cannot be (saved|written)"):
        assert len(drafted(llm, PROMPTS[0])[0]) == 30


def test_a_key_of_a_part_is_told_where_it_belongs() -> None:
    with pytest.raises(
        ConfigError, match=r"give it to one of the drafters: drafters=\[\{'method': 'rest', 'datastore': ...\}"
    ):
        LLM(toy_model(VOCAB_SIZE), speculative_config={"method": "rest+nasd", "datastore": "somewhere"})
