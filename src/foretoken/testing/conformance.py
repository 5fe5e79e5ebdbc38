"""The properties that a drafter and the engine around it must have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from foretoken.beginnings import shared_length
from foretoken.config.engine import EngineConfig
from foretoken.config.sampling import SamplingParams
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import Drafter
from foretoken.model.lm import CausalLM
from foretoken.testing.decoding import Trace, decode, require

MakeDrafter = Callable[[int], Drafter]
"""Builds a fresh drafter that proposes at most this many tokens deep."""

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
    place = shared_length(list(got), list(want))
    is_cut = place == min(len(got), len(want))
    where = f"lengths {len(got)} and {len(want)}" if is_cut else f"first at output token {place}"
    return f"{setting}: differs from plain decoding, {where}: {list(got)} instead of {list(want)}"
