"""The loop: schedule, propose, verify, accept, commit, observe, emit."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from foretoken.config.engine import EngineConfig
from foretoken.engine.accepting import accept_rows, choose_all
from foretoken.engine.batch import Batch, Member
from foretoken.engine.drafter import Drafter, StepResult
from foretoken.engine.emitting import emit
from foretoken.engine.exclusive_use import ExclusiveUse
from foretoken.engine.features import ForwardFeatures
from foretoken.engine.forwards import NO_LIMIT, Forwards
from foretoken.engine.governing import AnyGovernor, Governing
from foretoken.engine.guarding import GuardedDrafter
from foretoken.engine.memory import MemoryPlan
from foretoken.engine.outputs import RowOutput, TokenLogprobs
from foretoken.engine.prefill import Prefill
from foretoken.engine.proposing import Proposing
from foretoken.engine.requests import Requests
from foretoken.engine.reuse import Reuse
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.sequence import Sequence, as_ids, check_prompt
from foretoken.engine.stats import Clock, StepProfile
from foretoken.errors import ConfigError, EngineBusyError
from foretoken.model.cache.prefixes import PrefixStore
from foretoken.model.execution.native import loaded_helpers
from foretoken.model.lm import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.config.sampling import SamplingParams
    from foretoken.tree import DraftTree

__all__ = ["Engine", "EngineConfig", "RowOutput", "TokenLogprobs"]


class Engine:
    """Runs many rows over one target and one drafter; rows join and leave between steps.

    A step is either one prefill chunk or one round of propose, verify, accept, commit, observe, emit, and makes
    exactly one target forward. Plain decoding is the round with the empty draft.

    Args:
      target: the model whose law is kept.
      drafter: proposes; `EmptyDrafter` for plain decoding.
      eos_token_ids: tokens that end a row.
      tokenizer: needed for stop strings only.
      prefixes: where rows that have ended are kept for prompts that begin like them; several engines over one target
        may share it.
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
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config or EngineConfig()
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        context = target.context_length or NO_LIMIT
        if target.context_length is not None and context < (self.config.max_model_len or 0):
            raise ConfigError(
                f"max_model_len is {self.config.max_model_len}, but {target.name} has a context of {context}; lower it"
            )
        self.max_model_len = min(self.config.max_model_len or context, context)
        self.cache = target.new_cache()
        drafter = self._guarded = GuardedDrafter(drafter) if self.config.contains_faults else drafter
        self._reuse = Reuse(prefixes, target, self.cache, drafter, self.config)
        drafter.bind(target, self.cache)
        self.profile = StepProfile()
        self._forwards = Forwards(target, self.cache, self.config, self.max_model_len, drafter.requires)
        self._plan = MemoryPlan.of(self.config, target, self._forwards, self.cache, drafter)
        self._batch = Batch(self.cache, self.config.max_num_seqs, self._plan)
        self._scheduler = Scheduler(self._batch, drafter, self._reuse)
        self._prefill = Prefill(self._batch, self._forwards, drafter, self.config.prefill_chunk_size)
        self.governor = governor if self.config.rule.keeps_tokens else None
        self._governing = Governing(self.governor, self._forwards, self._batch)
        self._proposing = Proposing(drafter, target, self._forwards, self._governing)
        self._requests = Requests(target, self.max_model_len, self.eos_token_ids, tokenizer, self.config)
        self._helpers = loaded_helpers() if target.device.type == "cpu" else None
        self._is_broken = False
        self._use = ExclusiveUse()

    def __repr__(self) -> str:
        return (
            f"Engine({self.target.name}, drafter={self.drafter.name}, acceptance={self.config.acceptance}, "
            f"{self.num_running} rows running, {len(self._batch.waiting)} requests waiting)"
        )

    # -- requests ----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        history_ids: Seq[int] | None = None,
    ) -> list[Sequence]:
        """Queue a prompt; returns its ``params.n`` rows, which share the prefill.

        Args:
          history_ids: the prompt as the row's processors are to see it; see `SamplingLaw`.

        Raises: PromptError for an empty prompt or ids outside the vocabulary; ContextLengthError when the prompt
        leaves no room for a token, or max_kv_bytes none for the request; ConfigError for the id of a request that is
        still unfinished.
        """
        prompt = as_ids(prompt_ids)
        check_prompt(prompt, self.target.vocab_size, self.max_model_len)
        request_id = self._requests.new_id() if request_id is None else request_id
        if self._batch.holds(request_id):
            raise ConfigError(f"request {request_id!r} is still running; give every request an id of its own")
        first = self._requests.first_member(prompt, params, request_id, history_ids)
        if self._plan is not None:
            self._plan.check(len(prompt), first.row.max_length)
        rows = [first.row, *(fork.row for fork in first.forks)]
        self._batch.waiting.append(first)
        return rows

    def abort(self, request_id: str) -> list[Sequence]:
        """End every row of a request, queued or running; returns those that were ended."""
        with self._exclusive():
            ended = self._batch.withdraw(request_id)
            for member in [*self._batch.decoding, *self._batch.prefilling]:
                if member.row.request_id == request_id:
                    ended += [member, *member.forks]
                    self._scheduler.retire(member)
            for member in ended:
                member.row.finish_reason = "abort"
            return [member.row for member in ended]

    def abort_row(self, row: Sequence, reason: str = "abort") -> None:
        """End one row that decodes; the other samples of its request go on."""
        with self._exclusive():
            for member in self._batch.decoding:
                if member.row is row:
                    row.finish_reason = reason
                    self._scheduler.retire(member)

    def forget_prefixes(self) -> None:
        """Drop what earlier rows left, for instance because the weights have changed."""
        self._reuse.clear()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._batch.waiting or len(self._batch))

    @property
    def num_running(self) -> int:
        """Rows in the cache, decoding or still prefilling."""
        return len(self._batch)

    @property
    def decoding_rows(self) -> list[Sequence]:
        """Rows whose prompt is in the cache, in cache order."""
        return [member.row for member in self._batch.decoding]

    @property
    def waiting_rows(self) -> list[Sequence]:
        """Rows that no step has touched yet."""
        return [each.row for member in self._batch.waiting for each in (member, *member.forks)]

    # -- steps -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RowOutput]:
        """One target forward: a prefill chunk, or a round of drafting and verification.

        Returns: what was added to which row; empty for a prefill step.
        Raises: EngineBusyError when another thread is inside. Any other error, and Ctrl-C, ends the running rows
          with the reason "abort", since nothing is known of their state; those that wait are run by the next step.
        """
        with self._exclusive():
            self._forwards.begin_step()
            self._scheduler.admit(self.profile)
            if self._prefill.is_due:
                start = perf_counter()
                self._scheduler.enter(self._prefill.step(self.profile))
                self.profile.prefill_seconds += perf_counter() - start
                return []
            decoding = self._scheduler.decoding()
            return self._decode(decoding) if decoding else []

    def run(self) -> Iterator[list[RowOutput]]:
        """Step until every request has finished."""
        while self.has_unfinished:
            yield self.step()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        caller = sys._getframe(2)  # that of the with statement
        if not self._use.take(caller):
            raise EngineBusyError("this engine is running in another thread; use one engine per thread or a lock")
        try:
            if self._is_broken:
                self._end_all()
            self._is_broken = True  # unless it comes to its end
            yield
            self._is_broken = False
        except BaseException:
            self._end_all()
            raise
        finally:
            self._use.give_back()

    def _end_all(self) -> None:
        self._scheduler.end_all()
        self._is_broken = False

    # -- decode ------------------------------------------------------------------------------------------------

    def _decode(self, members: list[Member]) -> list[RowOutput]:
        """One round over all rows that decode."""
        clock = Clock(self.profile)
        rows = [member.row for member in members]
        trees = self._proposing.step(members, self._batch.max_nodes)
        self._erase_doubtful(members)
        clock.lap("propose_seconds")
        with self._helpers.watched() if self._helpers is not None else nullcontext():
            output = self._forwards.verify(trees)
        logits = output.logits
        clock.lap("verify_seconds")
        choices = choose_all(rows, trees, logits) if self.drafter.requires.choices else None
        verdicts = accept_rows(self.config.acceptance, rows, trees, logits, choices, self.config.typical)
        clock.lap("accept_seconds")
        outputs = [
            emit(member, tree, verdict, logits, i, self.config)
            for i, (member, tree, verdict) in enumerate(zip(members, trees, verdicts, strict=True))
        ]
        clock.lap("emit_seconds")
        paths = [verdict.path[: len(output.token_ids)] for verdict, output in zip(verdicts, outputs, strict=True)]
        self.cache.commit(paths)
        self._erase_doubtful(members)
        clock.lap("commit_seconds")
        if self.drafter.observes:
            self._observe(trees, paths, outputs, ForwardFeatures(output, choices))
        for member in members:
            if member.row.is_finished:
                self.profile.ended.add(member.row.stats)
                self._scheduler.retire(member)
        clock.lap("observe_seconds")
        self.profile.num_steps += 1
        self._governing.learn(trees, outputs, clock)
        return outputs

    def _erase_doubtful(self, members: list[Member]) -> None:
        """Zero what lies behind the committed columns of rows in doubt, which may not be finite."""
        for slot, member in enumerate(members):
            if member.is_in_doubt:
                self.cache.erase(slot, self.cache.lengths[slot])

    def _observe(
        self,
        trees: list[DraftTree],
        paths: list[tuple[int, ...]],
        outputs: list[RowOutput],
        features: ForwardFeatures,
    ) -> None:
        """Tell the drafter of the rows that go on."""
        going_on = [i for i, output in enumerate(outputs) if output.token_ids and not output.row.is_finished]
        results = [StepResult(trees[i], paths[i], outputs[i].token_ids, features.of(i)) for i in going_on]
        self._guarded.observe([outputs[i].row for i in going_on], results)
