"""Output of ``foredraft generate``: text as it comes, or JSON; other verbs write theirs in the same form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from foredraft.cli.prompts import Asked
from foredraft.cli.running import put_json
from foredraft.config.sampling import SamplingParams
from foredraft.engine.frontend import RequestOutput, Segments, StreamOutput
from foredraft.engine.stats import RowStats, describe_cuts

if TYPE_CHECKING:
    from foredraft.engine.frontend import Stream

DRAFTED_STYLE = "green"


class JsonWriter:
    """One object per prompt, in the order of the prompts, as soon as it and those before it have finished."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = asked
        self._num_written = 0
        self._num_running: dict[int, int] = {}

    def write(self, delta: StreamOutput, stream: Stream) -> None:
        if delta.finish_reason is None:
            return
        ended = self._num_running.get(delta.prompt_index, 0) + 1
        self._num_running[delta.prompt_index] = ended
        while self._num_written < stream.num_prompts:
            output = stream.output(self._num_written)
            if self._num_running.get(self._num_written, 0) < len(output.outputs):
                return
            self._put(output)

    def interrupt(self, stream: Stream) -> None:
        """Write what there is of the others."""
        for output in stream.outputs()[self._num_written :]:
            self._put(output)

    def finish(self, stream: Stream) -> None:
        """Called when everything has been written."""

    def _put(self, output: RequestOutput) -> None:
        one = self._asked[self._num_written]
        put_json(as_record(output, one.given if one.is_templated else None))
        self._num_written += 1


class TextWriter:
    """The text of every sample, in order; the first unfinished one is written as it grows."""

    def __init__(self, params: SamplingParams) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._errors = Console(stderr=True, highlight=False)
        self._errors.soft_wrap = not self._errors.is_terminal
        self._num_samples, self._budget = params.n, params.max_tokens
        self._is_sampled = not params.is_greedy
        self._waiting: dict[int, list[StreamOutput]] = {}
        self._current = 0

    def write(self, delta: StreamOutput, stream: Stream) -> None:
        self._waiting.setdefault(delta.prompt_index * self._num_samples + delta.index, []).append(delta)
        while self._current in self._waiting:
            ended = False
            for held in self._waiting.pop(self._current):
                self._put(held)
                ended = held.finish_reason is not None
            if not ended:
                return
            self._console.file.write("\n")
            self._current += 1

    def _put(self, delta: StreamOutput) -> None:
        write_segments(self._console, delta.segments)
        if delta.finish_reason == "error":
            self._errors.print(Text(f"prompt {delta.prompt_index}: {delta.stop_reason}", "red"))

    def interrupt(self, stream: Stream) -> None:
        """End the line; texts that wait for an earlier one are written after it."""
        for place in sorted(self._waiting.keys() | {self._current}):
            for held in self._waiting.get(place, ()):
                self._put(held)
            self._console.file.write("\n")
        self.finish(stream)

    def finish(self, stream: Stream) -> None:
        """Statistics, on standard error."""
        outputs = stream.outputs()
        for place, output in enumerate(outputs):
            said = ending(output, self._budget)
            if said:
                self._errors.print(Text(f"prompt {place}: {said}" if len(outputs) > 1 else said, "yellow"))
        self._errors.print(Text(summary(outputs, is_sampled=self._is_sampled), "dim"))
        if self._console.is_terminal and any(o.metrics.speculative_decoding["num_spec_steps"] for o in outputs):
            legend = Text("tokens proposed by the drafter are ", "dim")
            self._errors.print(legend.append("coloured", DRAFTED_STYLE).append(", the target's own are not", "dim"))


def ending(output: RequestOutput, budget: int | None) -> str:
    """A note on how a text ended; empty when the model ended it."""
    if any(not sample.text.strip() and sample.finish_reason == "stop" for sample in output.outputs):
        return "the model ended the text before its first word"
    longest = max(len(sample.token_ids) for sample in output.outputs)
    if any(sample.finish_reason == "length" for sample in output.outputs):
        remedy = "--max-new-tokens allows more" if longest == budget else "the context of the model is full"
        return f"cut off after {longest} tokens; {remedy}"
    return ""


def write_segments(console: Console, segments: Segments) -> None:
    """Text in pieces, on a terminal coloured by who proposed them."""
    for text, source in segments:
        if console.is_terminal:
            console.print(Text(text, "" if source == "target" else DRAFTED_STYLE), end="", soft_wrap=True)
        else:
            console.file.write(text)
    console.file.flush()


def summary(outputs: Sequence[RequestOutput], *, is_sampled: bool = True) -> str:
    """One line over all prompts; with the seed where it had a say."""
    counts = pooled(outputs)
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    seconds = max(output.metrics.prefill_seconds + output.metrics.decode_seconds for output in outputs)
    seeds = sorted({sample.seed for output in outputs for sample in output.outputs})
    parts = [
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / max(seconds, 1e-9):.1f} tokens/s)",
        f"{ratio(num_tokens, counts.num_steps):.2f} tokens per step",
        *drafted(counts),
    ]
    if is_sampled and len(seeds) == 1:
        parts.append(f"seed {seeds[0]}")
    parts += estimate(outputs[-1])
    return ", ".join(parts)


def pooled(outputs: Sequence[RequestOutput]) -> RowStats:
    """Counters of the drafts of all prompts."""
    return RowStats.pooled(
        RowStats(
            num_steps=counts["num_steps"],
            num_spec_steps=counts["num_spec_steps"],
            num_draft_tokens=counts["num_draft_tokens"],
            num_accepted_draft_tokens=counts["num_accepted_draft_tokens"],
            num_cut_tokens=Counter(counts["num_cut_tokens"]),
            num_undrafted_steps=Counter(counts["num_undrafted_steps"]),
        )
        for counts in (output.metrics.speculative_decoding for output in outputs)
    )


def fates(counts: RowStats) -> dict[str, Any]:
    """Counters of drafted tokens, under the names of ``metrics.speculative_decoding``."""
    return {
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "num_accepted_draft_tokens": counts.num_accepted_draft_tokens,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_proposed_tokens": counts.num_proposed_tokens,
        "num_cut_tokens": dict(counts.num_cut_tokens),
        "num_undrafted_steps": dict(counts.num_undrafted_steps),
    }


def ratio(part: float, whole: float) -> float:
    """0 where there is nothing to divide by."""
    return part / whole if whole else 0.0


def drafted(counts: RowStats) -> list[str]:
    """Sentences on drafted, accepted and cut tokens; none for plain decoding."""
    if not counts.num_proposed_tokens and not counts.num_undrafted_steps:
        return []
    said = f"{counts.num_accepted_draft_tokens} of {counts.num_draft_tokens} verified draft tokens accepted"
    if not counts.num_proposed_tokens:
        said = "nothing was drafted"
    held = describe_cuts(counts.num_cut_tokens, counts.num_undrafted_steps)
    return [said, held] if held else [said]


def estimate(output: RequestOutput) -> list[str]:
    """Sentences on the estimated speed of drafting, and on the reason where it was not done."""
    governor = output.metrics.governor or {}
    speed, decision = governor.get("estimated_speedup"), governor.get("decision")
    said = [] if speed is None else [f"about {speed:.2f} times the speed of plain decoding"]
    return said if decision is None or decision.startswith("drafting") else [*said, decision]


def as_record(output: RequestOutput, message: str | None = None) -> dict[str, Any]:
    """The JSON object of one prompt. With several samples, the top level holds the first and ``samples`` all.

    Args:
      message: what the chat template was put around, if it was.
    """
    first = output.outputs[0]
    metrics = output.metrics
    record: dict[str, Any] = {
        "prompt": message if message is not None else output.prompt or list(output.prompt_token_ids),
        "chat_template": message is not None,
        "text": first.text,
        "token_ids": list(first.token_ids),
        "finish_reason": first.finish_reason,
        "stop_reason": first.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": sum(len(sample.token_ids) for sample in output.outputs),
        "seed": first.seed,
        "lossless": output.lossless,
        "metrics": {
            "speculative_decoding": dict(metrics.speculative_decoding),
            "governor": metrics.governor,
            "promise": None if metrics.promise is None else metrics.promise.as_dict(),
        },
        "timings": {
            "prefill_seconds": metrics.prefill_seconds,
            "decode_seconds": metrics.decode_seconds,
            "tokens_per_second": metrics.tokens_per_second,
        },
    }
    if len(output.outputs) > 1:
        record["samples"] = [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": list(sample.token_ids),
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in output.outputs
        ]
    return record
