"""The checks that a drafter has to pass, and the small models to run them on.

`check_drafter` is to drafters what scikit-learn's ``check_estimator`` is to estimators: a new method that
passes it may be used under every sampling setting, batch and length.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from foretoken.config.engine import EngineConfig
from foretoken.config.sampling import SamplingParams
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import Budget, Drafter, Features, StepResult
from foretoken.engine.engine import Engine
from foretoken.engine.sequence import Sequence
from foretoken.law.noise import mix, row_key, token_bits, unit
from foretoken.law.sampling import SamplingLaw, log_probs
from foretoken.model.cache.ragged import KVCache
from foretoken.model.lm import CausalLM, Nodes
from foretoken.testing.inflation import inflate as inflate
from foretoken.tree import DraftTree

MakeDrafter = Callable[[int], Drafter]
"""Builds a fresh drafter that proposes at most this many tokens deep."""

# -- models ----------------------------------------------------------------------------------------------------


def toy_model(vocab_size: int = 64, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A two-layer Llama with strong random weights, built in milliseconds.

    Randomness: ``seed``.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return strengthen(LlamaForCausalLM(config), seed).to(dtype).eval()


def strengthen(model: PreTrainedModel, seed: int = 0, scale: float = 0.25) -> PreTrainedModel:
    """Redraw the weights of a random model, in place, so that every mask and position shows in its logits.

    Matrices get the standard deviation ``scale``, norms and biases are spread around the value they start at.

    Returns: the model.
    Randomness: ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            noise *= scale if parameter.ndim > 1 else scale / 2
            start = parameter.flatten()[0]
            is_constant = bool((parameter == start).all()) and start.item() in (0.0, 1.0)
            parameter.copy_(noise.to(parameter) + (start if is_constant else 0.0))
    return model


def perturbed(model: PreTrainedModel, scale: float, seed: int = 0) -> PreTrainedModel:
    """A copy whose weights carry noise: a drafter that is sometimes right and sometimes wrong.

    Args:
      scale: standard deviation of the noise, relative to that of each parameter. 0 gives an equal copy.

    Randomness: ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            parameter.add_((scale * noise).to(parameter) * spread)
    return copied


def reference_node_logits(model: PreTrainedModel, prefix: list[int], tree: DraftTree) -> torch.Tensor:
    """Logits (N, V) after every node of a tree, by one plain forward per root-to-leaf path.

    No cache, no mask and no position is given to the model: the oracle for every other way of computing them.

    Args:
      prefix: tokens before the pending one, which is the root of ``tree``.
    """
    rows: list[torch.Tensor | None] = [None] * len(tree)
    for leaf in tree.leaves:
        nodes = tree.path(leaf)
        ids = torch.tensor([[*prefix, *(tree.tokens[node] for node in nodes)]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        for depth, node in enumerate(nodes):
            rows[node] = logits[len(prefix) + depth]
    return torch.stack([row for row in rows if row is not None])


# -- drafters that test the engine ---------------------------------------------------------------------------------


class PerfectDrafter(Drafter):
    """Knows what plain decoding says, so that every draft is accepted to its end.

    Args:
      texts: prompt and output of plain decoding, one per row that will be started, found by their beginning.
      num_speculative_tokens: depth of the draft.
      num_branches: with 2 or more, wrong siblings surround every right node, and come first.
    """

    name = "perfect"

    def __init__(
        self, texts: Iterable[Seq[int]], num_speculative_tokens: int, *, vocab_size: int, num_branches: int = 1
    ) -> None:
        self._texts = [tuple(text) for text in texts]
        self._num_tokens = num_speculative_tokens
        self._num_branches = num_branches
        self._vocab_size = vocab_size

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        return [self._tree(row, min(budget, self._num_tokens)) for row, budget in zip(rows, budgets, strict=True)]

    def _tree(self, row: Sequence, depth: int) -> DraftTree:
        future = self._future(row)[:depth]
        wrong = ([token + shift for token in future] for shift in range(1, self._num_branches))
        decoys = [(*future[:i], tokens[i] % self._vocab_size) for tokens in wrong for i in range(len(future))]
        return DraftTree.from_paths(row.pending, [*decoys, future], source=self.name)

    def _future(self, row: Sequence) -> tuple[int, ...]:
        known = tuple(row.token_ids)
        matches = (text for text in self._texts if text[: len(known)] == known)
        return next(matches, known)[len(known) :]


class WrongDrafter(PerfectDrafter):
    """Knows what plain decoding says, and proposes something else at every node."""

    name = "wrong"

    def _future(self, row: Sequence) -> tuple[int, ...]:
        return tuple((token + 1) % self._vocab_size for token in super()._future(row))


# -- conformance ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """The result of a run: tokens and finish reason per request, and the number of steps."""

    outputs: dict[str, tuple[int, ...]]
    reasons: dict[str, str | None]
    num_steps: int


class _Watched(Drafter):
    """Passes everything on, and checks the contract between engine and drafter on the way."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.requires = drafter.requires
        self._started: set[int] = set()
        self._proposed: dict[int, DraftTree] = {}

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        self.drafter.bind(target, cache)

    def start(self, rows: Seq[Sequence], features: Seq[Features]) -> None:
        require(len(rows) == len(features), f"start got {len(rows)} rows and {len(features)} features")
        self._started |= {row.id for row in rows}
        self.drafter.start(rows, features)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        before = [list(row.token_ids) for row in rows]
        trees = self.drafter.propose(rows, budgets)
        require(len(trees) == len(rows), f"{self.name}: {len(trees)} drafts for {len(rows)} rows")
        for row, tokens, budget, tree in zip(rows, before, budgets, trees, strict=True):
            require(row.id in self._started, f"propose before start for row {row.id}")
            require(row.token_ids == tokens, f"{self.name} changed the tokens of row {row.id}")
            require(
                tree.tokens[0] == tokens[-1],
                f"{self.name}: the draft's root is {tree.tokens[0]}, pending is {tokens[-1]}",
            )
            require(
                tree.depth <= max(budget, 0), f"{self.name} drafted {tree.depth} tokens deep, the budget is {budget}"
            )
            self._proposed[row.id] = tree
        return trees

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            ends_well = tuple(row.token_ids[-len(result.emitted) :]) == result.emitted
            require(ends_well, f"observe: row {row.id} does not end with what was emitted, {result.emitted}")
            path = [result.tree.tokens[node] for node in result.path[1:]]
            require(path == list(result.emitted[: len(path)]), "observe: the accepted path is not what was emitted")
        self.drafter.observe(rows, results)

    def retain(self, rows: Seq[Sequence], limit: int) -> None:
        require({row.id for row in rows} <= self._started, "retain for rows which never started")
        self.drafter.retain(rows, limit)

    def forget(self, rows: Seq[Sequence]) -> None:
        ids = {row.id for row in rows}
        require(ids <= self._started, f"forget for rows {sorted(ids - self._started)}, which never started")
        self._started -= ids
        self.drafter.forget(rows)

    def check_empty(self) -> None:
        require(not self._started, f"rows {sorted(self._started)} finished, but were never forgotten")


def require(holds: bool, message: str) -> None:
    """Raises: AssertionError with the message, also under ``python -O``."""
    if not holds:
        raise AssertionError(message)


def decode(
    target: CausalLM,
    drafter: Drafter,
    requests: Seq[tuple[Seq[int], SamplingParams]],
    *,
    eos_token_ids: Seq[int] = (),
    config: EngineConfig | None = None,
    abort: str | None = None,
) -> Trace:
    """Run requests to their end, checking the invariants of engine, cache and drafter after every step.

    Args:
      requests: prompt and parameters each; request i is called ``str(i)``, its sample j ``"i.j"`` in the trace.
      abort: a request to be aborted as soon as it has any output.
    Raises: AssertionError when a step makes more than one target forward, or leaves a cache that does not hold
      exactly the tokens before the pending one.
    """
    watched = _Watched(drafter)
    engine = Engine(target, watched, config, eos_token_ids=eos_token_ids)
    rows = []
    for i, (prompt, params) in enumerate(requests):
        rows += engine.add_request(prompt, params, str(i))
    num_steps = 0
    while engine.has_unfinished:
        before = target.num_forwards
        engine.step()
        num_steps += 1
        require(target.num_forwards - before == 1, f"step {num_steps} made {target.num_forwards - before} forwards")
        check_cache_lengths(engine)
        if any(row.request_id == abort and row.num_output_tokens and not row.is_finished for row in rows):
            engine.abort(str(abort))
            check_cache_lengths(engine)
    watched.check_empty()
    names = {row.id: f"{row.request_id}.{row.index}" for row in rows}
    return Trace(
        {names[row.id]: tuple(row.output_ids) for row in rows},
        {names[row.id]: row.finish_reason for row in rows},
        num_steps,
    )


def check_cache_lengths(engine: Engine) -> None:
    """Raises: AssertionError unless the cache of every decoding row ends right before its pending token."""
    lengths = {row.id: len(row.token_ids) - 1 for row in engine.decoding_rows}
    cached = {row.id: engine.cache.lengths[slot] for slot, row in enumerate(engine.decoding_rows)}
    require(cached == lengths, f"the cache holds {cached} tokens per row; want {lengths}")
    require(
        engine.cache.num_rows == engine.num_running,
        f"the cache has {engine.cache.num_rows} rows, {engine.num_running} are running",
    )


PROMPTS = ((3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5), (7,), (2, 7, 1, 8, 2, 8), (1, 6, 1), (5, 5, 5, 5, 5, 5, 5, 5, 5))
GREEDY = SamplingParams(max_tokens=14, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=14, temperature=0.9, top_p=0.95, seed=1234)
PENALISED = replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.4, min_tokens=4)


def check_drafter(make_drafter: MakeDrafter, target: CausalLM, *, depths: Iterable[int] = (1, 2, 3, 4, 5, 6)) -> None:
    """Every property that a drafter and the engine around it must have, on one target.

    Token equality with the plain loop, greedy and sampled, for every depth, alone and in a ragged batch whose rows
    come and go; EOS and budget at every offset inside a draft; empty drafts; a request aborted in the middle;
    samples of one prompt; several drafters' worth of reuse. After every step the cache must end right before the
    pending token, and the step must have made one target forward.

    Args:
      make_drafter: depth -> a fresh drafter.
      target: the model to draft for; any size, its vocabulary holds at least ten tokens.
    Raises: AssertionError; the message names the drafter, the setting and both texts.
    """
    depths = tuple(depths)
    for params in (GREEDY, SAMPLED):
        plain = _decode_all(target, EmptyDrafter(), params)
        for depth in depths:
            check_identity(make_drafter(depth), target, params, plain, f"K={depth}")
        deepest = max(depths)
        check_single_rows(make_drafter, deepest, target, params, plain)
        check_endings(make_drafter, deepest, target, params, plain)
        check_rows_come_and_go(make_drafter(deepest), target, params, plain)
        check_abort(make_drafter(deepest), target, params, plain)
        check_samples(make_drafter(deepest), target, params)
        drafter = make_drafter(deepest)
        for run in ("first", "second"):
            check_identity(drafter, target, params, plain, f"K={deepest}, {run} run of one drafter")
    penalised = _decode_all(target, EmptyDrafter(), PENALISED)
    check_identity(make_drafter(max(depths)), target, PENALISED, penalised, "with penalties")


def _decode_all(target: CausalLM, drafter: Drafter, params: SamplingParams, **options: Any) -> Trace:
    return decode(target, drafter, [(prompt, params) for prompt in PROMPTS], **options)


def check_identity(drafter: Drafter, target: CausalLM, params: SamplingParams, plain: Trace, setting: str) -> None:
    """Raises: AssertionError unless all prompts in one batch give the tokens of the plain loop."""
    compare(_decode_all(target, drafter, params), plain, f"{drafter.name}, {setting}, {_words(params)}")


def check_single_rows(
    make_drafter: MakeDrafter, depth: int, target: CausalLM, params: SamplingParams, plain: Trace
) -> None:
    """Raises: AssertionError unless a row alone gives the tokens that it gives in a batch."""
    for i in (0, 1):
        trace = decode(target, make_drafter(depth), [(PROMPTS[i], params)])
        want = plain.outputs[f"{i}.0"]
        require(trace.outputs["0.0"] == want, _differ(f"prompt {i} alone", trace.outputs["0.0"], want))


def check_endings(
    make_drafter: MakeDrafter, depth: int, target: CausalLM, params: SamplingParams, plain: Trace
) -> None:
    """Raises: AssertionError unless budget, stop token and EOS end a row exactly, at every offset inside a draft.

    Requests with all the budgets, and with all the stop tokens, run in one batch each.
    """
    text = plain.outputs["0.0"]
    name = f"{make_drafter(depth).name}, K={depth}, {_words(params)}"
    budgets = [replace(params, max_tokens=length) for length in range(1, len(text) + 1)]
    stops = [replace(params, stop_token_ids=(token,)) for token in text]
    for kind, several in (("budget", budgets), ("stop token", stops)):
        trace = decode(target, make_drafter(depth), [(PROMPTS[0], one) for one in several])
        for i, one in enumerate(several):
            want = text[: one.max_tokens] if kind == "budget" else cut_after(text, text[i])
            reason = "length" if kind == "budget" else "stop"
            got = trace.outputs[f"{i}.0"]
            require(got == want, _differ(f"{name}, {kind} {i}", got, want))
            require(trace.reasons[f"{i}.0"] == reason, f"{name}, {kind} {i}: ended by {trace.reasons[f'{i}.0']}")
    eos = text[min(depth + 1, len(text) - 1)]
    trace = _decode_all(target, make_drafter(depth), params, eos_token_ids=(eos,))
    for key, whole in plain.outputs.items():
        want, reason = cut_after(whole, eos), "stop" if eos in whole else "length"
        require(trace.outputs[key] == want, _differ(f"{name}, EOS {eos}", trace.outputs[key], want))
        require(trace.reasons[key] == reason, f"{name}, EOS {eos}: ended by {trace.reasons[key]}, not {reason}")


def check_rows_come_and_go(drafter: Drafter, target: CausalLM, params: SamplingParams, plain: Trace) -> None:
    """Raises: AssertionError unless rows that share two places, and small prefill chunks, change nothing."""
    config = EngineConfig(max_num_seqs=2, prefill_chunk_size=3)
    compare(_decode_all(target, drafter, params, config=config), plain, f"{drafter.name}, two rows at a time")


def check_abort(drafter: Drafter, target: CausalLM, params: SamplingParams, plain: Trace) -> None:
    """Raises: AssertionError unless an aborted row ends where it is and the others go on unharmed."""
    trace = _decode_all(target, drafter, params, abort="2")
    for key, want in plain.outputs.items():
        got = trace.outputs[key]
        want = want[: len(got)] if key == "2.0" else want
        require(got == want, _differ(f"{drafter.name}, request 2 aborted", got, want))
    require(trace.reasons["2.0"] == "abort", f"the aborted row ended by {trace.reasons['2.0']}")


def check_samples(drafter: Drafter, target: CausalLM, params: SamplingParams) -> None:
    """Raises: AssertionError unless three samples of one prompt equal the plain ones."""
    requests = [(PROMPTS[0], replace(params, n=3)), (PROMPTS[3], params)]
    compare(decode(target, drafter, requests), decode(target, EmptyDrafter(), requests), f"{drafter.name}, n=3")


def compare(trace: Trace, plain: Trace, setting: str) -> None:
    """Raises: AssertionError at the first row whose tokens or finish reason differ."""
    for key, want in plain.outputs.items():
        require(trace.outputs[key] == want, _differ(f"{setting}, row {key}", trace.outputs[key], want))
        reasons = trace.reasons[key], plain.reasons[key]
        require(reasons[0] == reasons[1], f"{setting}, row {key}: ended by {reasons[0]}, plain by {reasons[1]}")


def cut_after(tokens: tuple[int, ...], last: int) -> tuple[int, ...]:
    """The tokens up to the first ``last``, included."""
    return tokens[: tokens.index(last) + 1] if last in tokens else tokens


def _words(params: SamplingParams) -> str:
    return "greedy" if params.temperature == 0 else f"temperature {params.temperature}, seed {params.seed}"


def _differ(setting: str, got: Seq[int], want: Seq[int]) -> str:
    place = next((i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), None)
    where = f"lengths {len(got)} and {len(want)}" if place is None else f"first at output token {place}"
    return f"{setting}: differs from plain decoding, {where}: {list(got)} instead of {list(want)}"


# -- where two texts part ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Divergence:
    """The first place where a row differs from plain decoding, and how close the two tokens were.

    Args:
      row: name of the row in its trace.
      index: which output token.
      got, want: the token here, and that of plain decoding.
      gap: how far apart the law puts the two after the common text: the difference of their processed logits, with
        noise where tokens are sampled; for a token outside the nucleus, its distance to the edge in probability.
        Rounding explains a small gap, only a fault explains a large one.
    """

    row: str
    index: int
    got: int
    want: int
    gap: float


def divergences(
    target: CausalLM, requests: Seq[tuple[Seq[int], SamplingParams]], trace: Trace, plain: Trace
) -> list[Divergence]:
    """Locate every difference between two traces of the same requests, one per row.

    Args:
      target: the model whose law measures the gaps, by one forward over the common text.
    """
    found = []
    for row, want in plain.outputs.items():
        got = trace.outputs[row]
        index = next((i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), None)
        if index is not None:
            request, sample = map(int, row.split("."))
            prompt, params = requests[request]
            gap = token_gap(target, prompt, want[:index], params, sample, (got[index], want[index]))
            found.append(Divergence(row, index, got[index], want[index], gap))
    return found


def token_gap(
    target: CausalLM,
    prompt: Seq[int],
    output: Seq[int],
    params: SamplingParams,
    sample: int,
    tokens: tuple[int, int],
) -> float:
    """How close two tokens are after a text; see `Divergence.gap`. ``params`` need a seed when they sample."""
    text = [*prompt, *output]
    logits = target.forward(Nodes.from_chains([text]), target.new_cache(1), keep=slice(len(text) - 1, len(text)))[0]
    whole = replace(params, top_p=1.0, top_k=0, min_p=0.0, typical_p=1.0)
    scores = _law_after(whole, target, prompt, output, logits)[0]
    edge = _law_after(params, target, prompt, output, logits)[0]
    outside = [token for token in tokens if not edge[token] > -torch.inf]
    if outside and params.top_p < 1.0:
        law = scores.double().exp()
        tail = float(law[law <= law[outside[0]]].sum())
        return abs(tail - (1.0 - params.top_p))
    return abs(float(scores[tokens[0]] - scores[tokens[1]]) + _noise_gap(params, sample, len(text), tokens))


def _law_after(
    params: SamplingParams, target: CausalLM, prompt: Seq[int], output: Seq[int], logits: torch.Tensor
) -> torch.Tensor:
    law = SamplingLaw(params, vocab_size=target.vocab_size, prompt_ids=list(prompt))
    law.extend(output)
    return log_probs(logits, [law], [()])


def _noise_gap(params: SamplingParams, sample: int, position: int, tokens: tuple[int, int]) -> float:
    if params.temperature == 0 or params.seed is None:
        return 0.0
    key = row_key(mix(params.seed, sample), position)
    first, second = (-math.log(-math.log(unit(token_bits(key, token)))) for token in tokens)
    return first - second
