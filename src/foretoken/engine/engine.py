"""The loop: schedule, propose, verify, accept, commit, observe, emit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from foretoken.drafters.base import Drafter, Features, StepResult
from foretoken.engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineBusyError,
    ForetokenError,
    NumericsError,
    PromptError,
    TreeError,
)
from foretoken.engine.features import concatenate, gather, recording
from foretoken.engine.model import CausalLM, Nodes
from foretoken.engine.noise import KeyedNoise, fresh_seed, mix
from foretoken.engine.sampling import SamplingLaw, choose, log_probs
from foretoken.engine.sequence import Sequence
from foretoken.engine.stats import StepProfile
from foretoken.engine.stopping import StopChecker
from foretoken.engine.tree import DraftTree
from foretoken.engine.verify import Verdict, block, rejection, walk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foretoken.params import SamplingParams

DEFAULT_MAX_LENGTH = 1 << 20  # of models that state no context length


@dataclass(frozen=True)
class EngineConfig:
    """How rows are scheduled and verified.

    Args:
      max_num_seqs: rows that run at once.
      max_model_len: limit for prompt and output together; the model's context by default.
      prefill_chunk_size: prompt tokens of one row per prefill step.
      acceptance: "match", "standard" (rejection) or "block".
      exactness: "default", or "strict": every step runs at one padded shape, so that plain and speculative decoding
        round alike and agree bit for bit, in half precision too. Chains only.
      strict_width: number of nodes of that shape.
    """

    max_num_seqs: int = 16
    max_model_len: int | None = None
    prefill_chunk_size: int = 512
    acceptance: str = "match"
    exactness: str = "default"
    strict_width: int = 8

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "prefill_chunk_size", "strict_width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.acceptance not in ("match", "standard", "block"):
            raise ConfigError(f"acceptance is {self.acceptance!r}; choose match, standard or block")
        if self.exactness not in ("default", "strict"):
            raise ConfigError(f"exactness is {self.exactness!r}; choose default or strict")

    @property
    def is_strict(self) -> bool:
        return self.exactness == "strict"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one emitted token under its processed distribution: its own, and the k most likely."""

    token: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    @classmethod
    def of(cls, token: int, log_probs: torch.Tensor, k: int) -> TokenLogprobs:
        """Read off a row (V,) of log-probabilities; rank 1 is the most likely token."""
        logprob = log_probs[token]
        top = log_probs.topk(min(k, len(log_probs)))
        rank = int((log_probs > logprob).sum()) + 1
        return cls(token, float(logprob), rank, tuple(top.indices.tolist()), tuple(top.values.tolist()))


@dataclass(frozen=True)
class RowOutput:
    """What one step added to one row.

    ``num_accepted`` of the ``token_ids``, counted from the front, were drafted; the rest came from the target.
    """

    row: Sequence
    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: ForetokenError | None = None


@dataclass(eq=False)
class _Run:
    """An admitted row and what only the engine knows about it."""

    row: Sequence
    checker: StopChecker
    forks: list[_Run] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    num_prefilled: int = 0

    @property
    def num_to_prefill(self) -> int:
        """All tokens of the prompt but the pending one."""
        return self.row.num_prompt_tokens - 1


class Engine:
    """Runs many rows over one target and one drafter; rows join and leave between steps.

    A step is either one prefill chunk or one round of propose, verify, accept, commit, observe, emit, and makes
    exactly one target forward. Plain decoding is the round with the empty draft.

    Args:
      target: the model whose law is kept.
      drafter: proposes; `NoDrafter` for plain decoding.
      eos_token_ids: tokens that end a row.
      tokenizer: needed for stop strings only.

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
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config or EngineConfig()
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        context = target.context_length or DEFAULT_MAX_LENGTH
        self.max_model_len = min(self.config.max_model_len or context, context)
        self.cache = target.new_cache()
        self.profile = StepProfile()
        self._waiting: deque[_Run] = deque()
        self._runs: list[_Run] = []  # in cache order: those that decode, then those that prefill
        self._num_decoding = 0
        self._prefilled_last = False
        self._next_id = 0
        self._entered = threading.Lock()

    # -- requests ----------------------------------------------------------------------------------------------

    def add_request(
        self, prompt_ids: Seq[int], params: SamplingParams, request_id: str | None = None
    ) -> list[Sequence]:
        """Queue a prompt; returns its ``params.n`` rows, which share the prefill.

        Raises: PromptError for an empty prompt or ids outside the vocabulary; ContextLengthError when the prompt
        leaves no room for a token.
        """
        prompt = [int(token) for token in prompt_ids]
        self._check_prompt(prompt)
        seed = fresh_seed() if params.seed is None else params.seed
        request_id = request_id if request_id is not None else f"request-{self._next_id}"
        runs = [self._new_run(prompt, params, request_id, index, mix(seed, index)) for index in range(params.n)]
        runs[0].forks = runs[1:]
        self._waiting.append(runs[0])
        return [run.row for run in runs]

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise PromptError("the prompt holds no tokens; give at least one (the BOS token, for instance)")
        worst = max(prompt, key=lambda token: (not 0 <= token < self.target.vocab_size, abs(token)))
        if not 0 <= worst < self.target.vocab_size:
            raise PromptError(f"token id {worst} lies outside of the vocabulary, 0..{self.target.vocab_size - 1}")
        if len(prompt) >= self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and the context {self.max_model_len}: no room for a new token; "
                "shorten the prompt"
            )

    def _new_run(self, prompt: list[int], params: SamplingParams, request_id: str, index: int, seed: int) -> _Run:
        law = SamplingLaw(
            params,
            vocab_size=self.target.vocab_size,
            eos_token_ids=self.eos_token_ids,
            prompt_ids=prompt,
            device=self.target.device,
        )
        law.seed = seed
        budget = self.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        row = Sequence(
            id=self._next_id,
            request_id=request_id,
            index=index,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=params,
            seed=seed,
            law=law,
            max_length=min(budget, self.max_model_len),
        )
        self._next_id += 1
        return _Run(row, StopChecker(params, self.eos_token_ids, len(prompt), row.max_length, self.tokenizer))

    def abort(self, request_id: str) -> list[Sequence]:
        """End every row of a request, queued or running; returns those that were ended."""
        with self._exclusive():
            ended = []
            for run in [r for r in self._waiting if r.row.request_id == request_id]:
                self._waiting.remove(run)
                ended += [run, *run.forks]
            for run in [r for r in self._runs if r.row.request_id == request_id]:
                ended += [run, *run.forks]
                self._retire(run)
            for run in ended:
                run.row.finish_reason = "abort"
            return [run.row for run in ended]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._runs)

    @property
    def num_running(self) -> int:
        """Rows in the cache, decoding or still prefilling."""
        return len(self._runs)

    @property
    def decoding_rows(self) -> list[Sequence]:
        """Rows whose prompt is in the cache, in cache order."""
        return [run.row for run in self._runs[: self._num_decoding]]

    # -- steps -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[RowOutput]:
        """One target forward: a prefill chunk, or a round of drafting and verification.

        Returns: what was added to which row; empty for a prefill step.
        Raises: EngineBusyError when another thread is inside.
        """
        with self._exclusive():
            self._admit()
            prefilling = self._runs[self._num_decoding :]
            if prefilling and not (self._prefilled_last and self._num_decoding):
                self._prefilled_last = True
                self._prefill(prefilling)
                return []
            self._prefilled_last = False
            return self._decode(self._runs[: self._num_decoding]) if self._num_decoding else []

    def run(self) -> Iterator[list[RowOutput]]:
        """Step until every request has finished."""
        while self.has_unfinished:
            yield self.step()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._entered.acquire(blocking=False):
            raise EngineBusyError("this engine is running in another thread; use one engine per thread or a lock")
        try:
            yield
        finally:
            self._entered.release()

    # -- rows --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting requests a row while there is room. Single-token prompts need no prefill."""
        while self._waiting and len(self._runs) < self.config.max_num_seqs:
            self.cache.add_rows()
            self._runs.append(self._waiting.popleft())
            if self._runs[-1].num_to_prefill == 0:
                self._enter(len(self._runs) - 1)

    def _enter(self, index: int) -> None:
        """Move a prefilled row to those that decode, and fork it for the other samples of its request."""
        run = self._runs[index]
        self._swap(index, self._num_decoding)
        slot = self._num_decoding
        self._num_decoding += 1
        entered = [run]
        for fork in run.forks:
            if len(self._runs) == self.config.max_num_seqs:
                self._waiting.appendleft(fork)
                continue
            self._runs.append(fork)
            self._swap(self.cache.fork(slot), self._num_decoding)
            self._num_decoding += 1
            entered.append(fork)
        run.forks = []
        features = concatenate(run.features)
        run.features = []
        self.drafter.start([entry.row for entry in entered], [features] * len(entered))

    def _swap(self, index: int, other: int) -> None:
        self.cache.swap(index, other)
        self._runs[index], self._runs[other] = self._runs[other], self._runs[index]

    def _retire(self, run: _Run) -> None:
        """Take a row out of the batch."""
        index = self._runs.index(run)
        if index < self._num_decoding:
            self.drafter.forget([run.row])
            self._num_decoding -= 1
            self._swap(index, self._num_decoding)
            index = self._num_decoding
        self.cache.remove(index)
        last = self._runs.pop()
        if last is not run:
            self._runs[index] = last

    # -- prefill -----------------------------------------------------------------------------------------------

    def _prefill(self, runs: list[_Run]) -> None:
        """Feed one chunk of the prompt, all but its last token, of every row that still needs it."""
        start = perf_counter()
        runs = runs[:1] if self.config.is_strict else runs
        size = self.config.prefill_chunk_size
        first_row = self._num_decoding
        chunks = [run.row.token_ids[run.num_prefilled : run.row.num_prompt_tokens - 1][:size] for run in runs]
        nodes = Nodes.from_chains(chunks, size if self.config.is_strict else None)
        requires = self.drafter.requires
        with recording(self.target, requires) as record:
            keep = None if requires.last_hidden else slice(0, 0)
            logits = self.target.forward(
                nodes, self.cache, first_row=first_row, keep=keep, view_length=self._view_length
            )
        self.cache.commit([range(len(chunk)) for chunk in chunks], first_row)
        for i, (run, chunk) in enumerate(zip(runs, chunks, strict=True)):
            run.num_prefilled += len(chunk)
            if requires.last_hidden or requires.layer_inputs:
                run.features.append(gather(replace(requires, top_k=0), record, logits, i, range(len(chunk))))
        self.profile.num_prefill_tokens += sum(map(len, chunks))
        for run in runs:
            if run.num_prefilled == run.num_to_prefill:
                self._enter(self._runs.index(run))
        self.profile.prefill_seconds += perf_counter() - start

    @property
    def _view_length(self) -> int | None:
        """Strict mode lets attention always run over the same number of columns."""
        if not self.config.is_strict:
            return None
        spare = max(self.config.prefill_chunk_size, self.config.strict_width)
        return self.max_model_len + spare

    # -- decode ------------------------------------------------------------------------------------------------

    def _decode(self, runs: list[_Run]) -> list[RowOutput]:
        """One round over all rows that decode."""
        clock = _Clock(self.profile)
        rows = [run.row for run in runs]
        trees = self._propose(rows)
        clock.lap("propose_seconds")
        with recording(self.target, self.drafter.requires) as record:
            logits = self._verify(trees)
        clock.lap("verify_seconds")
        verdicts = self._accept(rows, trees, logits)
        clock.lap("accept_seconds")
        outputs = [
            self._emit(run, tree, verdict, logits[i])
            for i, (run, tree, verdict) in enumerate(zip(runs, trees, verdicts, strict=True))
        ]
        clock.lap("emit_seconds")
        paths = [verdict.path[: len(output.token_ids)] for verdict, output in zip(verdicts, outputs, strict=True)]
        self.cache.commit(paths)
        clock.lap("commit_seconds")
        self._observe(runs, trees, paths, outputs, logits, record)
        for run in runs:
            if run.row.is_finished:
                self._retire(run)
        clock.lap("observe_seconds")
        self.profile.num_steps += 1
        return outputs

    def _propose(self, rows: list[Sequence]) -> list[DraftTree]:
        """Drafts, cut to what a row may still emit: accepted tokens and the bonus together fit its budget."""
        limit = self.config.strict_width - 1 if self.config.is_strict else DEFAULT_MAX_LENGTH
        budgets = [min(row.num_remaining_tokens - 1, limit) for row in rows]
        chains_only = self.config.is_strict or not self.target.supports_trees
        trees = []
        for row, tree, budget in zip(rows, self.drafter.propose(rows, budgets), budgets, strict=True):
            if tree.tokens[0] != row.pending:
                raise TreeError(f"the draft starts with token {tree.tokens[0]}, but {row.pending} is pending")
            trees.append((tree.main_chain() if chains_only else tree).cut(budget))
        return trees

    def _verify(self, trees: list[DraftTree]) -> torch.Tensor:
        """Logits (B, N, V) of every node, in one forward of the target."""
        if not self.config.is_strict:
            return self.target.forward(Nodes.from_trees(trees), self.cache)
        padding = [DraftTree.root(0)] * (self.config.max_num_seqs - len(trees))
        nodes = Nodes.from_trees([*trees, *padding], self.config.strict_width)
        return self.target.forward(nodes, self.cache, view_length=self._view_length)

    def _accept(self, rows: list[Sequence], trees: list[DraftTree], logits: torch.Tensor) -> list[Verdict]:
        """Walk every tree by the acceptance rule; greedy rows by the argmax under every rule."""
        if self.config.acceptance == "match":
            return match_rows(rows, trees, logits)
        greedy = [i for i, row in enumerate(rows) if row.law.is_greedy]
        argmax_walks = match_rows([rows[i] for i in greedy], [trees[i] for i in greedy], logits[greedy])
        verdicts = dict(zip(greedy, argmax_walks, strict=True))
        for i, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            if i not in verdicts:
                verdicts[i] = self._accept_sampled(row, tree, logits[i])
        return [verdicts[i] for i in range(len(rows))]

    def _accept_sampled(self, row: Sequence, tree: DraftTree, logits: torch.Tensor) -> Verdict:
        noise = KeyedNoise(row.seed, row.num_steps, len(row.token_ids))

        def target_probs(node: int) -> torch.Tensor:
            return log_probs(logits[node : node + 1], [row.law], [tree.path_tokens(node)])[0].exp()

        rule = block if self.config.acceptance == "block" else rejection
        return rule(tree, target_probs, noise)

    def _emit(self, run: _Run, tree: DraftTree, verdict: Verdict, logits: torch.Tensor) -> RowOutput:
        """Append the accepted tokens and the bonus, cut where the row ends."""
        row = run.row
        row.num_steps += 1
        if verdict.next_token < 0:
            return self._fail(row)
        tokens = [*(tree.tokens[node] for node in verdict.path[1:]), verdict.next_token]
        finish = None
        for count, token in enumerate(tokens, 1):
            finish = run.checker.check(token)
            if finish is not None:
                tokens = tokens[:count]
                break
        logprobs = self._logprobs(row, tree, verdict.path, tokens, logits)
        row.extend(tokens)
        num_accepted = min(len(verdict.path) - 1, len(tokens))
        row.stats.record(tree.num_draft_tokens, num_accepted, len(tokens))
        if finish is not None:
            row.finish_reason, row.stop_reason = finish.reason, finish.cause
        return RowOutput(row, tuple(tokens), num_accepted, logprobs)

    @staticmethod
    def _fail(row: Sequence) -> RowOutput:
        error = NumericsError(
            f"the model gave NaN for request {row.request_id} after {row.num_output_tokens} tokens, or its sampling "
            "parameters left no token possible; the row ends here. Check the dtype (float16 overflows in many "
            "models), the logits processors and the weights"
        )
        row.finish_reason, row.stop_reason = "error", str(error)
        return RowOutput(row, (), 0, error=error)

    @staticmethod
    def _logprobs(
        row: Sequence, tree: DraftTree, path: Seq[int], tokens: list[int], logits: torch.Tensor
    ) -> tuple[TokenLogprobs, ...]:
        k = row.params.logprobs
        if k is None:
            return ()
        nodes = list(path[: len(tokens)])
        paths = [tree.path_tokens(node) for node in nodes]
        table = log_probs(logits[nodes], [row.law] * len(nodes), paths)
        return tuple(TokenLogprobs.of(token, table[i], k) for i, token in enumerate(tokens))

    def _observe(
        self,
        runs: list[_Run],
        trees: list[DraftTree],
        paths: list[tuple[int, ...]],
        outputs: list[RowOutput],
        logits: torch.Tensor,
        record: object,
    ) -> None:
        going_on = [i for i, run in enumerate(runs) if not run.row.is_finished]
        requires = self.drafter.requires
        results = [
            StepResult(trees[i], paths[i], outputs[i].token_ids, gather(requires, record, logits, i, paths[i]))
            for i in going_on
        ]
        self.drafter.observe([runs[i].row for i in going_on], results)


def match_rows(rows: Seq[Sequence], trees: Seq[DraftTree], logits: torch.Tensor) -> list[Verdict]:
    """Walk every tree with the target's own tokens: one choice per visited node, all rows at once.

    A verdict whose ``next_token`` is -1 marks a row without a usable distribution.
    """
    walks = [walk(tree) for tree in trees]
    nodes = [next(steps) for steps in walks]
    verdicts: list[Verdict | None] = [None] * len(rows)
    argmax = _argmax_table(logits) if any(row.law.is_argmax for row in rows) else []
    going_on = list(range(len(rows)))
    while going_on:
        tokens = {i: argmax[i][nodes[i]] for i in going_on if rows[i].law.is_argmax}
        drawn = [i for i in going_on if i not in tokens]
        if drawn:
            tokens.update(zip(drawn, _choose(rows, trees, logits, nodes, drawn), strict=True))
        for i in going_on:
            try:
                nodes[i] = walks[i].send(tokens[i])
            except StopIteration as end:
                verdicts[i] = end.value
        going_on = [i for i in going_on if verdicts[i] is None]
    return [verdict for verdict in verdicts if verdict is not None]


def _argmax_table(logits: torch.Tensor) -> list[list[int]]:
    """The likeliest token of every node, -1 where the logits hold NaN."""
    best = logits.float().max(dim=-1)  # as `generate` does, so that ties in float64 fall alike
    table: list[list[int]] = best.indices.masked_fill(best.values.isnan(), -1).tolist()
    return table


def _choose(
    rows: Seq[Sequence], trees: Seq[DraftTree], logits: torch.Tensor, nodes: Seq[int], drawn: Seq[int]
) -> list[int]:
    picked = logits[list(drawn), [nodes[i] for i in drawn]]
    paths = [trees[i].path_tokens(nodes[i]) for i in drawn]
    positions = [len(rows[i].token_ids) + len(path) for i, path in zip(drawn, paths, strict=True)]
    chosen: list[int] = choose(picked, [rows[i].law for i in drawn], paths, positions).tolist()
    return chosen


class _Clock:
    """Adds the time since the last lap to a field of the profile."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        now = perf_counter()
        setattr(self._profile, name, getattr(self._profile, name) + now - self._last)
        self._last = now
