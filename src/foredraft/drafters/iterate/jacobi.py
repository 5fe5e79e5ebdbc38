"""Jacobi decoding: guess a block of tokens, let one forward pass correct all of them, and continue with the
corrections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.planned import PlannedDrafter
from foredraft.engine.drafter import DrafterFacts, DraftSize, Needs, StepResult
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.methods.iterate import JacobiOptions
from foredraft.methods.lengths import LengthPolicy
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.sampling import noise
from foredraft.tree import DraftTree


def prompt_tokens(row: Row) -> Iterator[int]:
    """Yield tokens drawn at random from a row's prompt, without end.

    Randomness: the draft stream of the row's seed, which is independent of all numbers that decide emitted tokens.
    """
    for draw in count():
        key = noise.stream_key(row.seed, draw, 0, noise.Purpose.DRAFT)
        yield row.token_ids[int(noise.uniform(key) * row.num_prompt_tokens)]


def random_token(seed: int, vocab_size: int, position: int, node: int = 0) -> int:
    """Draw a token of the whole vocabulary for a position of a row, or for a node of the draft that begins there.

    Randomness: the draft stream of the row's seed, keyed by position and node. The same draft gets the same token
    again, whatever runs beside it. All tokens are equally likely.
    """
    key = noise.stream_key(seed, position, node, noise.Purpose.DRAFT)
    return int(noise.uniform(key) * vocab_size)


class JacobiDrafter(PlannedDrafter["Guesses"]):
    """Drafter of a chain of guesses; each step replaces a guess by the target's choice after the guesses before it.

    Source: Jacobi decoding (Santilli et al. 2023, arXiv:2305.10427; Song et al. 2021, arXiv:2002.03629). Deviations:
      the block slides, so that it never waits for its last tokens. A guess is replaced by the choice of the row's noise
      at that position, not by the argmax, so that the guesses converge to sampled text, too.

    Args:
      options: keys of the method.
      vocab_size: vocabulary size of the target, needed for initial_guess="random".
      length_policy: length policy that replaces the one in the options.

    Raises: ConfigError for "random" without a ``vocab_size``.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. A block of m guesses takes at most m
    steps, since each step makes at least one more token final.
    Randomness: initial guesses of "prompt" and "random" use the row's seed, independent of all numbers that decide
      emitted tokens. Guesses of "random" are a function of seed and position.
    Cost: O(block) per step, independent of the context length.
    """

    facts = DrafterFacts("jacobi")

    def __init__(
        self,
        options: JacobiOptions | None = None,
        *,
        vocab_size: int | None = None,
        length_policy: LengthPolicy | None = None,
    ) -> None:
        self.options = options or JacobiOptions()
        super().__init__(length_policy or self.options.new_policy(self.options.num_speculative_tokens))
        if self.options.initial_guess == "random" and vocab_size is None:
            raise ConfigError('initial_guess="random" needs the vocabulary size of the target; pass vocab_size')
        self._vocab_size = vocab_size or 0

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        return Needs(choices=True)

    def new_state(self, row: Row) -> Guesses:
        return Guesses(row, self.options.initial_guess, self._vocab_size)

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        length = self.length(row, budget)
        return DraftTree.chain(row.pending, row.state[self].first(length), source=self.name)

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        super().observe(rows, results)
        for row, result in zip(rows, results, strict=True):
            row.state[self].refresh(result.features.choices, len(result.emitted))


class Guesses:
    """Guesses for the next tokens of one row, starting after the pending token."""

    def __init__(self, row: Row, initial_guess: str, vocab_size: int = 0) -> None:
        self._row = row
        self._prompt_tokens = prompt_tokens(row) if initial_guess == "prompt" else None
        self._vocab_size = vocab_size if initial_guess == "random" else None
        self._tokens: list[int] = []

    def first(self, length: int) -> list[int]:
        """Return the first ``length`` guesses, extended by initial guesses where needed."""
        self._tokens += [self._initial(place) for place in range(len(self._tokens), length)]
        return self._tokens[:length]

    def refresh(self, choices: Sequence[int], num_emitted: int) -> None:
        """Replace guesses by the target's choices, and remove those for tokens that have been emitted.

        Choice i replaces guess i. With guesses 5 6 7 8, choices 5 6 9 2 1 and three emitted tokens (5 6 9), the new
        guesses are 2 1.
        """
        tokens = [*choices, *self._tokens[len(choices) :]][num_emitted:]
        self._tokens = tokens[: tokens.index(-1)] if -1 in tokens else tokens

    def drop(self, length: int) -> None:
        """Remove the first ``length`` guesses."""
        del self._tokens[:length]

    def _initial(self, place: int) -> int:
        if self._prompt_tokens is not None:
            return next(self._prompt_tokens)
        if self._vocab_size is not None:
            return random_token(self._row.seed, self._vocab_size, len(self._row.token_ids) + place)
        return self._tokens[-1] if self._tokens else self._row.pending


def build(options: JacobiOptions, context: DrafterContext) -> JacobiDrafter:
    """Make the drafter, which needs only the target's vocabulary size."""
    return JacobiDrafter(options, vocab_size=context.target.vocab_size)
