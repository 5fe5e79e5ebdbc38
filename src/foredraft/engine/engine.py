"""The loop: schedule, plan, propose, select, verify, accept, commit, observe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING

import torch

from foredraft import forking
from foredraft.accept import Choices, Verdict, accept, choose_all
from foredraft.config.engine import EngineConfig
from foredraft.devices import cpu_by_default
from foredraft.ending import is_running
from foredraft.engine.acceptance_model import AcceptanceModel
from foredraft.engine.drafter import Drafter, PromptChunk, StepResult
from foredraft.engine.drafts import Drafts
from foredraft.engine.features import RowFeatures
from foredraft.engine.governor import Governor
from foredraft.engine.logprobs import TokenLogprobs
from foredraft.engine.memory import PREFIX_DIVISOR, MemoryPlan, MemoryUse
from foredraft.engine.row import Admission, Row, RowOutput, logprobs_of
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.stats import Limits, StepClock, StepProfile, StepSeconds
from foredraft.engine.stopping import Finish, StopChecker
from foredraft.errors import ConfigError, EngineBusyError, as_exception, error_text, is_fatal
from foredraft.machine import return_free_memory
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.cache.ragged import CacheGroup
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Logits, Nodes, Output, Wanted
from foredraft.native.library import loaded_helpers
from foredraft.sampling import distribution
from foredraft.structured.grammars import Grammars
from foredraft.tree import DraftSize, DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foredraft.config.sampling import SamplingParams

__all__ = ["Engine", "EngineConfig", "RowOutput", "TokenLogprobs"]

NO_LIMIT = 1 << 20

SHRINK_STEPS = 256
"""Steps between two attempts to shrink the caches to the size that the rows need. The copy takes less time than one
step."""


class Engine:
    """Runs many rows over one target and one drafter; rows join and leave between steps.

    A step is either one prefill chunk or one round of propose, verify, accept, commit, observe, emit. A step makes
    exactly one forward pass of the target. Plain decoding is the round with the empty draft.

    Args:
      target: the model whose distribution is preserved.
      drafter: source of drafts; `EmptyDrafter` for plain decoding.
      eos_token_ids: tokens that end a row.
      tokenizer: tokenizer, needed only for stop strings.
      prefixes: store of finished rows, for prompts that begin with the same tokens. Several engines over one target may
        share it.
      grammars: compiled grammars of this target and tokenizer, for structured outputs.
      governor: chooses the draft size from measured costs, under "match". Without one, drafts are as large as allowed.

    Exactness: under "match" the tokens equal plain decoding with the same seed, whatever is drafted.
    Randomness: a pure function of (seed of the row, absolute position, token id) under "match"; keyed streams of (seed,
    step, position, purpose) under "standard" and "block". None under "typical", which is lossy.
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
        governor: Governor | None = None,
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
                f"max_model_len is {self.config.max_model_len}, but {target.name} has a context of {context}; "
                f"lower max_model_len{more and f' ({more})'}"
            )
        self.max_model_len = min(self.config.max_model_len or context, context)
        grammars = grammars or Grammars(tokenizer, target.vocab_size, self.eos_token_ids)
        self.cache = target.new_cache()
        self.profile = StepProfile()
        self.governor = governor if self.config.rule.keeps_tokens else None
        self.acceptance = AcceptanceModel() if self.governor is None else self.governor.acceptance
        contains_faults = self.config.contains_faults
        self._drafts = Drafts(drafter, target, self.cache, self.config.rule, contains_faults=contains_faults)
        if self.governor is None:
            self.acceptance.compare_with(self._drafts.facts.validated_acceptance)
        needs = self._drafts.needs
        self.caches = CacheGroup([self.cache, *(own.cache for own in needs.caches)])
        self._wanted = Wanted(needs.last_hidden, needs.layer_inputs)
        self._helpers = loaded_helpers() if target.device.type == "cpu" else None
        self._guarantee = target.guarantee(self.config.exactness)
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
        self._use = ExclusiveUse(self._scheduler.end_all)
        self._was_asked = False  # whether the drafter was asked for drafts in the current step
        self._has_doubtful = False  # whether any row is in doubt, see `_append`
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
        """Queue a prompt and return its ``params.n`` rows, which share the prefill.

        Args:
          history_ids: the prompt that the row's logits processors should see; see `Sampler`.
          output_ids: tokens that each sample has generated already. With the same seed, the row continues this output.
          longest: length of the longest prompt of the batch, in tokens, if it decides on the frequencies of longrope.

        Raises: PromptError for an empty prompt or ids outside the vocabulary; ContextLengthError when the prompt leaves
        no room for a token, or when max_kv_bytes is too small for the request; ConfigError for the id of a request that
        is still unfinished.
        """
        rows = self._admission.rows(prompt_ids, params, request_id, history_ids, output_ids, longest)
        if self._scheduler.holds(rows[0].request_id):
            raise ConfigError(f"request {request_id!r} is still running; give every request an id of its own")
        if self.plan is not None:
            self.plan.check(rows[0].num_prompt_tokens, rows[0].max_length)
        for row in rows:
            row.acceptance = self.acceptance
        self._scheduler.queue(rows, are_alike=not output_ids)
        return rows

    def abort(self, request_id: str) -> list[Row]:
        """End every row of a request, queued or running, and return the rows that were ended."""
        with self._use:
            ended = self._scheduler.withdraw(request_id)
            for row in ended:
                row.finish_reason = "abort"
            return ended

    def abort_row(self, row: Row, reason: str = "abort") -> None:
        """End one row that is decoding; the other samples of its request go on."""
        with self._use:
            if row in self._scheduler.decoding:
                row.finish_reason = reason
                self._scheduler.retire(row)

    def forget_prefixes(self) -> None:
        """Drop the prefixes kept from earlier rows, for instance because the weights have changed."""
        self._scheduler.forget_prefixes()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running or self._scheduler.ended)

    @property
    def num_running(self) -> int:
        """Number of rows in the cache, decoding or still prefilling."""
        return len(self._scheduler.running)

    @property
    def running_rows(self) -> list[Row]:
        """Rows in the cache, in cache order: rows that are decoding come first."""
        return self._scheduler.running

    @property
    def decoding_rows(self) -> list[Row]:
        """Rows whose prompt is in the cache, in cache order."""
        return self._scheduler.decoding

    @property
    def waiting_rows(self) -> list[Row]:
        """Rows that have not been part of any step yet."""
        return [each for row in self._scheduler.waiting for each in (row, *row.forks)]

    # -- steps -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RowOutput]:
        """Run one forward pass of the target: a prefill chunk, or a round of drafting and verification.

        Returns: the tokens that were added to each row; empty for a prefill step.
        Raises: EngineBusyError when another thread is inside. Any other error, and Ctrl-C, ends the running rows with
        the reason "abort", because their state is unknown then. Waiting rows run in the next step.
        """
        with self._use:
            if self._scheduler.ended:
                return [RowOutput(row, (), 0) for row in self._scheduler.take_ended()]
            self._guarantee = self.target.guarantee(self.config.exactness)  # the model may have changed
            self._steps_to_shrink -= 1
            if not self._steps_to_shrink:
                self._shrink()
            self._scheduler.admit(self.profile, self._attends)
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
        """Read the next chunks of the prompts of rows in neighbouring slots."""
        start = perf_counter()
        chunks = [self._scheduler.next_chunk(row) for row in rows]
        first_slot, needs = rows[0].slot, self._drafts.needs
        shows = needs.reads_prompts and not all(row.is_plain for row in rows)
        keeps_logits = rows[0].learns_logprobs or (shows and needs.prompt_logits)
        output = self.target.forward_with(
            self._wanted if shows else Wanted(),
            Nodes.from_chains(chunks),
            self.cache,
            first_row=first_slot,
            keep=None if keeps_logits else slice(0, 0),
        )
        self.cache.commit([range(len(chunk)) for chunk in chunks], first_slot)
        if shows:
            shown = [
                PromptChunk(row.num_prefilled, len(chunk), RowFeatures(output, i))
                for i, (row, chunk) in enumerate(zip(rows, chunks, strict=True))
            ]
            begun = perf_counter()
            self._drafts.start(rows, shown)
            if self.governor is not None:
                self.governor.read(perf_counter() - begun)
        for place, (row, chunk) in enumerate(zip(rows, chunks, strict=True)):
            if row.learns_logprobs:
                row.learn_logprobs(len(chunk), output.logits[place])
            row.num_prefilled += len(chunk)
        self.profile.num_prefill_tokens += sum(map(len, chunks))
        self._scheduler.start([row for row in rows if row.is_prefilled])
        self.profile.prefill_seconds += perf_counter() - start

    def _decode(self, rows: list[Row]) -> list[RowOutput]:
        """Run one round over the rows that are decoding. Plain decoding is a round with the empty draft.

        Node 0 of every draft is the row's pending token, which is part of the row and not yet in the cache. If the
        drafter fails, its rows go on with empty drafts and so with the same output (`Drafts`).
        """
        clock = StepClock()
        is_plain = True
        for row in rows:
            is_plain = is_plain and row.is_plain and not row.drafts_itself
        limits = [] if is_plain else self._limits(rows)
        sizes = self._plan(rows, limits)
        clock.append(perf_counter())
        drafts = self._drafts.none(rows) if is_plain else self._drafts.propose(rows, sizes, limits)
        clock.append(perf_counter())
        drafts = drafts if is_plain else self._select(rows, drafts, sizes)
        clock.append(perf_counter())
        output = self._verify(rows, drafts, shows=not is_plain)
        logits = output.logits
        clock.append(perf_counter())
        choices = choose_all(rows, drafts, logits) if self._drafts.needs.choices and not is_plain else None
        verdicts = accept(self.config.acceptance, rows, drafts, logits, choices, self.config.typical)
        clock.append(perf_counter())
        results, paths, finished = [], [], []
        self._has_doubtful = False
        for place, row in enumerate(rows):
            result = self._append(row, drafts[place], verdicts[place], logits, place)
            results.append(result)
            # node 0 and the accepted nodes that were appended; the last token of the row is pending and stays out
            paths.append(verdicts[place].path[: len(result.token_ids)])
            if row.finish_reason is not None:
                finished.append(row)
        clock.append(perf_counter())
        self.cache.commit(paths)
        if self._has_doubtful:
            self._erase_doubtful(rows)
        clock.append(perf_counter())
        if self._drafts.observes and not is_plain:
            self._tell_drafter(drafts, paths, results, output, choices)
        clock.append(perf_counter())
        self.profile.num_steps += 1
        self._govern(drafts, results, clock.enter(self.profile))
        for row in finished:
            self.profile.ended.add(row.stats)
        if finished:
            self._scheduler.retire(*finished)
        return results

    # -- how much is drafted -----------------------------------------------------------------------------------

    def _plan(self, rows: Sequence[Row], limits: Sequence[Limits]) -> list[DraftSize]:
        """Return the draft size for every row: the limit, or less if the governor finds less worth it."""
        sizes = []
        for limit in limits:
            sizes.append(limit.budget)
        if sizes and self.governor is not None:
            sizes = self.governor.plan(rows, sizes, is_closed=self._scheduler.is_closed)
        self._was_asked = max(sizes, default=0) > 0
        return sizes

    def _select(self, rows: Sequence[Row], drafts: list[DraftTree], sizes: Sequence[DraftSize]) -> list[DraftTree]:
        """Return the parts of drafts that will be verified. The acceptance model learns from whole drafts."""
        name = self._drafts.facts.title(sizes[0])
        for row, draft in zip(rows, drafts, strict=True):
            self.acceptance.proposed(row, draft, name)
        if self.governor is None:
            return drafts
        selected = self.governor.select(rows, drafts)
        for row, draft, tree in zip(rows, drafts, selected, strict=True):
            if tree is not draft:
                row.stats.count_unverified(draft, tree)
        return selected

    def _limits(self, rows: Sequence[Row]) -> list[Limits]:
        """Return the largest draft allowed for every row.

        The accepted tokens and the bonus must fit into the remaining budget.

        Draft limits are set only in this function; governor and drafter may choose less. If bitwise equality is
        guaranteed (`Guarantee`), a draft has at most as many nodes as one forward pass can compute with the bits of
        single tokens. Drafts may branch only if rule and model support trees. A row in doubt gets no draft. A request
        may set a smaller limit.
        """
        max_nodes, of_guarantee = self._scheduler.max_nodes, min(self._guarantee.max_nodes, NO_LIMIT)
        takes_trees = self.config.rule.takes_trees and self.target.supports_trees
        nodes, of_nodes = (max_nodes, "memory") if max_nodes < of_guarantee else (of_guarantee, "bits")
        found = []
        for row in rows:
            depth, cause = row.max_length - len(row.token_ids) - 1, "budget"
            if nodes - 1 < depth:
                depth, cause = nodes - 1, of_nodes
            wanted = row.params.num_speculative_tokens
            if wanted is not None and wanted < depth:
                depth, cause = wanted, "request"
            if row.is_in_doubt:
                depth, cause = 0, "doubt"
            found.append(Limits(DraftSize(depth, nodes, not takes_trees), cause, of_nodes))
        return found

    def _attends(self, num_rows: int) -> bool:
        """Return whether the drafter serves batches of this many rows.

        If False, rows rest: the drafter gets no calls for them.
        """
        return self.governor is None or self.governor.attends(num_rows)

    def _govern(self, drafts: Sequence[DraftTree], results: Sequence[RowOutput], seconds: StepSeconds) -> None:
        """Report a step to the governor. Let rows rest if no draft is worth it.

        Rested rows return to a drafter that needs only their tokens.
        """
        start, governor = perf_counter(), self.governor
        if governor is None:
            return
        governor.observe(drafts, results, seconds)
        if not governor.attends(len(results)):
            self._scheduler.rest()
        elif self._drafts.facts.drafts_from_text:
            self._scheduler.resume()
        self.profile.govern_seconds += perf_counter() - start

    # -- verifying ---------------------------------------------------------------------------------------------

    def _verify(self, rows: Sequence[Row], drafts: Sequence[DraftTree], *, shows: bool) -> Output:
        """Run the target over the drafts of all rows.

        Returns logits of every node, and the drafter's features if ``shows``.
        """
        if self._has_doubtful:
            self._erase_doubtful(rows)
        with self._helpers.watched() if self._helpers is not None else nullcontext():
            return self.target.forward_with(
                self._wanted if shows else Wanted(), Nodes.from_trees(drafts), self.cache, listed=True
            )

    def _append(self, row: Row, tree: DraftTree, verdict: Verdict, logits: Logits, place: int) -> RowOutput:
        """Append the accepted tokens and the bonus to a row, count them, and finish the row if one of them ends it.

        A drafted token that makes the model return NaN harms the nodes beside it, because 0 * NaN is NaN in every
        masked sum. Values that a drafter has left in the cache can also cause NaN. A failure therefore only puts the
        row in doubt at first: its next step runs without a draft, over clean columns. If that step fails too, the row
        ends with an error.

        Args:
          logits: logits of the nodes of all rows.
          place: index of this row in ``logits``.
        """
        row.num_steps += 1
        has_failed = verdict.next_token < 0
        is_lost = has_failed and row.is_in_doubt  # the row failed a second time
        row.is_in_doubt = has_failed and not is_lost
        self._has_doubtful = self._has_doubtful or has_failed
        error = distribution.failure(logits[place][verdict.path[-1]], row.sampler) if is_lost else None
        decided = [] if has_failed else [verdict.next_token]
        if len(verdict.path) > 1:
            decided = [tree.tokens[node] for node in verdict.path[1:]] + decided
        tokens, finish, fault = _until_the_end(row.checker, decided)
        if fault is not None:
            if is_fatal(fault) or not self.config.contains_faults:
                raise fault
            error, row.is_in_doubt = as_exception(fault), False
        accepted = verdict.path[1 : len(tokens) + 1]
        if finish is not None:
            error = None
        sources: tuple[str, ...] = (tree.source,) * len(accepted)
        if tree.sources is not None:
            sources = tuple([tree.sources[node] for node in accepted])
        result = RowOutput(row, tuple(tokens), len(accepted), error=error, sources=sources, tree=tree)
        config = self.config
        if row.params.logprobs is not None or config.output_scores or config.output_logits:
            nodes = list(verdict.path[: len(tokens)])
            paths, chosen_from = [tree.path_tokens(node) for node in nodes], logits[place][nodes]
            result = replace(
                result,
                logprobs=logprobs_of(row, tokens, chosen_from, paths),
                scores=distribution.scores(chosen_from, [row.sampler] * len(nodes), paths)
                if config.output_scores
                else None,
                logits=chosen_from.float() if config.output_logits else None,
            )
        row.record(tree, accepted, len(tokens))
        row.extend(tokens)
        self.acceptance.came(row, tokens, was_asked=self._was_asked)
        if finish is not None:
            row.finish_reason, row.stop_reason = finish.reason, finish.cause
        elif error is not None:
            row.finish_reason, row.stop_reason = "error", error_text(error)
        return result

    def _tell_drafter(
        self,
        drafts: Sequence[DraftTree],
        paths: Sequence[tuple[int, ...]],
        results: Sequence[RowOutput],
        output: Output,
        choices: Choices | None,
    ) -> None:
        """Report the step to the drafter, for rows that go on: the accepted nodes, and the target's features."""
        rows, steps = [], []
        for i, result in enumerate(results):
            row = result.row
            if result.token_ids and row.finish_reason is None and not row.is_plain:
                rows.append(row)
                steps.append(StepResult(drafts[i], paths[i], result.token_ids, RowFeatures(output, i, choices)))
        if rows:
            self._drafts.observe(rows, steps)

    def _erase_doubtful(self, rows: Sequence[Row]) -> None:
        """Zero the cache behind the committed columns of rows in doubt, because these values may not be finite."""
        for slot, row in enumerate(rows):
            if row.is_in_doubt:
                self.cache.erase(slot, self.cache.lengths[slot])

    # -- memory ------------------------------------------------------------------------------------------------

    def memory(self, prefix_bytes: int = 0) -> MemoryUse:
        """Memory of keys and values, in use and planned."""
        return MemoryUse.of(self.plan, self.cache.lengths, self.caches.num_bytes, prefix_bytes)

    def release_memory(self) -> None:
        """Free all keys and values, and tables that have grown with them, if no row is running.

        The next step allocates the released memory again. If rows are running, only memory that no row needs is freed.
        """
        with self._use:
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
        """Free the cache memory that no row has needed since the last call."""
        self._steps_to_shrink = SHRINK_STEPS
        if self.caches.shrink():
            return_free_memory()


class ExclusiveUse:
    """Context manager that gives one call exclusive use of an engine.

    Tensors without a device are made on the CPU inside.

    Entering the context never waits, and Ctrl-C cannot leave it locked. The lock belongs to the frame of the ``with``
    statement. A frame that is no longer on any stack has lost the lock, wherever it was interrupted. The class is not a
    generator, because a generator that Ctrl-C leaves suspended runs its exit code when it is collected. That may be in
    the middle of a later step.

    Args:
      clean_up: function to call after a block that did not run to its end, at the latest when the next block begins.

    Raises: EngineBusyError when another call is inside.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self._lock = forking.lock()
        self._frame: FrameType | None = None
        self._clean_up = clean_up
        self._is_broken = False
        self._device: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        with self._lock:
            if self._frame is not None and is_running(self._frame):
                raise EngineBusyError("this engine is running in another thread; use one engine per thread or a lock")
            self._frame = sys._getframe(1)
        if self._is_broken:
            self._clean_up()
        self._is_broken = True  # until `__exit__` has run to its end
        self._device = cpu_by_default()
        self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._device.__exit__(None, None, None)
        try:
            if kind is not None:
                self._clean_up()
            self._is_broken = False
        finally:
            self._frame = None


def _until_the_end(
    checker: StopChecker, tokens: Sequence[int]
) -> tuple[list[int], Finish | None, BaseException | None]:
    """Return the tokens up to and including the token that ends the row, and the reason for the end.

    If the tokenizer cannot decode a token, return the tokens before it, and the error. Plain decoding returns the same
    tokens.
    """
    for length, token in enumerate(tokens, 1):
        try:
            finish = checker.check(token)
        except BaseException as fault:
            return list(tokens[: length - 1]), None, fault
        if finish is not None:
            return list(tokens[:length]), finish, None
    return list(tokens), None, None
