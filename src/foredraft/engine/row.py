"""A row is one sequence being generated, with its parameters, sampler and counters.

`Admission` turns requests into rows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from foredraft.config.keywords import ints_of
from foredraft.config.structured import StructuredOutputs
from foredraft.engine.acceptance_model import AcceptanceModel
from foredraft.engine.logprobs import TokenLogprobs, raw_logprobs
from foredraft.engine.stats import RowStats, StepTrace
from foredraft.engine.stopping import StopChecker
from foredraft.errors import ConfigError, ContextLengthError, PromptError
from foredraft.sampling import distribution
from foredraft.sampling.distribution import Sampler
from foredraft.sampling.noise import fresh_seed, mix

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from foredraft.config.sampling import SamplingParams
    from foredraft.engine.stopping import Detokenizer
    from foredraft.model.cache.prefixes import Prefix
    from foredraft.model.lm import CausalLM
    from foredraft.structured.grammars import Grammars
    from foredraft.tree import DraftTree


FIRST = 8
"""Number of tokens drafted from a prediction at first, before any of them was compared with the output."""

LONGEST = 32
"""Maximum number of tokens drafted from a prediction in one step."""

SURE = 16
"""Maximum number of matching tokens before a place that count; more do not make the match any more certain."""

NEAR = 16
"""Distance in tokens, after a small difference, within which a single matching token is enough to resume."""

MOST_PLACES = 32
"""Number of occurrences of a token that are examined on either side, which bounds the cost of frequent tokens."""


class RowState:
    """State that a drafter, or a part of one, keeps for a row as ``row.state[part]``. A state ends with its row."""

    def copied(self) -> RowState | None:
        """Return a copy for another sample of the row's prompt, which has just been read; None to start afresh."""
        return None

    def cut(self, num_tokens: int) -> tuple[RowState, int] | None:
        """Return the state after at most ``num_tokens`` tokens, and the exact number of tokens it covers; None if there
        is none.

        The result is kept, together with the cached columns, for prompts that begin like the row. A cut prefix may be
        cut again.
        """
        return None

    def ended(self, row: Row, *, is_kept: bool) -> None:
        """Handle the end of a row, normal or not, before its caches are dropped.

        Args:
          is_kept: True if other rows may reuse the cached columns of this row.
        """


class Prediction:
    """Position of an output within the predicted output that its request contains.

    The predicted text starts at the first predicted token and advances while the output agrees. After a difference, the
    new position is the one that matches the largest number of the newest tokens. Among equals, the position nearest to
    the old one is taken. In this way inserted, missing and replaced tokens are skipped.

    Args:
      tokens: the whole predicted output.
      start: index in a row at which its output begins.

    Attributes:
      agreed: number of matching tokens before the current position.
    """

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self.tokens = tuple(tokens)
        self._start = start
        self._num_seen = start
        self._place: int | None = 0  # index of the next predicted token; None if the output has left the prediction
        self._last = 0  # the last index that was not None
        self.agreed = FIRST // 2
        self._places: dict[int, list[int]] = {}  # for every token, the indices after its occurrences
        for place, token in enumerate(self.tokens, 1):
            self._places.setdefault(token, []).append(place)

    def copy(self) -> Prediction:
        """Return the same prediction for another sample of the prompt, without any output yet."""
        other = Prediction((), self._start)
        other.tokens, other._places = self.tokens, self._places
        return other

    def draft(self, token_ids: Sequence[int], depth: int) -> tuple[int, ...]:
        """Return the predicted continuation of a row, at most ``depth`` tokens.

        The row may have grown since the last call.
        """
        for end in range(self._num_seen + 1, len(token_ids) + 1):
            self._follow(token_ids, end)
        self._num_seen = len(token_ids)
        if self._place is None:
            return ()
        return self.tokens[self._place : self._place + min(LONGEST, depth)]

    def _follow(self, token_ids: Sequence[int], end: int) -> None:
        """Advance the position by the output token before index ``end``."""
        place = self._place
        if place is not None and place < len(self.tokens) and self.tokens[place] == token_ids[end - 1]:
            self._place, self.agreed = place + 1, self.agreed + 1
        else:
            self._place, self.agreed = self._find(token_ids, end)
        self._last = self._last if self._place is None else self._place

    def _find(self, token_ids: Sequence[int], end: int) -> tuple[int | None, int]:
        """Return the best position after an output and the number of matching tokens; (None, 0) if there is none.

        For the prediction "a b c d" and the output "a x c", the position is 3, before "d", and only "c" matches before
        it.
        """
        places = self._places.get(token_ids[end - 1], ())
        middle = bisect(places, self._last)
        best: tuple[int, int, int] | None = None
        for place in places[max(0, middle - MOST_PLACES) : middle + MOST_PLACES]:
            length, most = 1, min(place, end - self._start, SURE)
            while length < most and self.tokens[place - 1 - length] == token_ids[end - 1 - length]:
                length += 1
            distance = abs(place - self._last - 1)
            if (length > 1 or distance <= NEAR) and (best is None or (length, -distance) > best[:2]):
                best = length, -distance, place
        return (None, 0) if best is None else (best[2], best[0])


@dataclass(eq=False)
class Row:
    """A prompt and the tokens generated for it.

    Between steps the last token is *pending*: part of ``token_ids``, not yet in any cache.

    Args:
      id: number that is unique within an engine.
      request_id: id of the request to which this row belongs.
      index: index of this sample among the ``n`` samples of the request.
      token_ids: tokens of the prompt and of the output.
      num_prompt_tokens: number of prompt tokens at the start of ``token_ids``.
      params: sampling parameters of the request.
      seed: seed of this row; sample i of n has ``mix(seed of the request, i)``.
      sampler: turns logits of this row into its target distribution; contains the incremental history.
      max_length: maximum length of prompt and output together.
      checker: decides after every token whether the row ends.
      num_cached_tokens: number of prompt tokens that were in the cache already, from finished rows.
      trace: one entry per step.
      forks: other samples of the same request, which copy this row's cache once its prompt is read.
      beginning: cached prompt of another sample of the same request, while this row waits for a slot.
      num_prefilled: number of tokens in the cache, until the row decodes.
      num_replayed: length of the output when the row last lost its cache columns, which must be read again.
      is_in_doubt: True if the last step gave no token, possibly because of its draft. The next step runs without a
        draft.
      num_changes: value of ``target.num_changes`` when the row entered the cache.
      is_plain: True if the row runs without the drafter, because the drafter has failed, is not worth its cost, or must
        not read the row.
      acceptance: the engine's model of acceptance rates.
      prediction: predicted output, if the user gave one.
      prompt_logprobs: log-probabilities of the prompt tokens that have been read, if requested.
      state: state of each drafter or part of one, keyed by it; see `RowState`.
      slot: index of the row in all caches of the engine; -1 if it has none.
      offset: distance from token index to position, for prompts beyond the original context of longrope.
      cache_salt: salt of the request. Cached prefixes are shared only between requests with the same salt, so that
        response times reveal nothing about the prompts of others.
    """

    id: int
    request_id: str
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sampler: Sampler
    max_length: int
    checker: StopChecker
    stats: RowStats = field(default_factory=RowStats)
    num_steps: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    trace: list[StepTrace] = field(default_factory=list)
    forks: list[Row] = field(default_factory=list)
    beginning: Prefix | None = None
    num_prefilled: int = 0
    num_replayed: int = 0
    is_in_doubt: bool = False
    num_changes: int = 0
    is_plain: bool = False
    acceptance: AcceptanceModel = field(default_factory=AcceptanceModel, repr=False)
    prediction: Prediction | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cache_salt: str | None = None
    offset: int = 0
    state: dict[Any, Any] = field(default_factory=dict)
    slot: int = -1

    @property
    def text(self) -> Detokenizer | None:
        """Text of the output, decoded only as far as it was needed; None if no text was requested."""
        return self.checker.text

    @property
    def pending(self) -> int:
        return self.token_ids[-1]

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Number of tokens that the budget and the context still allow."""
        return self.max_length - len(self.token_ids)

    @property
    def drafts_itself(self) -> bool:
        """True if the row has a source of drafts besides the drafter: a prediction, or a grammar that forces tokens."""
        return self.prediction is not None or self.sampler.matching is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_prompt_to_read(self) -> int:
        """Number of prompt tokens to prefill: all but the last one, which is verified in a decode step."""
        return self.num_prompt_tokens - 1

    @property
    def num_to_prefill(self) -> int:
        """Number of tokens to prefill: from the prompt, and from an output that is replayed."""
        return self.num_prompt_to_read + self.num_replayed

    @property
    def learns_logprobs(self) -> bool:
        """True if the next chunk gives log-probabilities of the prompt.

        Only the first sample of a request collects log-probabilities of the prompt.
        """
        wants = self.params.prompt_logprobs is not None and self.index == 0
        return wants and len(self.prompt_logprobs) == self.num_prefilled < self.num_prompt_to_read

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == self.num_to_prefill

    def learn_logprobs(self, num_tokens: int, logits: torch.Tensor) -> None:
        """Store log-probabilities of the tokens after each token of the next chunk, given its logits (N, V)."""
        first = self.num_prefilled + 1
        tokens = self.token_ids[first : first + num_tokens]
        self.prompt_logprobs += raw_logprobs(tokens, logits, self.params.prompt_logprobs or 0)

    def record(self, tree: DraftTree, accepted: Sequence[int], num_emitted: int) -> None:
        """Count one verify step, before its tokens are appended; ``accepted`` are drafted nodes."""
        plan = tree.plan
        entropy, gamma = (plan.entropy, plan.gamma) if plan else (None, None)
        self.trace.append(StepTrace(self.index, len(self.token_ids), entropy, gamma, tree.depth, len(accepted)))
        self.stats.record(tree, accepted, num_emitted)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append emitted tokens and update the sampler's history."""
        self.token_ids.extend(tokens)
        self.sampler.extend(tokens)


@dataclass(frozen=True)
class RowOutput:
    """The tokens that one step added to one row.

    The first ``num_accepted`` of the ``token_ids`` were drafted, by the drafters named in ``sources``; the rest came
    from the target. ``tree`` is the draft that was verified. ``scores`` and ``logits``, if the engine keeps them, are
    float32 (tokens, V): the values from which each token was chosen.
    """

    row: Row
    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: Exception | None = None
    tree: DraftTree | None = None
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    sources: tuple[str, ...] = ()


def logprobs_of(
    row: Row, tokens: Sequence[int], logits: torch.Tensor, paths: Sequence[tuple[int, ...]]
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of tokens that the row's parameters request; empty if they request none."""
    k = row.params.logprobs
    if k is None:
        return ()
    table = distribution.log_probs(logits, [row.sampler] * len(tokens), paths)
    return tuple(TokenLogprobs.of(tokens, table, k, row.params.logprob_token_ids))


def as_ids(prompt: Iterable[Any]) -> list[int]:
    """Convert token ids to plain integers.

    Raises: PromptError for an item that is not a whole number.
    """
    try:
        return ints_of(prompt)
    except (TypeError, ValueError) as error:
        raise PromptError(
            f"the prompt is not a list of token ids ({error}); give the ids of a prompt, such as input_ids[0].tolist()"
        ) from None


def check_prompt(
    prompt: Sequence[int], num_ids: int, max_length: int | None, num_new_tokens: int = 1, *, reason: str = ""
) -> None:
    """Check that a prompt can be read and has room for ``num_new_tokens`` more tokens.

    Args:
      num_ids: number of valid token ids: the model's embeddings for prompts, its logits for outputs.
      reason: explanation of the limit, and of how to go beyond it.

    Raises: PromptError for an empty prompt or ids outside the vocabulary; ContextLengthError when the prompt leaves no
    room for the new tokens within ``max_length``.
    """
    if not prompt:
        raise PromptError("the prompt contains no tokens; give at least one (the BOS token, for instance)")
    worst = max(prompt, key=lambda token: (not 0 <= token < num_ids, abs(token)))
    if not 0 <= worst < num_ids:
        raise PromptError(
            f"token id {worst} lies outside the vocabulary of the model, 0..{num_ids - 1}; "
            "check that the tokenizer is the model's"
        )
    if max_length is not None and len(prompt) + num_new_tokens > max_length:
        room = ": no room for a new token" if num_new_tokens else ""
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and the context {max_length}{room}; shorten the prompt"
            f"{reason and f' ({reason})'}"
        )


@dataclass(frozen=True)
class Admission:
    """Makes the rows of requests.

    Args:
      target: the model.
      eos_token_ids: tokens that end a row.
      tokenizer: tokenizer, needed only for stop strings.
      max_model_len: maximum length of prompt and output together.
      most_planned: maximum length of a row for which memory is planned; None for `max_model_len`. A request without a
        limit on its output ends at this length.
      contains_faults: see `EngineConfig`.
      grammars: compiled grammars, for structured outputs.
      ids: counter for row ids. Row ids stay unique when requests are added from several threads.
    """

    target: CausalLM
    eos_token_ids: tuple[int, ...]
    tokenizer: PreTrainedTokenizerBase | None
    max_model_len: int
    most_planned: int | None
    contains_faults: bool
    grammars: Grammars
    ids: Iterator[int] = field(default_factory=count)

    def rows(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None,
        history_ids: Sequence[int] | None,
        output_ids: Sequence[Sequence[int]],
        longest: int = 0,
    ) -> list[Row]:
        """Make the ``params.n`` rows of a request; see `Engine.add_request`."""
        prompt, target = as_ids(prompt_ids), self.target
        if output_ids and len(output_ids) != params.n:
            raise ConfigError(f"output_ids has {len(output_ids)} lists for n={params.n} samples; give one for each")
        offset = target.offset_of(max(len(prompt), longest))
        context = target.long_context if offset else target.context_length
        limit = self.max_model_len if context is None else min(self.max_model_len, context)
        reason = target.beyond_context if limit in (target.context_length, target.long_context) else ""
        check_prompt(prompt, target.num_embeddings, limit, num_new_tokens=params.max_tokens != 0, reason=reason)
        if params.max_tokens is not None:
            wanted = len(prompt) + params.max_tokens
        else:
            wanted = limit if self.most_planned is None else max(self.most_planned, len(prompt) + 1)
        request_id = f"request-{next(self.ids)}" if request_id is None else request_id
        seed = fresh_seed() if params.seed is None else params.seed
        prediction = self._prediction(params, len(prompt))
        rows = []
        for index in range(params.n):
            sampler = self._sampler(params, prompt, history_ids, mix(seed, index))
            row = self._row(prompt, sampler, request_id, index, min(wanted, limit))
            row.prediction = None if prediction is None else prediction.copy()
            row.offset = offset
            rows.append(row)
        for row, output in zip(rows, output_ids, strict=False):
            self._continue(row, as_ids(output))
        return rows

    def _continue(self, row: Row, output_ids: list[int]) -> None:
        """Append an output that was generated earlier. The output is replayed before the row goes on.

        Raises: PromptError for ids outside the vocabulary; ConfigError for an output that had ended earlier, or that
        the grammar of the row does not allow.
        """
        if not output_ids:
            return
        check_prompt(output_ids, self.target.vocab_size, None)
        for place, token in enumerate(output_ids, 1):
            if row.is_finished:
                raise ConfigError(
                    f"output_ids has {len(output_ids)} tokens, but the output ends with the first {place - 1} "
                    f"({row.finish_reason}); leave out the rest"
                )
            if (finish := row.checker.check(token)) is not None:
                row.finish_reason, row.stop_reason = finish.reason, finish.cause
        row.extend(output_ids)
        if row.sampler.matching is not None and row.sampler.matching.fault is not None:
            raise ConfigError(f"output_ids cannot be continued: {row.sampler.matching.fault}")
        row.num_replayed = len(output_ids)

    def _prediction(self, params: SamplingParams, start: int) -> Prediction | None:
        given = params.prediction
        if not given:
            return None
        if isinstance(given, str):
            raise ConfigError(f"prediction {given[:40]!r} was not resolved to tokens; give token ids, or a tokenizer")
        outside = [token for token in given if token >= self.target.vocab_size]
        if outside:
            raise ConfigError(
                f"prediction contains token ids {outside[:8]}, outside the vocabulary, "
                f"0..{self.target.vocab_size - 1}; leave them out"
            )
        return Prediction(given, start)

    def _sampler(
        self, params: SamplingParams, prompt: list[int], history_ids: Sequence[int] | None, seed: int
    ) -> Sampler:
        wanted = params.structured_outputs
        sampler = Sampler(
            params,
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            prompt_ids=prompt,
            history_ids=history_ids,
            device=self.target.device,
            matching=None if wanted is None else self.grammars.matching(StructuredOutputs.of(wanted)),
        )
        sampler.seed, sampler.contains_faults = seed, self.contains_faults
        return sampler

    def _row(self, prompt: list[int], sampler: Sampler, request_id: str, index: int, max_length: int) -> Row:
        return Row(
            id=next(self.ids),
            request_id=request_id,
            index=index,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=sampler.params,
            seed=sampler.seed,
            sampler=sampler,
            max_length=max_length,
            checker=StopChecker(sampler.params, self.eos_token_ids, len(prompt), max_length, self.tokenizer),
        )
