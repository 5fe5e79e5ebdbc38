"""What an answer tells of itself: usage, counts of speculation, and whether it equals plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foretoken.beginnings import shared_length
from foretoken.sessions.outputs import speculative_metrics

if TYPE_CHECKING:
    from foretoken.serve.bridge import Ticket
    from foretoken.sessions.outputs import RequestOutput

DETAILED = ("by_drafter", "num_proposed_tokens", "num_cut_tokens", "num_undrafted_steps")


def usage_of(ticket: Ticket) -> dict[str, Any]:
    """Tokens of a request, up to now. A prompt counts once, however many texts it has.

    Tokens that the request had predicted count as completion where they were accepted, as they would have anyway.
    """
    assert ticket.stream is not None
    prompt, completion = ticket.num_prompt_tokens, ticket.stream.num_tokens
    stats = ticket.stream.stats
    predicted = {
        "accepted_prediction_tokens": stats.accepted_prediction_tokens,
        "rejected_prediction_tokens": stats.rejected_prediction_tokens,
    }
    has_prediction = ticket.params[0].prediction is not None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": ticket.stream.num_cached_tokens},
        **({"completion_tokens_details": predicted} if has_prediction else {}),
    }


def counts_of(ticket: Ticket, detail: str) -> dict[str, Any]:
    """``metrics.speculative_decoding`` in vLLM's shape, all texts of the request together; nothing unless asked for.

    Beside vLLM's fields: ``tokens_per_step``, ``lossless``, ``exactness``, the method, and what the governor says.
    """
    if detail == "none":
        return {}
    assert ticket.stream is not None
    llm, outputs = ticket.llm, ticket.outputs()
    config = llm.speculative_config
    rule = config.rule
    counts = speculative_metrics(ticket.stream.stats, config.num_speculative_tokens, rule.is_lossless)
    histogram = counts["acceptance_histogram"]
    longest = max([config.num_speculative_tokens, *map(int, histogram)])
    counts["acceptance_histogram"] = [histogram.get(str(length), 0) for length in range(longest + 1)]
    governors = [output.metrics.governor for output in outputs if output.metrics.governor is not None]
    counts |= {
        "method": config.title,
        "exactness": llm.promise.as_dict() if rule.keeps_tokens else None,
        "governor": governors[-1] if governors else None,
    }
    if detail == "summary":
        counts = {name: value for name, value in counts.items() if name not in DETAILED}
    else:
        trace = [step for output in outputs for step in output.metrics.trace]
        counts["per_step_drafted"] = [step.drafted for step in trace]
        counts["per_step_accepted"] = [step.accepted for step in trace]
    return {"metrics": {"speculative_decoding": counts}}


def verdict_of(outputs: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> dict[str, Any]:
    """``verify``: whether the texts equal those of plain decoding, token by token, and where they do not at first."""
    differences = []
    pairs = [
        pair
        for ours, theirs in zip(outputs, plain, strict=True)
        for pair in zip(ours.outputs, theirs.outputs, strict=True)
    ]
    for place, (text, reference) in enumerate(pairs):
        if text.token_ids != reference.token_ids:
            differences.append({"index": place, "token": shared_length(text.token_ids, reference.token_ids)})
    return {
        "verify": {
            "identical": not differences,
            "logprobs_identical": all(text.logprobs == reference.logprobs for text, reference in pairs),
            "num_tokens": sum(len(text.token_ids) for text, _ in pairs),
            "differences": differences,
        }
    }
