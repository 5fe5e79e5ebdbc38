"""The automaton and the history count what brute force counts; requests share nothing unless asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import StubRow, begin, end, made
from foredraft import LLM
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.engine.drafter import StepResult
from foredraft.errors import ConfigError, DatastoreError, TokenizerMismatchError
from foredraft.retrieval import history as history_of
from foredraft.retrieval.automaton import SuffixAutomaton
from foredraft.retrieval.growth import GrowthRoot, TreeLimits, grow
from foredraft.retrieval.history import OutputHistory
from foredraft.retrieval.trie import candidates_of
from foredraft.tree import DraftTree

TEXTS = st.integers(0, 4).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=40))


def count(texts: Sequence[Sequence[int]], string: Sequence[int]) -> int:
    size = len(string)
    return sum(list(text[i : i + size]) == list(string) for text in texts for i in range(len(text) - size + 1))


# -- automaton ---------------------------------------------------------------------------------------------------------


@given(text=TEXTS, max_length=st.sampled_from([2, 4, 24]))
@settings(max_examples=120, deadline=None)
def test_the_match_is_the_longest_end_that_occurred_before(text: list[int], max_length: int) -> None:
    automaton = SuffixAutomaton(max_length)
    automaton.extend(text)
    longest = max((n for n in range(1, len(text)) if count([text[:-1]], text[-n:]) > 0), default=0)
    place = automaton.match()
    assert (0 if place is None else place.length) == min(longest, max_length - 1)


def followers(text: list[int], length: int) -> dict[int, tuple[float, int]]:
    """Score and latest end of the tokens that followed the last ``length`` tokens, by looking everywhere.

    A token has n / (total + 1 / length), and shares in the rest by the longest shorter context that occurred more
    often; of four contexts at most.
    """
    found: dict[int, tuple[float, int]] = {}
    rest = 1.0

    def ends(size: int) -> list[int]:
        return [at for at in range(size, len(text) + 1) if text[at - size : at] == text[len(text) - size :]]

    for _ in range(4):
        after: dict[int, list[int]] = defaultdict(list)
        for at in ends(length)[:-1]:
            after[text[at]].append(at + 1)
        total = sum(map(len, after.values()))
        for token, places in after.items():
            score, latest = found.get(token, (0.0, max(places)))
            found[token] = score + rest * len(places) * length / (total * length + 1), latest
        rest /= total * length + 1
        length = next((size for size in range(length - 1, 0, -1) if len(ends(size)) > total + 1), 0)
        if not length:
            break
    return found


@given(text=TEXTS, size=st.integers(0, 40), max_length=st.sampled_from([2, 3, 5, 24]))
@settings(max_examples=200, deadline=None)
def test_candidates_are_counted_in_all_contexts(text: list[int], size: int, max_length: int) -> None:
    """Of a text that was given in two parts."""
    automaton = SuffixAutomaton(max_length)
    automaton.extend(text[:size])
    automaton.extend(text)
    place = automaton.match()
    if place is not None:
        found, wanted = automaton.candidates(place), followers(text, place.length)
        assert {one.token: one.score for one in found} == pytest.approx({token: wanted[token][0] for token in wanted})
        assert {one.token: one.recency for one in found} == {token: wanted[token][1] for token in wanted}


def test_a_period_goes_on_beyond_the_end_of_the_text() -> None:
    automaton = SuffixAutomaton(24)
    automaton.extend([1, 2, 3] * 4)
    place = automaton.match()
    assert place is not None
    tree = grow(3, [GrowthRoot(automaton.candidates, place)], TreeLimits(11, 10, 1))
    assert tree.tokens == (3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1)


def test_work_does_not_grow_with_the_text() -> None:
    """Link steps per token are bounded, also in a run of one token, where the chain of links is as long as the text."""
    steps = 0

    class Counting(list):
        def __getitem__(self, item: Any) -> Any:
            nonlocal steps
            steps += 1
            return super().__getitem__(item)

    for text in ([5] * 3000, np.random.default_rng(0).integers(0, 50, 3000).tolist(), [1, 2, 3, 4, 5] * 600):
        automaton = SuffixAutomaton(24)
        automaton._link = Counting(automaton._link)
        steps = 0
        automaton.extend(text)
        assert len(automaton) <= 2 * len(text)
        assert steps < 60 * len(text)
        steps = 0
        automaton.extend([*text, 5])
        place = automaton.match()
        if place is not None:
            grow(5, [GrowthRoot(automaton.candidates, place)], TreeLimits(16, 15))
        assert steps < 2500


def test_a_token_that_anything_may_follow_costs_no_more() -> None:
    """One token before each of 3,000 others: a proposal once weighed them all, 4.4 ms at 128,000 tokens of text."""
    automaton = SuffixAutomaton(24)
    automaton.extend([token for other in range(1, 3001) for token in (0, other)] + [0])
    place = automaton.match()
    assert place is not None
    assert {c.token for c in automaton.candidates(place)} == {*range(1, 17), *range(2985, 3001)}


# -- growth ------------------------------------------------------------------------------------------------------------


def test_equal_proposals_of_two_sources_are_one_node() -> None:
    first = DraftTree((9, 1, 2), (-1, 0, 1), scores=(1.0, 0.5, 0.25))
    second = DraftTree((9, 1, 3), (-1, 0, 1), scores=(1.0, 0.8, 0.4))
    roots = [GrowthRoot(candidates_of(tree), 0) for tree in (first, second)]
    tree = grow(9, roots, TreeLimits(8, 4))
    assert (tree.tokens, tree.parents) == ((9, 1, 2, 3), (-1, 0, 1, 1))
    assert tree.scores == pytest.approx((1.0, 0.8, 0.4, 0.4))


# -- history -----------------------------------------------------------------------------------------------------------


def check_tree(history: OutputHistory, texts: list[list[int]]) -> None:
    """Counts are right, no node is left over, no split stays that nothing needs."""

    def visit(node: Any, string: bytes) -> None:
        for child in node.children.values():
            whole = string + child.label
            assert child.count == count(texts, np.frombuffer(whole, ">u4").tolist())
            assert len(child.children) != 1 or next(iter(child.children.values())).count < child.count
            visit(child, whole)

    assert history.tree.root.count == sum(map(len, texts))
    visit(history.tree.root, b"")


@given(texts=st.lists(TEXTS, min_size=1, max_size=7), depth=st.sampled_from([2, 3, 6, 10]), kept=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_the_history_counts_what_it_keeps(texts: list[list[int]], depth: int, kept: int) -> None:
    history = OutputHistory(depth, max_outputs=kept)
    for number, text in enumerate(texts, 1):
        history.add(text)
        check_tree(history, texts[max(0, number - kept) : number])
    remembered = texts[-kept:]
    for text in texts:
        spot = history.match(text)
        longest = [
            n for n in range(1, min(len(text), depth // 2) + 1) if count([t[:-1] for t in remembered], text[-n:])
        ]
        assert (0 if spot is None else len(spot.string) // 4) == max(longest, default=0)


def test_the_history_is_bounded_and_forgets_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    history = OutputHistory(6, max_outputs=2)
    history.add([1, 2, 3])
    history.add([4, 5, 6])
    spot = history.match([1, 2])
    assert spot is not None
    history.touch(spot)
    history.add([7, 8, 9])
    assert history.match([4, 5]) is None
    assert history.match([1, 2]) is not None
    monkeypatch.setattr(history_of, "MAX_TOKENS", 10)
    small = OutputHistory(6)
    for start in range(20):
        small.add(range(start, start + 4))
        assert small.num_tokens <= 10
    small.add(range(100))
    assert small.num_tokens == 10


def test_a_continuation_goes_on_beyond_the_depth() -> None:
    history = OutputHistory(8)
    history.add(range(100, 140))
    spot = history.match([100, 101, 102, 103])
    assert spot is not None
    assert grow(103, [GrowthRoot(history.candidates, spot)], TreeLimits(17, 16)).tokens == tuple(range(103, 120))


def test_a_history_survives_a_restart(tmp_path: Path) -> None:
    history = OutputHistory(8, fingerprint="a")
    for start in range(5):
        history.add(range(start, start + 20))
    history.save(tmp_path / "history")
    again = OutputHistory(8, fingerprint="a")
    again.load(tmp_path / "history")
    check_tree(again, [list(range(start, start + 20)) for start in range(5)])
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(TokenizerMismatchError, match="another tokenizer"):
        OutputHistory(8, fingerprint="b").load(tmp_path / "history")
    for content in (b"", b"nonsense", (tmp_path / "history").read_bytes()[:-50]):
        (tmp_path / "damaged").write_bytes(content)
        with pytest.raises(DatastoreError, match="damaged or not a history"):
            OutputHistory(8).load(tmp_path / "damaged")
    with pytest.raises(DatastoreError, match="does not exist"):
        OutputHistory(8).load(tmp_path / "nothing")
    with pytest.raises(DatastoreError, match="cannot be saved"):
        history.save(tmp_path / "nowhere" / "history")


def test_many_threads_may_use_one_history(tmp_path: Path) -> None:
    history = OutputHistory(8, max_outputs=5)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(60):
                history.add(random.integers(0, 4, 20).tolist())
                spot = history.match(random.integers(0, 4, 6).tolist())
                if spot is not None:
                    grow(0, [GrowthRoot(history.candidates, spot)], TreeLimits(12, 10))
                    history.touch(spot)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    history.save(tmp_path / "history")
    with np.load(tmp_path / "history") as saved:
        check_tree(history, [text.tolist() for text in np.split(saved["tokens"], saved["ends"][:-1])])


# -- drafter -----------------------------------------------------------------------------------------------------------


def row(row_id: int, prompt: Sequence[int], output: Sequence[int] = ()) -> Any:
    return StubRow(row_id, [*prompt, *output], num_output_tokens=len(output))


def drafted(drafter: SuffixDrafter, one: Any) -> tuple[int, ...]:
    begin(drafter, [one])
    (tree,) = drafter.propose([one], [8])
    drafter.observe([one], [StepResult(tree, (0,), (one.token_ids[-1],))])
    return tree.tokens[1:]


def test_shared_requests_learn_from_outputs_and_not_from_prompts() -> None:
    history = OutputHistory(24)
    drafter = SuffixDrafter(history=history)
    first = row(1, [40, 41, 42, 43], [1, 2, 3, 4, 5, 6])
    drafted(drafter, first)
    end(first)
    assert drafted(drafter, row(2, [9, 1, 2, 3])) == (4, 5, 6)
    assert drafted(drafter, row(3, [9, 40, 41])) == ()


def test_a_match_of_n_tokens_is_worth_so_many_drafted_ones() -> None:
    text = [*range(1, 30), 99, 1, 2]
    for factor, depth in ((0.5, 1), (1.0, 2), (3.0, 6)):
        drafter = made("suffix", suffix_decoding_max_spec_factor=factor, suffix_decoding_min_token_prob=0.0)
        one = row(0, text)
        begin(drafter, [one])
        assert drafter.propose([one], [20])[0].depth == depth


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "suffix", "state_file": "x"}, "shared=true"),
        ({"method": "suffix", "rejection_sample_method": "block"}, "accepts only chains"),
        ({"method": "rest", "num_speculative_tokens": 65}, "at most 64"),
        ({"method": "rest", "retrieval_match_min": 9, "retrieval_match_max": 3}, "retrieval_match_min=9 is more than"),
        ({"method": "rest", "retrieval_max_hits": 0}, "retrieval_max_hits"),
        ({"method": "rest", "datastore": "/nowhere"}, "which does not exist"),
        ({"method": "ngram", "datastore": "x"}, "only for rest"),
    ],
)
def test_configs_that_cannot_work_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DatastoreError), match=message):
        LLM("zoo:tiny", config)
