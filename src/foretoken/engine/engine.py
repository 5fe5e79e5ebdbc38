"""The loop: schedule, propose, verify, accept, commit, observe, emit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from foretoken.config.engine import EngineConfig
from foretoken.engine.accepting import accept_rows, choose_all
from foretoken.engine.batch import Batch, Run
from foretoken.engine.drafter import Budget, Drafter, StepResult
from foretoken.engine.emitting import emit
from foretoken.engine.features import ForwardFeatures
from foretoken.engine.forwards import NO_LIMIT, Forwards
from foretoken.engine.outputs import RowOutput, TokenLogprobs
from foretoken.engine.prefill import Prefill
from foretoken.engine.sequence import Sequence, check_prompt
from foretoken.engine.stats import Clock, StepProfile
from foretoken.engine.stopping import StopChecker
from foretoken.errors import ConfigError, EngineBusyError, TreeError
from foretoken.law.noise import fresh_seed, mix
from foretoken.law.sampling import SamplingLaw
from foretoken.model.cache.prefixes import PrefixStore
from foretoken.model.lm import CausalLM
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.config.sampling import SamplingParams

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

    Exactness: under "match" the tokens equal plain decoding with the same seed, whatever is drafted.
    Randomness: a pure function of (seed of the row, absolute position, token id) under "match"; keyed streams of
    (seed, step, position, purpose) under "standard" and "block".
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
        if prefixes is not None and self.config.is_strict:
            raise ConfigError(
                "exactness='strict' must reproduce every bit, but keys and values of earlier rows were rounded at "
                "other shapes; keep no prefixes, or use exactness='default'"
            )
        self._prefixes = prefixes
        self.cache = target.new_cache()
        self.drafter.bind(target, self.cache)
        self.profile = StepProfile()
        self._batch = Batch(self.cache, self.config.max_num_seqs)
        self._forwards = Forwards(target, self.cache, self.config, self.max_model_len, drafter.requires)
        self._prefill = Prefill(self._batch, self._forwards, drafter, self.config.prefill_chunk_size)
        self._is_broken = False
        self._ids = count()  # unique also when requests are added from several threads
        self._entered = threading.Lock()

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
        leaves no room for a token; ConfigError for the id of a request that is still unfinished.
        """
        prompt = [int(token) for token in prompt_ids]
        check_prompt(prompt, self.target.vocab_size, self.max_model_len)
        seed = fresh_seed() if params.seed is None else params.seed
        request_id = request_id if request_id is not None else f"request-{next(self._ids)}"
        if self._batch.holds(request_id):
            raise ConfigError(f"request {request_id!r} is still running; give every request an id of its own")
        runs = [
            self._new_run(prompt, self._new_law(params, prompt, history_ids, mix(seed, index)), request_id, index)
            for index in range(params.n)
        ]
        runs[0].forks = runs[1:]
        self._batch.waiting.append(runs[0])
        return [run.row for run in runs]

    def _new_law(
        self, params: SamplingParams, prompt: list[int], history_ids: Seq[int] | None, seed: int
    ) -> SamplingLaw:
        law = SamplingLaw(
            params,
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            prompt_ids=prompt,
            history_ids=history_ids,
            device=self.target.device,
        )
        law.seed = seed
        return law

    def _new_run(self, prompt: list[int], law: SamplingLaw, request_id: str, index: int) -> Run:
        params = law.params
        budget = self.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        row = Sequence(
            id=next(self._ids),
            request_id=request_id,
            index=index,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=params,
            seed=law.seed,
            law=law,
            max_length=min(budget, self.max_model_len),
        )
        checker = StopChecker(params, self.eos_token_ids, len(prompt), row.max_length, self.tokenizer)
        row.text = checker.text
        return Run(row, checker)

    def abort(self, request_id: str) -> list[Sequence]:
        """End every row of a request, queued or running; returns those that were ended."""
        with self._exclusive():
            ended = self._batch.withdraw(request_id)
            for run in [*self._batch.decoding, *self._batch.prefilling]:
                if run.row.request_id == request_id:
                    ended += [run, *run.forks]
                    self._retire(run)
            for run in ended:
                run.row.finish_reason = "abort"
            return [run.row for run in ended]

    def abort_row(self, row: Sequence) -> None:
        """End one row that decodes; the other samples of its request go on."""
        with self._exclusive():
            for run in self._batch.decoding:
                if run.row is row:
                    row.finish_reason = "abort"
                    self._retire(run)

    def forget_prefixes(self) -> None:
        """Drop what earlier rows left, for instance because the weights have changed."""
        if self._prefixes is not None:
            self._prefixes.clear()

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
        return [run.row for run in self._batch.decoding]

    @property
    def waiting_rows(self) -> list[Sequence]:
        """Rows that no step has touched yet."""
        return [member.row for run in self._batch.waiting for member in (run, *run.forks)]

    # -- steps -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RowOutput]:
        """One target forward: a prefill chunk, or a round of drafting and verification.

        Returns: what was added to which row; empty for a prefill step.
        Raises: EngineBusyError when another thread is inside. Any other error, and Ctrl-C, ends the running rows
          with the reason "abort", since nothing is known of their state; those that wait are run by the next step.
        """
        with self._exclusive():
            self._admit()
            if self._prefill.is_due:
                start = perf_counter()
                self._enter(self._prefill.step(self.profile))
                self.profile.prefill_seconds += perf_counter() - start
                return []
            decoding = self._batch.decoding
            return self._decode(decoding) if decoding else []

    def run(self) -> Iterator[list[RowOutput]]:
        """Step until every request has finished."""
        while self.has_unfinished:
            yield self.step()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._entered.acquire(blocking=False):
            raise EngineBusyError("this engine is running in another thread; use one engine per thread or a lock")
        try:
            if self._is_broken:
                self._end_all()
            yield
        except BaseException:
            self._is_broken = True
            self._end_all()
            raise
        finally:
            self._entered.release()

    def _end_all(self) -> None:
        """Leave nothing of the rows of a step that broke off; may itself be cut off and called again."""
        self.drafter.forget([run.row for run in self._batch.running])
        for run in self._batch.clear():
            run.row.finish_reason = run.row.finish_reason or "abort"
        self._is_broken = False

    # -- rows --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting requests a row, as far as there is room, and what earlier rows left of their prompts."""
        admitted = self._batch.admit()
        for slot, run in enumerate(admitted, len(self._batch) - len(admitted)):
            self._recall(run, slot)
        self._enter([run for run in admitted if run.is_prefilled])  # of one token, or going on from an earlier row

    def _recall(self, run: Run, slot: int) -> None:
        """Take over what earlier rows left of the prompt's beginning, as far as the drafter can go on from there."""
        run.num_changes = self.target.num_changes
        if self._prefixes is None:
            return
        prompt = run.row.token_ids[: run.num_to_prefill]
        run.num_prefilled = self._prefixes.load(prompt, self.cache, slot, partial(self.drafter.recall, run.row))
        run.row.num_cached_tokens = run.num_prefilled
        self.profile.num_cached_tokens += run.num_prefilled

    def _enter(self, runs: list[Run]) -> None:
        """Let prefilled runs decode, with the other samples of their requests."""
        if not runs:
            return
        self.drafter.start([run.row for run in runs])
        for run in runs:
            entered = self._batch.enter(run)
            for entry in entered:
                entry.num_changes = run.num_changes
            if entered[1:]:
                self.drafter.fork(run.row, [entry.row for entry in entered[1:]])

    def _keep(self, run: Run) -> None:
        """Leave what a row has in the caches to prompts that begin like it."""
        is_doubtful = run.is_in_doubt or run.row.finish_reason == "error"
        if self._prefixes is None or is_doubtful or run.num_changes != self.target.num_changes:
            return
        slot = self._batch.slot_of(run)
        length = self.cache.lengths[slot]
        self._prefixes.keep(run.row.token_ids, self.cache, slot, length, partial(self.drafter.keep, run.row))

    def _retire(self, run: Run) -> None:
        """Take a run out of the batch."""
        self._keep(run)
        self.drafter.forget([run.row])
        self._batch.remove(run, erase=run.row.finish_reason in (None, "error"))

    # -- decode ------------------------------------------------------------------------------------------------

    def _decode(self, runs: list[Run]) -> list[RowOutput]:
        """One round over all rows that decode."""
        clock = Clock(self.profile)
        rows = [run.row for run in runs]
        trees = self._propose(runs)
        clock.lap("propose_seconds")
        output = self._forwards.verify(trees)
        logits = output.logits
        clock.lap("verify_seconds")
        choices = choose_all(rows, trees, logits) if self.drafter.requires.choices else None
        verdicts = accept_rows(self.config.acceptance, rows, trees, logits, choices)
        clock.lap("accept_seconds")
        outputs = [
            emit(run, tree, verdict, logits[i], self.config)
            for i, (run, tree, verdict) in enumerate(zip(runs, trees, verdicts, strict=True))
        ]
        clock.lap("emit_seconds")
        paths = [verdict.path[: len(output.token_ids)] for verdict, output in zip(verdicts, outputs, strict=True)]
        self.cache.commit(paths)
        for slot, run in enumerate(runs):
            if run.is_in_doubt:
                self.cache.erase(slot, self.cache.lengths[slot])
        clock.lap("commit_seconds")
        self._observe(trees, paths, outputs, ForwardFeatures(output, choices))
        for run in runs:
            if run.row.is_finished:
                self._retire(run)
        clock.lap("observe_seconds")
        self.profile.num_steps += 1
        return outputs

    def _propose(self, runs: list[Run]) -> list[DraftTree]:
        """Drafts, cut to what a row may still emit: accepted tokens and the bonus together fit its budget."""
        longest = self._forwards.longest_chain
        limit = longest if self.config.is_strict else NO_LIMIT
        rows = [run.row for run in runs]
        chains_only = self.config.is_strict or not self.config.rule.takes_trees or not self.target.supports_trees
        depths = [0 if run.is_in_doubt else min(run.row.num_remaining_tokens - 1, limit) for run in runs]
        budgets = [Budget(depth, chains_only=chains_only) for depth in depths]
        trees = []
        for row, tree, budget in zip(rows, self.drafter.propose(rows, budgets), budgets, strict=True):
            if tree.tokens[0] != row.pending:
                raise TreeError(f"the draft starts with token {tree.tokens[0]}, but {row.pending} is pending")
            if min(tree.tokens) < 0 or max(tree.tokens) >= self.target.vocab_size:
                raise TreeError(f"the draft {tree.tokens} leaves the vocabulary, 0..{self.target.vocab_size - 1}")
            trees.append(budget.cut(tree))
        return [tree.cut(longest) for tree in trees] if all(tree.is_chain for tree in trees) else trees

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
        self.drafter.observe([outputs[i].row for i in going_on], results)
