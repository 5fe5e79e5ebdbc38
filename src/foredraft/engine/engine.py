"""The loop: schedule, propose, verify, accept, commit, observe, emit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING

import torch

from foredraft.config.engine import EngineConfig
from foredraft.engine.accepting import accept_rows, choose_all
from foredraft.engine.admission import Admission
from foredraft.engine.decoding import emit, observe, propose, undrafted
from foredraft.engine.drafter import Drafter, PromptChunk
from foredraft.engine.drafts import Drafts
from foredraft.engine.exclusive_use import ExclusiveCall, ExclusiveUse
from foredraft.engine.features import RowFeatures
from foredraft.engine.forwards import NO_LIMIT, Forwards
from foredraft.engine.governing import AnyGovernor, Governing
from foredraft.engine.logprobs import TokenLogprobs
from foredraft.engine.memory import PREFIX_DIVISOR, MemoryPlan, MemoryUse
from foredraft.engine.outputs import RowOutput
from foredraft.engine.row import Row
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.stats import Clock, StepProfile
from foredraft.errors import ConfigError, EngineBusyError
from foredraft.machine import return_free_memory
from foredraft.model.cache.group import CacheGroup
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.lm import CausalLM
from foredraft.structured.grammars import Grammars

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foredraft.config.sampling import SamplingParams

__all__ = ["Engine", "EngineConfig", "RowOutput", "TokenLogprobs"]

SHRINK_STEPS = 256
"""Steps after which caches give back what no row has needed meanwhile. Copying takes less time than one of them."""


class Engine:
    """Runs many rows over one target and one drafter; rows join and leave between steps.

    A step is either one prefill chunk or one round of propose, verify, accept, commit, observe, emit, and makes
    exactly one target forward. Plain decoding is the round with the empty draft.

    Args:
      target: the model whose distribution is kept.
      drafter: proposes; `EmptyDrafter` for plain decoding.
      eos_token_ids: tokens that end a row.
      tokenizer: needed for stop strings only.
      prefixes: where rows that have ended are kept for prompts that begin like them; several engines over one target
        may share it.
      grammars: those that were compiled for this target and tokenizer, for outputs that must match one.
      governor: decides by measured costs how much is drafted, under "match"; by default as much as is allowed.

    Exactness: under "match" the tokens equal plain decoding with the same seed, whatever is drafted.
    Randomness: a pure function of (seed of the row, absolute position, token id) under "match"; keyed streams of
    (seed, step, position, purpose) under "standard" and "block". None under "typical", which is lossy.
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter,
        config: EngineConfig | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefixes: PrefixStore | None = None,
        governor: AnyGovernor | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config or EngineConfig()
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        context = target.max_context or NO_LIMIT
        if context < (self.config.max_model_len or 0):
            more = target.beyond_context
            raise ConfigError(
                f"max_model_len is {self.config.max_model_len}, but {target.name} has a context of {context}; lower it"
                f"{more and f' ({more})'}"
            )
        self.max_model_len = min(self.config.max_model_len or context, context)
        grammars = grammars or Grammars(tokenizer, target.vocab_size, self.eos_token_ids)
        self.cache = target.new_cache()
        self.profile = StepProfile()
        self.governor = governor if self.config.rule.keeps_tokens else None
        contains_faults = self.config.contains_faults
        self._drafts = Drafts(drafter, target, self.cache, self.config.rule, contains_faults=contains_faults)
        needs = self._drafts.needs
        self.caches = CacheGroup([self.cache, *(own.cache for own in needs.caches)])
        self._forwards = Forwards(target, self.cache, self.config, needs)
        self.plan = MemoryPlan.of(self.config, target, self.cache, needs.caches)
        self._admission = Admission(
            target,
            self.eos_token_ids,
            tokenizer,
            self.max_model_len,
            None if self.plan is None else self.plan.most_tokens,
            contains_faults,
            grammars,
        )
        if prefixes is not None and self.plan is not None:
            prefixes.max_bytes = self.plan.num_bytes // PREFIX_DIVISOR
        self._scheduler = Scheduler(
            target, self.caches, self._drafts, self.config, plan=self.plan, prefixes=prefixes, owner=drafter
        )
        self._governing = Governing(self.governor, drafter.facts, self._scheduler)
        self._use = ExclusiveUse()
        self._is_broken = False
        self._steps_to_shrink = SHRINK_STEPS

    def __repr__(self) -> str:
        return (
            f"Engine({self.target.name}, drafter={self.drafter.name}, acceptance={self.config.acceptance}, "
            f"{self.num_running} rows running, {len(self._scheduler.waiting)} requests waiting)"
        )

    # -- requests ----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        history_ids: Sequence[int] | None = None,
        output_ids: Sequence[Sequence[int]] = (),
        longest: int = 0,
    ) -> list[Row]:
        """Queue a prompt; returns its ``params.n`` rows, which share the prefill.

        Args:
          history_ids: the prompt as the row's processors are to see it; see `Sampler`.
          output_ids: what each sample has said already: with the same seed it goes on to the text that was begun.
          longest: tokens of the longest prompt of its batch, where that decides on the frequencies of longrope.

        Raises: PromptError for an empty prompt or ids outside the vocabulary; ContextLengthError when the prompt
        leaves no room for a token, or max_kv_bytes none for the request; ConfigError for the id of a request that is
        still unfinished.
        """
        rows = self._admission.rows(prompt_ids, params, request_id, history_ids, output_ids, longest)
        if self._scheduler.holds(rows[0].request_id):
            raise ConfigError(f"request {request_id!r} is still running; give every request an id of its own")
        if self.plan is not None:
            self.plan.check(rows[0].num_prompt_tokens, rows[0].max_length)
        self._scheduler.queue(rows, are_alike=not output_ids)
        return rows

    def abort(self, request_id: str) -> list[Row]:
        """End every row of a request, queued or running; returns those that were ended."""
        with self._exclusive():
            ended = self._scheduler.withdraw(request_id)
            for row in ended:
                row.finish_reason = "abort"
            return ended

    def abort_row(self, row: Row, reason: str = "abort") -> None:
        """End one row that decodes; the other samples of its request go on."""
        with self._exclusive():
            if row in self._scheduler.decoding:
                row.finish_reason = reason
                self._scheduler.retire(row)

    def forget_prefixes(self) -> None:
        """Drop what earlier rows left, for instance because the weights have changed."""
        self._scheduler.forget_prefixes()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running or self._scheduler.ended)

    @property
    def num_running(self) -> int:
        """Rows in the cache, decoding or still prefilling."""
        return len(self._scheduler.running)

    @property
    def running_rows(self) -> list[Row]:
        """Rows in the cache, in its order: those that decode come first."""
        return self._scheduler.running

    @property
    def decoding_rows(self) -> list[Row]:
        """Rows whose prompt is in the cache, in cache order."""
        return self._scheduler.decoding

    @property
    def waiting_rows(self) -> list[Row]:
        """Rows that no step has touched yet."""
        return [each for row in self._scheduler.waiting for each in (row, *row.forks)]

    # -- steps -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RowOutput]:
        """One target forward: a prefill chunk, or a round of drafting and verification.

        Returns: what was added to which row; empty for a prefill step.
        Raises: EngineBusyError when another thread is inside. Any other error, and Ctrl-C, ends the running rows
          with the reason "abort", since nothing is known of their state; those that wait are run by the next step.
        """
        with self._exclusive():
            if self._scheduler.ended:
                return [RowOutput(row, (), 0) for row in self._scheduler.take_ended()]
            self._forwards.begin_step()
            self._steps_to_shrink -= 1
            if not self._steps_to_shrink:
                self._shrink()
            self._scheduler.admit(self.profile, self._governing.welcomes)
            if reading := self._scheduler.to_read():
                self._read(reading)
                return []
            decoding = self._scheduler.decoding
            return self._decode(decoding) if decoding else []

    def run(self) -> Iterator[list[RowOutput]]:
        """Step until every request has finished."""
        while self.has_unfinished:
            yield self.step()

    def _read(self, rows: list[Row]) -> None:
        """Read the next chunks of the prompts of neighbouring rows."""
        start = perf_counter()
        chunks = [self._scheduler.next_chunk(row) for row in rows]
        first_slot = rows[0].slot
        shows = self._drafts.needs.reads_prompts and any(row.has_drafter for row in rows)
        output = self._forwards.read(chunks, first_slot, keeps_logits=rows[0].learns_logprobs, shows=shows)
        self.cache.commit([range(len(chunk)) for chunk in chunks], first_slot)
        if shows:
            shown = [
                PromptChunk(row.num_prefilled, len(chunk), RowFeatures(output, i))
                for i, (row, chunk) in enumerate(zip(rows, chunks, strict=True))
            ]
            with self._governing.reading():
                self._drafts.start(rows, shown)
        for place, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            if row.learns_logprobs:
                row.learn_logprobs(len(chunk), output.logits[place])
            row.num_prefilled += len(chunk)
        self.profile.num_prefill_tokens += sum(map(len, chunks))
        self._scheduler.start([row for row in rows if row.is_prefilled])
        self.profile.prefill_seconds += perf_counter() - start

    def _decode(self, rows: list[Row]) -> list[RowOutput]:
        """One round over the rows that decode."""
        clock = Clock(self.profile)
        is_plain = all(row.is_plain and not row.drafts_itself for row in rows)
        limits = self._forwards, self._governing, self._scheduler.max_nodes
        trees = [undrafted(row) for row in rows] if is_plain else propose(rows, self._drafts, *limits)
        self._erase_doubtful(rows)
        clock.lap("propose_seconds")
        output = self._forwards.verify(trees, shows=not is_plain)
        logits = output.logits
        clock.lap("verify_seconds")
        choices = choose_all(rows, trees, logits) if self._drafts.needs.choices and not is_plain else None
        verdicts = accept_rows(self.config.acceptance, rows, trees, logits, choices, self.config.typical)
        clock.lap("accept_seconds")
        outputs = emit(rows, trees, verdicts, logits, self.config)
        clock.lap("emit_seconds")
        paths = [verdict.path[: len(output.token_ids)] for verdict, output in zip(verdicts, outputs, strict=True)]
        self.cache.commit(paths)
        self._erase_doubtful(rows)
        clock.lap("commit_seconds")
        if self._drafts.observes and not is_plain:
            features = [RowFeatures(output, i, choices) for i in range(len(rows))]
            observe(self._drafts, trees, paths, outputs, features)
        clock.lap("observe_seconds")
        self.profile.num_steps += 1
        if is_plain:
            self._governing.rested(len(rows), clock)
        else:
            self._governing.learn(trees, outputs, clock)
        clock.skip()
        finished = [row for row in rows if row.is_finished]
        for row in finished:
            self.profile.ended.add(row.stats)
        self._scheduler.retire(*finished)
        clock.lap("emit_seconds")
        if not is_plain and self._governing.leaves(self._scheduler.running):
            self._scheduler.leave_drafter()
        return outputs

    def _erase_doubtful(self, rows: list[Row]) -> None:
        """Zero what lies behind the committed columns of rows in doubt, which may not be finite."""
        for slot, row in enumerate(rows):
            if row.is_in_doubt:
                self.cache.erase(slot, self.cache.lengths[slot])

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self, prefix_bytes: int = 0) -> MemoryUse:
        """Keys and values in memory, and what is planned for them."""
        return MemoryUse.of(self.plan, self.cache.lengths, self.caches.num_bytes, prefix_bytes)

    def release_memory(self) -> None:
        """Give back all keys and values of an engine without rows, and what has grown with them; the next step
        allocates anew. Rows that run keep what they need."""
        with self._exclusive():
            self._shrink()
            if self._scheduler.running:
                return
            is_released = self.caches.release()
            self.target.release_tables()
            if is_released:
                return_free_memory()
                if self.target.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _shrink(self) -> None:
        """Give back what no row has needed since the last call."""
        self._steps_to_shrink = SHRINK_STEPS
        if self.caches.shrink():
            return_free_memory()

    # -- steps that break off ----------------------------------------------------------------------------------

    def _exclusive(self) -> ExclusiveCall:
        return ExclusiveCall(self._enter, self._leave)

    def _enter(self, caller: FrameType) -> None:
        if not self._use.take(caller):
            raise EngineBusyError("this engine is running in another thread; use one engine per thread or a lock")
        if self._is_broken:
            self._end_all()
        self._is_broken = True  # unless it comes to its end

    def _leave(self, is_whole: bool) -> None:
        try:
            if is_whole:
                self._is_broken = False
            else:
                self._end_all()
        finally:
            self._use.give_back()

    def _end_all(self) -> None:
        self._scheduler.end_all()
        self._is_broken = False
