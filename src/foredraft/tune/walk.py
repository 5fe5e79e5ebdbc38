"""Drafters along the recorded outputs of plain decoding: counts of accepted tokens without the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import NamedTuple

from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.acceptance_model import AcceptanceModel
from foredraft.engine.drafter import Drafter, PromptChunk, StepResult
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row, RowOutput, RowState
from foredraft.model.cache.ragged import CacheGroup
from foredraft.model.lm import CausalLM
from foredraft.tree import DraftSize, DraftTree


@dataclass(frozen=True)
class RecordedText:
    """A prompt and its output under plain decoding.

    Args:
      category: kind of the prompt.
      params: parameters of the output. A draft model samples its drafts with the same noise.
    """

    category: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams


class CountedStep(NamedTuple):
    """The draft of one row in one step, and its accepted tokens.

    Args:
      nodes: number of verified nodes, pending one included.
      levels: requested depth.
      depth: depth of the draft.
      accepted: number of accepted tokens.
    """

    nodes: int
    levels: int
    depth: int
    accepted: int


@dataclass(frozen=True)
class Counts:
    """The steps of one row.

    Args:
      context: mean number of tokens before a step.
    """

    steps: Counter[CountedStep]
    num_tokens: int
    context: float = 0.0

    @property
    def num_steps(self) -> int:
        return self.steps.total()


def rates(texts: Iterable[Counts]) -> tuple[float, ...]:
    """Return, for every depth, the probability that its token is accepted if the token above was accepted, down to the
    depth of the deepest draft."""
    steps: Counter[tuple[int, int]] = Counter()
    for text in texts:
        for step, count in text.steps.items():
            steps[step.depth, step.accepted] += count
    return tuple(rate for _, rate in by_position((*step, count) for step, count in steps.items()))


def by_position(steps: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, float]]:
    """Yield, for every position, the number of drafts that reached it, and the share of them whose token was accepted.

    Args:
      steps: triples of drafted tokens of a chain, accepted tokens, and the number of such steps. Every step has a
        draft.
    """
    known = list(steps)
    for position in range(1, max((drafted for drafted, _, _ in known), default=0) + 1):
        reached = [(kept, count) for drafted, kept, count in known if drafted >= position and kept >= position - 1]
        num_tested = sum(count for _, count in reached)
        if num_tested:
            yield num_tested, sum(count for kept, count in reached if kept >= position) / num_tested


def decoded_rows(
    target: CausalLM,
    drafter: Drafter,
    prompts: Iterable[Sequence[int]],
    params: SamplingParams,
    max_num_seqs: int = 8,
    interrupted: Event | None = None,
) -> list[Row]:
    """Return rows of the prompts decoded with a drafter, several at a time.

    Args:
      interrupted: see `until_interrupted`.
    """
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=max_num_seqs))
    rows = [engine.add_request(prompt, params)[0] for prompt in prompts]
    with until_interrupted(engine, rows, interrupted):
        for _ in engine.run():
            pass
    return rows


@contextmanager
def until_interrupted(engine: Engine, rows: Sequence[Row], interrupted: Event | None) -> Iterator[None]:
    """Abort the rows if Ctrl-C is pressed inside the context.

    Args:
      interrupted: event that is set in this case; without one, KeyboardInterrupt is raised.
    """
    try:
        yield
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        interrupted.set()
        for row in rows:
            engine.abort(row.request_id)


class Walk:
    """Decoding of known outputs, where a step costs only its drafting.

    Args:
      target: model of the outputs. The walk creates the rows and makes no forward pass.
      drafter: drafter that drafts from the tokens of rows alone (`DrafterFacts.drafts_from_text`).
      texts: recorded outputs, in the order in which they enter.
      acceptance: model that learns from whole drafts. If there is a governor, it is the governor's model.

    Exactness: under the rule "match" the output does not depend on drafts. The steps therefore equal those of the
      engine with the same limits.
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter,
        texts: Iterable[RecordedText],
        acceptance: AcceptanceModel | None = None,
    ) -> None:
        needs = drafter.needs(target, target.new_cache())
        self.drafter = drafter
        self.rows: list[Row] = []  # in the order of their slots
        self._caches = CacheGroup([own.cache for own in needs.caches])
        self._waiting = list(texts)
        self._was_asked = False
        self._text_of: dict[Row, list[int]] = {}
        self._rows_from = Engine(target, EmptyDrafter())  # creates rows and never runs
        self._rows_from.acceptance = self.acceptance = acceptance or AcceptanceModel()

    @property
    def num_waiting(self) -> int:
        """Number of texts that have not entered."""
        return len(self._waiting)

    def enter(self, num_rows: int) -> bool:
        """Start texts until ``num_rows`` rows are active. Return whether any row is active."""
        while self._waiting and len(self.rows) < num_rows:
            text = self._waiting.pop(0)
            (row,) = self._rows_from.add_request(text.prompt, text.params)
            self._text_of[row] = [*text.prompt, *text.output]
            row.slot = len(self.rows)
            self.rows.append(row)
            self._caches.add()
            self.drafter.start([row], [PromptChunk.end_of(row)])
        return bool(self.rows)

    def budgets(self) -> list[DraftSize]:
        """Return the largest draft size of every row."""
        return [DraftSize(max(0, row.num_remaining_tokens - 1)) for row in self.rows]

    def propose(self, budgets: Sequence[DraftSize]) -> list[DraftTree]:
        """Return the drafter's drafts, cut to these limits."""
        drafts = self.drafter.propose(self.rows, budgets)
        trees = [budget.cut(draft) for draft, budget in zip(drafts, budgets, strict=True)]
        title = self.drafter.facts.title(DraftSize.of(budgets[0]))
        for row, tree in zip(self.rows, trees, strict=True):
            self.acceptance.proposed(row, tree, title)
        self._was_asked = any(budgets)
        return trees

    def emit(self, trees: Sequence[DraftTree]) -> list[RowOutput]:
        """Accept each draft up to the first difference from the recorded text, emit one more token, and remove rows
        that have ended."""
        found = [self._accept(row, tree) for row, tree in zip(self.rows, trees, strict=True)]
        outputs = [
            RowOutput(row, result.emitted, len(result.path) - 1, tree=result.tree)
            for row, result in zip(self.rows, found, strict=True)
        ]
        going_on = [place for place, row in enumerate(self.rows) if not row.is_finished]
        self.drafter.observe([self.rows[place] for place in going_on], [found[place] for place in going_on])
        for output in outputs:
            self.acceptance.came(output.row, output.token_ids, was_asked=self._was_asked)
        for row in [row for row in self.rows if row.is_finished]:
            self._leave(row)
        return outputs

    def _leave(self, row: Row) -> None:
        for state in row.state.values():
            if isinstance(state, RowState):
                state.ended(row, is_kept=False)
        self._caches.remove(row.slot)
        last = self.rows.pop()
        if last is not row:
            self.rows[row.slot], last.slot = last, row.slot

    def _accept(self, row: Row, tree: DraftTree) -> StepResult:
        """Return the result of a row. If the text continues with 5, 6, 7 and the draft is 5, 6, 8, two are accepted and
        7 is the bonus.
        """
        text, path = self._text_of[row], [0]
        emitted: list[int] = []
        while True:
            emitted.append(text[len(row.token_ids) + len(emitted)])
            child = tree.child(path[-1], emitted[-1])
            if child is None or len(row.token_ids) + len(emitted) == len(text):
                break
            path.append(child)
        row.record(tree, path[1:], len(emitted))
        row.extend(emitted)
        if len(row.token_ids) == len(text):
            row.finish_reason = "length"
        return StepResult(tree, tuple(path), tuple(emitted))
