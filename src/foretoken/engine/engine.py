"""The loop: schedule, propose, verify, accept, commit, observe, emit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from itertools import count, takewhile
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from foretoken.accept.rules import Verdict
from foretoken.config.engine import EngineConfig
from foretoken.engine.accepting import Choices, accept_rows, choose_all
from foretoken.engine.batch import Batch, Run
from foretoken.engine.drafter import Budget, Drafter, StepResult
from foretoken.engine.features import concatenate, gather, recording
from foretoken.engine.outputs import Emitted, RowOutput, TokenLogprobs
from foretoken.engine.sequence import Sequence, check_prompt
from foretoken.engine.stats import Clock, StepProfile
from foretoken.engine.stopping import StopChecker
from foretoken.errors import ConfigError, EngineBusyError, TreeError
from foretoken.law.noise import fresh_seed, mix
from foretoken.law.sampling import SamplingLaw, failure
from foretoken.model.cache.prefixes import PrefixStore
from foretoken.model.execution.kernels import Bucket
from foretoken.model.execution.packing import HALVES, packed_dtype
from foretoken.model.lm import CausalLM, Nodes
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.config.sampling import SamplingParams

__all__ = ["Engine", "EngineConfig", "RowOutput", "TokenLogprobs"]

DEFAULT_MAX_LENGTH = 1 << 20  # of models that state no context length


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
        may share it. Not used for drafters that need features of every token of the prompt.

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
        context = target.context_length or DEFAULT_MAX_LENGTH
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
        is_half = target.dtype in HALVES and packed_dtype(target.dtype) == target.dtype
        self._wants_bucket = self.config.is_strict or (self.config.exactness == "default" and is_half)
        self.cache = target.new_cache()
        self.drafter.bind(target, self.cache)
        self.profile = StepProfile()
        self._batch = Batch(self.cache, self.config.max_num_seqs)
        self._has_prefilled = False  # since the last decode step
        self._to_feed: set[Run] = set()  # that have not had their chunk in this round of prefill
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
            admitted = self._batch.admit()
            for slot, run in enumerate(admitted, len(self._batch) - len(admitted)):
                self._recall(run, slot)
            for run in admitted:
                if run.is_prefilled:  # a prompt of one token, or one that goes on from an earlier row
                    self._enter(run)
            if self._due_to_prefill():
                self._prefill(self._prompts_of_one_shape())
                return []
            self._has_prefilled = False
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
        self.drafter.forget([run.row for run in self._batch.decoding])
        for run in self._batch.clear():
            run.row.finish_reason = run.row.finish_reason or "abort"
        self._is_broken = False

    # -- rows --------------------------------------------------------------------------------------------------

    def _enter(self, run: Run) -> None:
        """Let a prefilled run decode, with the other samples of its request."""
        entered = self._batch.enter(run)
        for entry in entered:
            entry.num_changes = run.num_changes
        features = concatenate(run.features)
        run.features = []
        self.drafter.start([entry.row for entry in entered], [features] * len(entered))

    def _recall(self, run: Run, slot: int) -> None:
        """Take over what earlier rows left of the prompt's beginning."""
        run.num_changes = self.target.num_changes
        needs_features = self.drafter.requires.last_hidden or self.drafter.requires.layer_inputs
        if self._prefixes is None or needs_features:
            return
        run.num_prefilled = self._prefixes.load(run.row.token_ids[: run.num_to_prefill], self.cache, slot)
        run.row.num_cached_tokens = run.num_prefilled
        self.profile.num_cached_tokens += run.num_prefilled

    def _keep(self, run: Run) -> None:
        """Leave what a row has in the caches to prompts that begin like it."""
        is_doubtful = run.is_in_doubt or run.row.finish_reason == "error"
        if self._prefixes is None or is_doubtful or run.num_changes != self.target.num_changes:
            return
        slot = self._batch.slot_of(run)
        self._prefixes.keep(run.row.token_ids, self.cache, slot, self.cache.lengths[slot])
        if slot < self._batch.num_decoding:
            self.drafter.retain([run.row], self._prefixes.limit)

    def _retire(self, run: Run) -> None:
        """Take a run out of the batch."""
        self._keep(run)
        if run in self._batch.decoding:
            self.drafter.forget([run.row])
        self._batch.remove(run, erase=run.row.finish_reason in (None, "error"))

    # -- shapes ------------------------------------------------------------------------------------------------

    @property
    def _bucket(self) -> Bucket | None:
        """The shapes at which steps of chains run, or None where each runs at its own."""
        return self.target.kernel_facts(self.config.strict_width).bucket if self._wants_bucket else None

    @property
    def _longest_chain(self) -> int:
        """How many tokens a draft may have that is to run at shapes which keep bits."""
        if self._bucket is not None:
            return self._bucket.max_nodes - 1
        return self.config.strict_width - 1 if self._has_one_shape else DEFAULT_MAX_LENGTH

    @property
    def _has_one_shape(self) -> bool:
        """Strict mode where no smaller shapes keep the bits of a row: every step then runs at the largest there is."""
        return self.config.is_strict and self._bucket is None

    @property
    def _view_length(self) -> int | None:
        if not self._has_one_shape:
            return None
        spare = max(self.config.prefill_chunk_size, self.config.strict_width)
        return self.max_model_len + spare

    # -- prefill -----------------------------------------------------------------------------------------------

    def _due_to_prefill(self) -> bool:
        """Whether a prompt is to be read now. Every prompt gets a chunk; then rows that decode have a step."""
        prefilling = self._batch.prefilling
        self._to_feed &= set(prefilling)
        if not self._to_feed and not (self._has_prefilled and self._batch.num_decoding):
            self._to_feed = set(prefilling)
        return bool(self._to_feed)

    def _prompts_of_one_shape(self) -> list[Run]:
        """Neighbours in the cache that are due and whose chunks may be read in one forward.

        Where a row is to keep its bits, what a prompt leaves in the cache depends on the prompt alone: prompts are read
        one by one, or those together whose chunks begin at one place and are padded to one width.
        """
        due = [run for run in self._batch.prefilling if run in self._to_feed]
        shape = self._shape_of_chunk(due[0])
        if shape is None:
            return due[:1]
        neighbours = self._batch.prefilling[self._batch.slot_of(due[0]) - self._batch.num_decoding :]
        return list(takewhile(lambda run: run in self._to_feed and self._shape_of_chunk(run) == shape, neighbours))

    def _shape_of_chunk(self, run: Run) -> tuple[int, ...] | None:
        """The key that prompts read together have in common: start and width of the chunk. None: read it alone."""
        if self._has_one_shape:
            return None
        if self._bucket is None:
            return ()
        length = min(self.config.prefill_chunk_size, run.num_to_prefill - run.num_prefilled)
        width = self._bucket.prefill_width(length)
        return None if self._bucket.rows_per_call(width) is None else (run.num_prefilled, width)

    def _prefill(self, runs: list[Run]) -> None:
        """Feed one chunk of the prompt, all but its last token, of rows that are neighbours in the cache."""
        start = perf_counter()
        self._has_prefilled = True
        self._to_feed.difference_update(runs)
        size = self.config.prefill_chunk_size
        first_row = self._batch.slot_of(runs[0])
        ends = [min(run.num_prefilled + size, run.num_to_prefill) for run in runs]
        chunks = [run.row.token_ids[run.num_prefilled : end] for run, end in zip(runs, ends, strict=True)]
        width = size if self._has_one_shape else None
        if self._bucket is not None:
            width = self._bucket.prefill_width(len(chunks[0]))
        nodes = Nodes.from_chains(chunks, width)
        requires = self.drafter.requires.of_prompt
        with recording(self.target, requires) as record:
            keep = None if requires.last_hidden or requires.top_k else slice(0, 0)
            logits = self.target.forward(
                nodes,
                self.cache,
                first_row=first_row,
                keep=keep,
                view_length=self._view_length,
                rows_per_call=self._bucket.rows_per_call(nodes.width) if self._bucket is not None else None,
            )
        self.cache.commit([range(len(chunk)) for chunk in chunks], first_row)
        for i, (run, chunk) in enumerate(zip(runs, chunks, strict=True)):
            run.num_prefilled += len(chunk)
            if requires:
                run.features.append(gather(requires, record, logits, i, range(len(chunk))))
        self.profile.num_prefill_tokens += sum(map(len, chunks))
        for run in runs:
            if run.is_prefilled:
                self._enter(run)
        self.profile.prefill_seconds += perf_counter() - start

    # -- decode ------------------------------------------------------------------------------------------------

    def _decode(self, runs: list[Run]) -> list[RowOutput]:
        """One round over all rows that decode."""
        clock = Clock(self.profile)
        rows = [run.row for run in runs]
        trees = self._propose(runs)
        clock.lap("propose_seconds")
        with recording(self.target, self.drafter.requires) as record:
            logits = self._verify(trees)
        clock.lap("verify_seconds")
        choices = choose_all(rows, trees, logits) if self.drafter.requires.choices else None
        verdicts = accept_rows(self.config.acceptance, rows, trees, logits, choices)
        clock.lap("accept_seconds")
        outputs = [
            self._emit(run, tree, verdict, logits[i])
            for i, (run, tree, verdict) in enumerate(zip(runs, trees, verdicts, strict=True))
        ]
        clock.lap("emit_seconds")
        paths = [verdict.path[: len(output.token_ids)] for verdict, output in zip(verdicts, outputs, strict=True)]
        self.cache.commit(paths)
        for slot, run in enumerate(runs):
            if run.is_in_doubt:
                self.cache.erase(slot, self.cache.lengths[slot])
        clock.lap("commit_seconds")
        self._observe(runs, trees, paths, outputs, logits, choices, record)
        for run in runs:
            if run.row.is_finished:
                self._retire(run)
        clock.lap("observe_seconds")
        self.profile.num_steps += 1
        return outputs

    def _propose(self, runs: list[Run]) -> list[DraftTree]:
        """Drafts, cut to what a row may still emit: accepted tokens and the bonus together fit its budget."""
        limit = self._longest_chain if self.config.is_strict else DEFAULT_MAX_LENGTH
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
        if all(tree.is_chain for tree in trees):
            longest = self._longest_chain
            trees = [tree.cut(longest) for tree in trees]
        return trees

    def _verify(self, trees: list[DraftTree]) -> torch.Tensor:
        """Logits (B, N, V) of every node, in one forward of the target."""
        if self._has_one_shape:
            padding = [DraftTree.root(0)] * (self.config.max_num_seqs - len(trees))
            nodes = Nodes.from_trees([*trees, *padding], self.config.strict_width)
            return self.target.forward(nodes, self.cache, view_length=self._view_length)
        if self._bucket is None or not all(tree.is_chain for tree in trees):
            return self.target.forward(Nodes.from_trees(trees), self.cache)
        width = max(map(len, trees))
        nodes = Nodes.from_trees(trees, self._bucket.width(len(trees), width))
        return self.target.forward(nodes, self.cache, bucket=self._bucket)[:, :width]

    def _emit(self, run: Run, tree: DraftTree, verdict: Verdict, logits: torch.Tensor) -> RowOutput:
        """Append the accepted tokens and the bonus, cut where the row ends.

        A drafted token that the model cannot digest harms the nodes beside it, since 0 * NaN is NaN in every masked
        sum. So a failure alongside drafts only puts the row in doubt: its next step runs without any.
        """
        row = run.row
        row.num_steps += 1
        has_failed = verdict.next_token < 0
        run.is_in_doubt = has_failed and tree.num_draft_tokens > 0
        tokens = [tree.tokens[node] for node in verdict.path[1:]]
        error = failure(logits[verdict.path[-1]], row.law) if has_failed and not run.is_in_doubt else None
        if not has_failed:
            tokens.append(verdict.next_token)
        finish = None
        for length, token in enumerate(tokens, 1):
            finish = run.checker.check(token)
            if finish is not None:
                tokens = tokens[:length]
                break
        emitted = Emitted(row, tree, verdict.path[: len(tokens)], logits)
        logprobs = emitted.logprobs(tokens)
        kept_scores = emitted.scores() if self.config.output_scores else None
        kept_logits = emitted.logits() if self.config.output_logits else None
        num_accepted = min(len(verdict.path) - 1, len(tokens))
        row.record(tree.num_draft_tokens, tree.depth, num_accepted, len(tokens))
        if tree.num_draft_tokens:
            row.stats.credit(tree, verdict.path[1 : num_accepted + 1])
        row.extend(tokens)
        if finish is not None:
            row.finish_reason, row.stop_reason, error = finish.reason, finish.cause, None
        elif error is not None:
            row.finish_reason, row.stop_reason = "error", str(error)
        return RowOutput(row, tuple(tokens), num_accepted, logprobs, error, kept_scores, kept_logits)

    def _observe(
        self,
        runs: list[Run],
        trees: list[DraftTree],
        paths: list[tuple[int, ...]],
        outputs: list[RowOutput],
        logits: torch.Tensor,
        choices: Choices | None,
        record: object,
    ) -> None:
        going_on = [i for i, run in enumerate(runs) if outputs[i].token_ids and not run.row.is_finished]
        requires = self.drafter.requires
        results = []
        for i in going_on:
            nodes = range(len(trees[i])) if requires.all_nodes else paths[i]
            features = gather(requires, record, logits, i, nodes, None if choices is None else choices[i])
            results.append(StepResult(trees[i], paths[i], outputs[i].token_ids, features))
        self.drafter.observe([runs[i].row for i in going_on], results)
