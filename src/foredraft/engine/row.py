"""A row: one text that is being generated, with its parameters, sampler and counters; and how requests become rows."""

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
"""Tokens that are drafted of a prediction before anything is known of it."""

LONGEST = 32
"""Tokens of a draft, however long the prediction has been right."""

SURE = 16
"""Tokens before a place, at most, whose agreement counts: more make it no likelier."""

NEAR = 16
"""Tokens within which an output that has differed in a few is expected back, so that one token tells the place."""

MOST_PLACES = 32
"""Places after a token that are looked at on either side, so that one that is everywhere costs no more than another."""


class RowState:
    """What a drafter, or a part of one, knows of a row: ``row.state[part]``. It ends with the row."""

    def copied(self) -> RowState | None:
        """The same for another sample of the row's prompt, which has just been read; None to begin it anew."""
        return None

    def cut(self, num_tokens: int) -> tuple[RowState, int] | None:
        """What is known after at most so many tokens of the row's text, and after how many; None for nothing.

        It is kept for prompts that begin like the row, together with what caches hold, and may be cut again.
        """
        return None

    def ended(self, row: Row, *, is_kept: bool) -> None:
        """Called when a row has ended, normally or not, before its caches lose it.

        Args:
          is_kept: whether others may take over what caches hold of it.
        """


class Prediction:
    """Where an output is in its prediction, which a request brings along.

    It begins with the first token. While the output agrees it goes on; where it differs, the place is looked for anew
    that the most of the newest tokens lead to, among equals the nearest to where it was: what was inserted, left out or
    replaced is passed by.

    Args:
      tokens: of the whole predicted output.
      start: where in a row its output begins.

    Attributes:
      agreed: tokens that lead to the place.
    """

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self.tokens = tuple(tokens)
        self._start = start
        self._num_seen = start
        self._place: int | None = 0  # of the next token; None where the output is elsewhere
        self._last = 0  # place where it was last
        self.agreed = FIRST // 2
        self._places: dict[int, list[int]] = {}  # after every token
        for place, token in enumerate(self.tokens, 1):
            self._places.setdefault(token, []).append(place)

    def copy(self) -> Prediction:
        """The same prediction for another sample of its prompt, which has said nothing yet."""
        other = Prediction((), self._start)
        other.tokens, other._places = self.tokens, self._places
        return other

    def draft(self, token_ids: Sequence[int], depth: int) -> tuple[int, ...]:
        """What is likely to follow a row, which has grown since the last call; ``depth`` tokens at most."""
        for end in range(self._num_seen + 1, len(token_ids) + 1):
            self._follow(token_ids, end)
        self._num_seen = len(token_ids)
        if self._place is None:
            return ()
        return self.tokens[self._place : self._place + min(LONGEST, depth)]

    def _follow(self, token_ids: Sequence[int], end: int) -> None:
        """Take in the token before ``end``."""
        place = self._place
        if place is not None and place < len(self.tokens) and self.tokens[place] == token_ids[end - 1]:
            self._place, self.agreed = place + 1, self.agreed + 1
        else:
            self._place, self.agreed = self._find(token_ids, end)
        self._last = self._last if self._place is None else self._place

    def _find(self, token_ids: Sequence[int], end: int) -> tuple[int | None, int]:
        """The likeliest place after an output, and how many tokens lead there; None where nothing near or sure does.

        Of a prediction "a b c d" and an output "a x c" the place is 3, before "d", and "c" alone leads there.
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
    """A prompt and what has been generated for it.

    Between steps the last token is *pending*: part of ``token_ids``, not yet in any cache.

    Args:
      id: unique within an engine.
      request_id: the request this row belongs to.
      index: which of the request's ``n`` samples this is.
      token_ids: prompt and output.
      num_prompt_tokens: how many of them are the prompt.
      params: what the user asked for.
      seed: of this row; sample i of n has ``mix(seed of the request, i)``.
      sampler: turns logits of this row into its target distribution; holds the incremental history.
      max_length: prompt and output together never exceed it.
      checker: decides after every token whether the row ends with it.
      num_cached_tokens: how many tokens of the prompt were in the cache already, from rows that have ended.
      trace: one entry per step.
      forks: the other samples of its request, which copy its cache once its prompt is in.
      beginning: what another sample of its request has read of their prompt, while this one waits for a slot.
      num_prefilled: tokens in the cache, until the row decodes.
      num_replayed: length of its output when it last had to leave the cache, to be read again.
      is_in_doubt: whether its last step gave no token, and a draft may be to blame: the next one goes without.
      num_changes: of the target, when the row came into the cache.
      is_plain: whether it goes without the drafter, which has failed, costs more than it brings or must not see it.
      acceptance: of the engine; how often drafted tokens are right.
      prediction: of its output, where the user gives one.
      prompt_logprobs: of the tokens of the prompt that follow those that were read, where they are wanted.
      state: what drafters know of it, by the drafter or the part of one that does; see `RowState`.
      slot: its place in all caches of the engine, while it has one.
      offset: how far its positions are ahead of its tokens: of a prompt over the border of longrope.
      cache_salt: of the request: what it leaves is taken over by requests of the same salt alone, and the other way
        round, so that nobody learns from the time of an answer what others have asked.
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
        """Text of the output, taken in no further than somebody has needed it; None where no text is wanted."""
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
        """Whether it may have a draft whatever the drafter does: of a prediction, or of what its grammar forces."""
        return self.prediction is not None or self.sampler.matching is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_prompt_to_read(self) -> int:
        """All tokens of the prompt but the last one, which a step verifies."""
        return self.num_prompt_tokens - 1

    @property
    def num_to_prefill(self) -> int:
        """Tokens that are read of the prompt, and replayed of the output."""
        return self.num_prompt_to_read + self.num_replayed

    @property
    def learns_logprobs(self) -> bool:
        """Whether its next chunk tells log-probabilities of the prompt, as that of a first sample may."""
        wants = self.params.prompt_logprobs is not None and self.index == 0
        return wants and len(self.prompt_logprobs) == self.num_prefilled < self.num_prompt_to_read

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == self.num_to_prefill

    def learn_logprobs(self, num_tokens: int, logits: torch.Tensor) -> None:
        """Take in those of the tokens that follow its next chunk, given the logits (N, V) of its ``num_tokens``."""
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
        """Append emitted tokens and carry the sampler's history along."""
        self.token_ids.extend(tokens)
        self.sampler.extend(tokens)


@dataclass(frozen=True)
class RowOutput:
    """The tokens that one step added to one row.

    ``num_accepted`` of the ``token_ids``, counted from the front, were drafted, by what ``sources`` name; the rest came
    from the target. ``tree`` is the draft that was verified.
    ``scores`` and ``logits``, where the engine keeps them, are float32 (tokens, V): what each token was chosen from.
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
    """Log-probabilities of tokens, as many as the row's parameters ask for; empty when they ask for none."""
    k = row.params.logprobs
    if k is None:
        return ()
    table = distribution.log_probs(logits, [row.sampler] * len(tokens), paths)
    return tuple(TokenLogprobs.of(tokens, table, k, row.params.logprob_token_ids))


def as_ids(prompt: Iterable[Any]) -> list[int]:
    """Token ids as plain integers.

    Raises: PromptError for what is not a whole number.
    """
    try:
        return ints_of(prompt)
    except (TypeError, ValueError) as error:
        raise PromptError(
            f"the prompt is not a list of token ids ({error}); give those of one prompt, such as input_ids[0].tolist()"
        ) from None


def check_prompt(
    prompt: Sequence[int], num_ids: int, max_length: int | None, num_new_tokens: int = 1, *, reason: str = ""
) -> None:
    """Refuse what cannot be read, or continued by so many tokens.

    Args:
      num_ids: limit of token ids: embeddings of the model for prompts, its logits for outputs.
      reason: origin of the limit, and what is possible beyond it.

    Raises: PromptError for an empty prompt or ids outside the vocabulary; ContextLengthError when the prompt leaves
    no room for the new tokens within ``max_length``.
    """
    if not prompt:
        raise PromptError("the prompt holds no tokens; give at least one (the BOS token, for instance)")
    worst = max(prompt, key=lambda token: (not 0 <= token < num_ids, abs(token)))
    if not 0 <= worst < num_ids:
        raise PromptError(
            f"token id {worst} lies outside the vocabulary, 0..{num_ids - 1}: the model does not know it; "
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
      tokenizer: needed for stop strings only.
      max_model_len: prompt and output together never exceed it.
      most_planned: prompt and output together of a row for which memory is planned; None for `max_model_len`. A
        request that does not limit its output ends there.
      contains_faults: see `EngineConfig`.
      grammars: for what outputs must match.
      ids: of rows; unique also when requests are added from several threads.
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
        """The ``params.n`` rows of a request; see `Engine.add_request`."""
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
        """Let a row have said something already, which is replayed before it goes on.

        Raises: PromptError for ids outside the vocabulary; ConfigError for an output that had ended before, or that its
          grammar does not allow.
        """
        if not output_ids:
            return
        check_prompt(output_ids, self.target.vocab_size, None)
        for place, token in enumerate(output_ids, 1):
            if row.is_finished:
                raise ConfigError(
                    f"output_ids has {len(output_ids)} tokens, but the output ends with the first {place - 1} "
                    f"({row.finish_reason}); leave out what comes after"
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
                f"prediction holds token ids {outside[:8]}, outside the vocabulary, 0..{self.target.vocab_size - 1}; "
                "leave them out"
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
