"""The host cost of drafting itself: microseconds per step of the drafters that need no forward of their own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from foredraft.accept.rules import match
from foredraft.bench.trial import no_garbage_collection
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import drafter_factory
from foredraft.drafters.context import DrafterContext
from foredraft.engine.drafter import Budget, Drafter, Features, StepResult
from foredraft.engine.sequence import Sequence
from foredraft.engine.stopping import StopChecker
from foredraft.law.sampling import SamplingLaw
from foredraft.retrieval.build import Progress, from_tokens
from foredraft.retrieval.datastore import Datastore
from foredraft.tree import DraftTree

REST = "rest"
REST_ALONE: dict[str, Any] = {"method": REST, "retrieval_dynamic_index": False}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("ngram", "nasd", "suffix", "token_recycling", "lookahead", "jacobi")},
    "rest": {"method": REST},
    "rest, datastore only": REST_ALONE,
    "suffix+token_recycling": {"method": "suffix+token_recycling"},
    "ngram>token_recycling": {"method": "ngram>token_recycling"},
}
"""Arms, each with the defaults of its method."""

_PHRASE = 8
_NUM_PHRASES, _NUM_KNOWN = 40, 4096  # phrases of the row's text, and of the datastore's, which begin with those
_DOCUMENT = 64  # phrases
_AGREEMENT = 0.7  # share of nodes at which the target goes on with the text
_NUM_RANKED = 64
_LONGEST = 65  # tokens of a step


@dataclass(frozen=True)
class DraftCost:
    """Host time of one drafter, one row; medians over steps.

    Args:
      context: tokens of the row at the first step.
      datastore_tokens: of the datastore, for `rest`.
      start_ms: of taking in the prompt.
      propose_us, observe_us: per step.
      propose_p90_us: nine of ten proposals take less.
      nodes: of a proposal in the mean, root included.
    """

    drafter: str
    context: int
    datastore_tokens: int | None
    start_ms: float
    propose_us: float
    propose_p90_us: float
    observe_us: float
    nodes: float


def draft_costs(
    drafter_context: DrafterContext,
    contexts: Seq[int],
    datastore_sizes: Seq[int],
    num_steps: int,
    progress: Progress | None = None,
) -> Iterator[DraftCost]:
    """Every arm at every context over the smallest datastore; then lookups alone at every size of the datastore.

    Args:
      drafter_context: of the target whose vocabulary is drafted from; no forward is made.
      datastore_sizes: tokens of the datastores, built one after another in a temporary directory.
      progress: told how building progresses.
    """
    text = PhraseText(drafter_context.target.vocab_size)
    for number, size in enumerate(sorted(datastore_sizes)):
        with TemporaryDirectory(prefix="foredraft-") as folder, opened(Path(folder), text, size, progress) as store:
            kept = {**drafter_context.kept, ("datastore", folder): store}
            arms = (
                CONFIGS.items() if number == 0 else [(name, CONFIGS[name]) for name in CONFIGS if name.startswith(REST)]
            )
            for name, config in arms:
                is_rest = config["method"] == REST
                given = {**config, "datastore": folder} if is_rest else config
                make = drafter_factory(SpeculativeConfig.parse(given), replace(drafter_context, kept=kept))
                for context in contexts if number == 0 else contexts[:1]:
                    yield draft_cost(name, make, text, context, num_steps, size if is_rest else None)


def draft_cost(
    name: str,
    make: Callable[[], Drafter],
    text: PhraseText,
    context: int,
    num_steps: int,
    datastore_tokens: int | None = None,
) -> DraftCost:
    """Drive one drafter over one row whose target goes on with ``text`` most of the time."""
    row, drafter, ahead = text.row(context, num_steps), make(), text.tokens(context + num_steps * _LONGEST)
    observed: list[int] = []
    proposed: list[int] = []
    nodes: list[int] = []
    with no_garbage_collection():
        begin = time.perf_counter_ns()
        drafter.start([row])
        start = time.perf_counter_ns() - begin
        for _ in range(num_steps):
            begin = time.perf_counter_ns()
            (tree,) = drafter.propose([row], [Budget(_LONGEST - 1)])
            proposed.append(time.perf_counter_ns() - begin)
            result = text.verified(row, tree, ahead)
            begin = time.perf_counter_ns()
            drafter.observe([row], [result])
            observed.append(time.perf_counter_ns() - begin)
            nodes.append(len(tree))
    drafter.forget([row])
    p90 = sorted(proposed)[int(0.9 * (len(proposed) - 1))]
    return DraftCost(
        drafter=name,
        context=context,
        datastore_tokens=datastore_tokens,
        start_ms=start / 1e6,
        propose_us=median(proposed) / 1e3,
        propose_p90_us=p90 / 1e3,
        observe_us=median(observed) / 1e3,
        nodes=mean(nodes),
    )


class PhraseText:
    """Phrases in random order: the text of a row, and of the datastore that knows its phrases among many others.

    Args:
      vocab_size: ids are smaller.

    Randomness: fixed seeds.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._phrases = np.random.default_rng(0).integers(0, vocab_size, size=(_NUM_KNOWN, _PHRASE))
        self._draw = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        """The text of a row: always the same for a vocabulary, so a shorter one is the beginning of a longer one."""
        order = np.random.default_rng(1).integers(0, _NUM_PHRASES, size=-(-count // _PHRASE))
        ids: list[int] = self._phrases[order].ravel()[:count].tolist()
        return ids

    def row(self, context: int, num_steps: int) -> Sequence:
        """A row whose prompt is ``context`` tokens of the text."""
        params = SamplingParams(max_tokens=num_steps * _LONGEST)
        ids, max_length = self.tokens(context), context + num_steps * _LONGEST
        return Sequence(
            id=0,
            request_id="0",
            index=0,
            token_ids=ids,
            num_prompt_tokens=context,
            params=params,
            seed=1,
            law=SamplingLaw(params, vocab_size=self.vocab_size, prompt_ids=ids[:1]),
            max_length=max_length,
            checker=StopChecker(params, (), context, max_length),
        )

    def verified(self, row: Sequence, tree: DraftTree, ahead: Seq[int]) -> StepResult:
        """The outcome of a draft for a target that continues the text, with features that are drawn at random."""
        done = len(row.token_ids)
        future = [ahead[done + depth] for depth in tree.depths]
        verdict = match(tree, future.__getitem__)
        emitted = (*(tree.tokens[node] for node in verdict.path[1:]), verdict.next_token)
        row.extend(emitted)
        row.num_steps += 1
        return StepResult(tree, verdict.path, emitted, _Drawn(future, self.vocab_size, self._draw))

    def documents(self, num_tokens: int) -> Iterable[Seq[int]]:
        """Documents of ``num_tokens`` in all, separators included: frequent phrases and rare ones, a quarter noise."""
        random_ = np.random.default_rng(2)
        while num_tokens > 1:
            which = (_NUM_KNOWN * random_.random(_DOCUMENT) ** 3).astype(np.int64)
            ids = self._phrases[which]
            noise = random_.random(_DOCUMENT) < 0.25
            ids[noise] = random_.integers(0, self.vocab_size, size=(int(noise.sum()), _PHRASE))
            document: list[int] = ids.ravel()[: num_tokens - 1].tolist()
            num_tokens -= len(document) + 1
            yield document


class _Drawn(Features):
    """Features of a target that agrees with the text as often as targets do, drawn beforehand: only drafters are timed.

    Args:
      future: the text after every node.
    """

    def __init__(self, future: Seq[int], vocab_size: int, draw: random.Random) -> None:
        ranked = min(_NUM_RANKED, vocab_size)
        self._top = torch.stack([torch.randperm(ranked) for _ in future])
        self._choices = tuple(one if draw.random() < _AGREEMENT else draw.randrange(vocab_size) for one in future)

    def top_ids(self, k: int, nodes: Seq[int]) -> torch.Tensor:
        return self._top[list(nodes), :k]

    @property
    def choices(self) -> tuple[int, ...]:
        return self._choices


@contextmanager
def opened(folder: Path, text: PhraseText, num_tokens: int, progress: Progress | None) -> Iterator[Datastore]:
    """A datastore of the text's documents, as long as the block runs."""
    from_tokens(
        text.documents(num_tokens), folder, vocab_size=text.vocab_size, num_tokens=num_tokens, progress=progress
    )
    store = Datastore.open(folder, checksums=False)
    try:
        yield store
    finally:
        store.close()
