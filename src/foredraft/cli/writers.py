"""Output of ``foredraft generate``, as text or JSON; other verbs use the same formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from foredraft.cli.prompts import Asked
from foredraft.cli.running import put_json
from foredraft.config.sampling import SamplingParams
from foredraft.engine.frontend import RequestOutput, Segments, StreamOutput, decode_seconds
from foredraft.engine.stats import RowStats, counted, describe_drafting

if TYPE_CHECKING:
    from foredraft.engine.frontend import Stream

DRAFTED_STYLE = "green"


class JsonWriter:
    """Writes one JSON object per prompt, in the order of the prompts, as soon as possible."""

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
        """Write the unfinished results."""
        for output in stream.outputs()[self._num_written :]:
            self._put(output)

    def finish(self, stream: Stream) -> None:
        """End the output; everything has been written."""

    def _put(self, output: RequestOutput) -> None:
        one = self._asked[self._num_written]
        put_json(as_record(output, one.given if one.is_templated else None))
        self._num_written += 1


class TextWriter:
    """Writes the text of all samples in order. The text of the first unfinished sample is written while it grows.

    Args:
      shows_details: explain the speed at the end.
    """

    def __init__(self, params: SamplingParams, *, shows_details: bool = False) -> None:
        self._shows_details = shows_details
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
        """End the line, and write the texts that wait for an earlier one."""
        for place in sorted(self._waiting.keys() | {self._current}):
            for held in self._waiting.get(place, ()):
                self._put(held)
            self._console.file.write("\n")
        self.finish(stream)

    def finish(self, stream: Stream) -> None:
        """Write the closing line to standard error."""
        outputs = stream.outputs()
        for place, output in enumerate(outputs):
            said = ending(output, self._budget)
            if said:
                self._errors.print(Text(f"prompt {place}: {said}" if len(outputs) > 1 else said, "yellow"))
        for line in closing(outputs, is_sampled=self._is_sampled, shows_details=self._shows_details):
            self._errors.print(Text(line, "dim"))
        if self._console.is_terminal and any(o.metrics.speculative_decoding["num_spec_steps"] for o in outputs):
            legend = Text("Drafted tokens are ", "dim")
            self._errors.print(legend.append("green", DRAFTED_STYLE).append(".", "dim"))


def ending(output: RequestOutput, budget: int | None) -> str:
    """Note on the end of a text; empty if the model ended it."""
    if any(not sample.text.strip() and sample.finish_reason == "stop" for sample in output.outputs):
        return "the model ended the text before its first word"
    longest = max(len(sample.token_ids) for sample in output.outputs)
    if any(sample.finish_reason == "length" for sample in output.outputs):
        if longest == budget:
            return f"stopped at the limit of {counted(longest, 'token')}; raise it with --max-new-tokens"
        return f"stopped after {counted(longest, 'token')}: the context of the model is full"
    return ""


def write_segments(console: Console, segments: Segments) -> None:
    """Write pieces of text; on a terminal, drafted ones are green."""
    for text, source in segments:
        if console.is_terminal:
            console.print(Text(text, "" if source == "target" else DRAFTED_STYLE), end="", soft_wrap=True)
        else:
            console.file.write(text)
    console.file.flush()


def closing(outputs: Sequence[RequestOutput], *, is_sampled: bool, shows_details: bool) -> list[str]:
    """Closing line of a command, with its explanation if it is wanted."""
    line = summary(outputs, is_sampled=is_sampled)
    return [line, *details(outputs)] if shows_details else [line]


def summary(outputs: Sequence[RequestOutput], *, is_sampled: bool = True) -> str:
    """Tokens, speed and drafts of all prompts in one line, with the seed if tokens were sampled.

    Example:
        ``32 tokens · 15.3 tok/s · 1.31x plain (1.45 tokens per step, 16 % of drafts accepted)``
    """
    counts = pooled(outputs)
    num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    parts = [counted(num_tokens, "token"), f"{ratio(num_tokens, decode_seconds(outputs)):.1f} tok/s"]
    speed = (outputs[-1].metrics.governor or {}).get("estimated_speedup")
    if speed is not None:
        parts.append(f"{speed:.2f}x plain")
    if counts.num_proposed_tokens:
        share = f"{counts.draft_acceptance_rate:.0%}".replace("%", " %")
        parts[-1] += f" ({ratio(num_tokens, counts.num_steps):.2f} tokens per step, {share} of drafts accepted)"
    elif counts.num_undrafted_steps:
        parts[-1] += " (nothing was drafted)"
    seeds = sorted({sample.seed for output in outputs for sample in output.outputs})
    if is_sampled and len(seeds) == 1:
        parts.append(f"seed {seeds[0]}")
    return " · ".join(parts)


def details(outputs: Sequence[RequestOutput]) -> list[str]:
    """Lines that explain the speed."""
    prompt_seconds = min(output.metrics.prefill_seconds for output in outputs)
    lines = [
        f"speed: {decode_seconds(outputs):.2f} s of decoding; tok/s does not count {prompt_seconds:.2f} s before the "
        "first step, when prompts are read",
    ]
    return lines + describe_drafting(pooled(outputs), outputs[-1].metrics.governor)


def pooled(outputs: Sequence[RequestOutput]) -> RowStats:
    """Counters of the drafts for all prompts."""
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
    """Quotient; 0.0 if the divisor is 0."""
    return part / whole if whole else 0.0


def as_record(output: RequestOutput, message: str | None = None) -> dict[str, Any]:
    """JSON object of one prompt. With several samples, the top level has the first and ``samples`` all.

    Args:
      message: message in the chat template; None if the template was not used.
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
            "guarantee": None if metrics.guarantee is None else metrics.guarantee.as_dict(),
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
