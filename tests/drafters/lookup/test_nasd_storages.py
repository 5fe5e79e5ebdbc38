"""The forms of n-gram storages: one level, random tokens for unknown contexts, one for all requests, kept in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from drafting import StubRow, begin, end, made, started
from foredraft.config.engine import EngineConfig
from foredraft.drafters.lookup.nasd import NasdDrafter, NGramStorage
from foredraft.engine.drafter import StepResult
from foredraft.engine.engine import Engine
from foredraft.errors import CheckpointError, ConfigError
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.testing import GREEDY, PROMPTS
from foredraft.tree import DraftTree
from toys import VOCAB_SIZE, target


def proposed(drafter: NasdDrafter, row: Any, budget: int = 9) -> tuple[int, ...]:
    """The drafted tokens."""
    return drafter.propose([row], [budget])[0].tokens[1:]


# --- one level -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=25), st.integers(2, 4))
def test_a_single_level_knows_whole_contexts_alone(tokens: list[int], ngram_size: int) -> None:
    """Against counting: the most frequent successor of the last n - 1 tokens, the most recent one among equals."""
    drafter = made("nasd", 1, ngram_size=ngram_size, storage="single")
    length = ngram_size - 1
    ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
    followers = [tokens[end] for end in ends]
    most = [token for token in followers if followers.count(token) == max(map(followers.count, followers))]
    assert proposed(drafter, started(drafter, *tokens)) == tuple(most[-1:])


# --- unknown contexts ----------------------------------------------------------------------------------------------


def random_drafter(**options: Any) -> NasdDrafter:
    return made("nasd", 6, unknown="random", vocab_size=VOCAB_SIZE, **options)


def test_an_unknown_context_gets_a_token_of_seed_and_position() -> None:
    drafter = random_drafter()
    alone = proposed(drafter, started(drafter, 1, 2, 3))
    assert len(alone) == 6
    assert set(alone) <= set(range(VOCAB_SIZE))
    again, others = started(drafter, 4, 5, 6, id=2), started(drafter, 4, 5, 6, id=3, seed=4)
    assert proposed(drafter, again) == alone  # another text of that length, in a drafter that has drafted before
    assert proposed(drafter, others) != alone
    assert proposed(drafter, started(drafter, 4, 5, 6, 7, id=4)) != alone
    with pytest.raises(ConfigError, match="need the vocabulary size of the target"):
        made("nasd", unknown="random")


def test_what_is_known_is_drafted_before_and_after_a_random_token() -> None:
    drafter = random_drafter(ngram_size=2)
    row = started(drafter, 1, 2, 9)
    (guess, *_) = proposed(drafter, row)
    drafter = random_drafter(ngram_size=2)
    row = started(drafter, guess, 8, 9)
    assert proposed(drafter, row, 3) == (guess, 8, 9)


# --- one storage for all requests ----------------------------------------------------------------------------------


def test_what_is_shared_lives_until_it_is_reset() -> None:
    drafter = made("nasd", 2, shared=True)
    first = started(drafter, 1, 2, 3)
    end(first)
    assert proposed(drafter, started(drafter, 9, 1, id=2)) == (2, 3)
    drafter.reset()
    assert proposed(drafter, started(drafter, 8, 1, id=3)) == ()
    assert NasdDrafter().learned is None


def num_observations(drafter: NasdDrafter, token: int) -> float:
    """Tokens that were counted after a token, as they are saved."""
    with TemporaryDirectory() as folder:
        drafter.learned.save(Path(folder) / "counts", VOCAB_SIZE)
        saved = load_file(Path(folder) / "counts")
    return dict(zip(saved["contexts1"][:, 0].tolist(), saved["totals1"].tolist(), strict=True))[token]


def test_a_prompt_counts_once_for_all_its_samples() -> None:
    drafter = made("nasd", 2, shared=True, filler_top_k=1)
    row = started(drafter, 1, 2, 3)
    copy: Any = StubRow(2, [1, 2, 3], state={drafter: row.state[drafter].copied()})
    begin(drafter, [copy])
    assert num_observations(drafter, 1) == 1
    assert proposed(drafter, copy) == ()
    copy.token_ids.append(1)
    drafter.observe([copy], [StepResult(DraftTree.root(3), (0,), (1,))])
    assert proposed(drafter, copy) == (2, 3)


def test_the_last_tokens_of_a_row_count_too() -> None:
    """A drafter is told nothing of the step that ends a row; what it said is for the next one to know."""
    drafter = made("nasd", 2, shared=True, filler_top_k=1)
    row, other = started(drafter, 1, 2), started(drafter, 7, id=2)
    row.token_ids += [8, 9]
    end(row, other)
    assert proposed(drafter, started(drafter, 2, id=3)) == (8, 9)
    assert num_observations(drafter, 1) == 1


def test_a_prefix_that_is_reused_counts_once() -> None:
    drafter = made("nasd", 2, shared=True, filler_top_k=1)
    first = started(drafter, 1, 2, 3, 4)
    kept, _ = first.state[drafter].cut(3)
    end(first)
    known, num_tokens = kept.cut(3)
    assert num_tokens == 3
    begin(drafter, [StubRow(2, [1, 2, 3, 1, 2], state={drafter: known})])
    assert (num_observations(drafter, 1), num_observations(drafter, 2), num_observations(drafter, 3)) == (2, 1, 2)
    drafter.reset()
    begin(drafter, [StubRow(3, [1, 2, 3, 1], state={drafter: kept.cut(3)[0]})])
    assert num_observations(drafter, 1) == 1  # what was counted then is not here any more


def test_a_text_that_goes_on_counts_once_with_what_ended_it() -> None:
    """The last step of a row, of which a drafter is told nothing, as well; but for its last token, in no cache."""
    drafter = made("nasd", 4, shared=True, filler_top_k=1)
    engine = Engine(target(), drafter, prefixes=PrefixStore(2))
    (first,) = engine.add_request(PROMPTS[0], GREEDY)
    list(engine.run())
    (second,) = engine.add_request([*first.token_ids, 7, 5], GREEDY)
    list(engine.run())
    assert second.num_cached_tokens >= len(first.token_ids) - 1
    known = second.token_ids[:-1]
    counted = Counter([*known, first.token_ids[-2]])
    assert {token: num_observations(drafter, token) for token in known} == counted


def test_a_prompt_that_was_not_read_to_its_end_does_not_count() -> None:
    drafter = made("nasd", 4, shared=True, filler_top_k=1)
    engine = Engine(target(), drafter, EngineConfig(prefill_chunk_size=4), prefixes=PrefixStore(2))
    engine.add_request(PROMPTS[0], GREEDY)
    list(engine.run())
    before = num_observations(drafter, 3)
    (row,) = engine.add_request([*PROMPTS[0], *[3, 8] * 10], GREEDY)
    engine.step()
    assert 0 < row.num_prefilled < row.num_prompt_to_read
    engine.abort(row.request_id)
    assert num_observations(drafter, 3) == before


# --- the file ------------------------------------------------------------------------------------------------------

texts = st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=12), min_size=1, max_size=4)


@settings(max_examples=20)
@given(texts, st.integers(2, 4), st.integers(1, 3), st.sampled_from(["levels", "single"]))
def test_a_file_goes_on_as_if_nothing_had_ended(
    tmp_path_factory: pytest.TempPathFactory, several: list[list[int]], ngram_size: int, branches: int, storage: str
) -> None:
    file = tmp_path_factory.mktemp("state") / "storage"
    kept, loaded = (NGramStorage(ngram_size, branches, storage=storage, filler_weight=0.3) for _ in range(2))
    for text in several[:-1]:
        kept.extend(text, [[token, 5 - token] for token in text[1:]], 1)
    kept.save(file, 6)
    loaded.load(file, 6)
    for one in (kept, loaded):
        one.extend(several[-1], [], 1)
    for text in several:
        before, after = kept.draft(text, 4), loaded.draft(text, 4)
        assert (before.tokens, before.parents, before.scores) == (after.tokens, after.parents, after.scores)


def saved(folder: Path) -> Path:
    storage = NGramStorage(3, 1)
    storage.extend([1, 2, 3, 1, 2, 4], [], 1)
    storage.save(folder / "storage", 5)
    return folder / "storage"


def edited(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        arrays = load_file(path)
        about = {"format": "foredraft nasd 1", "vocab_size": "5", "ngram_size": "3", "storage": "levels"}
        save_file({**arrays, **{name: change(arrays[name]) for name, change in changes.items()}}, path, about)

    return damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "cannot be read"),
        (lambda path: path.write_text("no tensors"), "cannot be read"),
        (edited(tokens1=lambda tokens: tokens + 3), "inconsistent table"),
        (edited(sizes2=lambda sizes: sizes + 1), "inconsistent table"),
        (edited(weights1=lambda weights: -weights), "inconsistent table"),
        (edited(totals2=lambda totals: totals * np.nan), "inconsistent table"),
        (edited(contexts2=lambda contexts: contexts[:, :1].copy()), "inconsistent table"),
    ],
)
def test_damaged_and_foreign_files_are_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = saved(tmp_path)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        made("nasd", shared=True, ngram_size=3, vocab_size=5, state_file=path)


@pytest.mark.parametrize("options", [{"vocab_size": 6}, {"ngram_size": 4}, {"storage": "single"}])
def test_files_of_another_vocabulary_or_of_other_ngrams_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    path = saved(tmp_path)
    assert len(made("nasd", shared=True, ngram_size=3, vocab_size=5, state_file=path).learned or ()) == 6
    with pytest.raises(ConfigError, match="use the file with the model and options"):
        made("nasd", shared=True, state_file=path, **{"ngram_size": 3, "vocab_size": 5, **options})
