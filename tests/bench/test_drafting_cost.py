"""Drafters that need no forward: the cost of a step does not grow with the text; `benchmarks/parts.py` measures it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from parts import CONFIGS, PhraseText, draft_cost, opened

from drafting import begin, end
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import drafter_factory
from foredraft.drafters.context import DrafterContext
from foredraft.engine.drafter import Drafter
from foredraft.model.lm import CausalLM
from foredraft.retrieval.datastore import Datastore
from foredraft.retrieval.manifest import DatastoreManifest
from foredraft.testing import toy_model

VOCAB_SIZE = 512
NUM_STEPS = 12


class Watched(list):
    """A text that counts the tokens that are read of it."""

    num_reads = 0

    def __getitem__(self, item: Any) -> Any:
        self.num_reads += len(range(*item.indices(len(self)))) if isinstance(item, slice) else 1
        return super().__getitem__(item)

    def __iter__(self) -> Iterator[Any]:
        self.num_reads += len(self)
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        self.num_reads += len(self)
        return super().__contains__(item)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DrafterContext, str]]:
    folder = tmp_path_factory.mktemp("store")
    with opened(folder, PhraseText(VOCAB_SIZE), 5000) as store:
        target = CausalLM(toy_model(vocab_size=VOCAB_SIZE))
        yield DrafterContext(target, kept={("datastore", str(folder)): store}), str(folder)


def made(name: str, context: tuple[DrafterContext, str]) -> Drafter:
    config = dict(CONFIGS[name])
    if config["method"] == "rest":
        config["datastore"] = context[1]
    return drafter_factory(SpeculativeConfig.parse(config), context[0])()


def work(drafter: Drafter, context: int) -> tuple[int, int]:
    """(tokens of the row that are read, lines of Python that run) in some steps behind a text, proposing and observing.

    List methods that do not say how far they looked would show as neither; `Watched` counts iteration as all of it.
    """
    text = PhraseText(VOCAB_SIZE)
    row, ahead = text.row(context, NUM_STEPS), text.tokens(context + NUM_STEPS * 65)
    begin(drafter, [row])
    drafter.propose([row], [20])  # what is built at the first step is not of every step
    row.token_ids = Watched(row.token_ids)
    num_lines = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    for _ in range(NUM_STEPS):
        before = sys.gettrace()
        sys.settrace(count)
        (tree,) = drafter.propose([row], [20])
        sys.settrace(before)
        result = text.verified(row, tree, ahead)
        sys.settrace(count)
        drafter.observe([row], [result])
        sys.settrace(before)
    reads = row.token_ids.num_reads
    end(row)
    return reads, num_lines


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_reads_a_bounded_end_of_the_text(name: str, context: tuple[DrafterContext, str]) -> None:
    """At 400 and 12,800 tokens: the same tokens read within the drafts' own variation, and lines within a factor."""
    short_reads, short_lines = work(made(name, context), 400)
    long_reads, long_lines = work(made(name, context), 12_800)
    assert long_reads < 12_800 / 2, "a step that read the text once would read 12 times as many"
    assert long_reads <= 2 * short_reads + 500
    assert long_lines <= 2.5 * short_lines + 1000


def test_work_that_grows_with_the_text_is_seen(context: tuple[DrafterContext, str]) -> None:
    """The two counters notice a drafter that looks at everything, by slices, by iteration or in a loop of its own."""
    from foredraft.drafters.lookup.ngram import NGramDrafter

    class Copying(NGramDrafter):
        def observe(self, rows: Any, results: Any) -> None:
            tuple(rows[0].token_ids)
            super().observe(rows, results)

    class Looping(NGramDrafter):
        def observe(self, rows: Any, results: Any) -> None:
            for _ in range(len(rows[0].token_ids)):
                pass
            super().observe(rows, results)

    assert work(Copying(), 12_800)[0] > 12_800 * NUM_STEPS
    assert work(Looping(), 12_800)[1] > 12_800 * NUM_STEPS


def test_the_row_copies_and_the_datastore_knows_it(tmp_path: Path) -> None:
    """Else every lookup would be cheap because it finds nothing."""
    text = PhraseText(VOCAB_SIZE)
    with opened(tmp_path, text, 20_000) as store:
        assert DatastoreManifest.read(tmp_path).num_tokens == 20_000
        match = Datastore.query(store, text.tokens(1000)[-8:])
        assert match.length >= 3
        made_ = lambda: drafter_factory(SpeculativeConfig.parse({"method": "ngram"}), DrafterContext(None))()  # noqa: E731
        assert draft_cost("ngram", made_, text, 1000, 20).nodes > 3
