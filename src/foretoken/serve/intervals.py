"""Chunks of a stream that are to hold several tokens: what steps bring is held back until there are enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretoken.sessions.outputs import FrozenList, StreamOutput


class Intervals:
    """Joins what steps bring of each text: the first of it goes out at once, and so does its end.

    Args:
      least: tokens that any other chunk holds, as vLLM's ``stream_interval``.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._begun: set[tuple[int, int]] = set()
        self._held: dict[tuple[int, int], StreamOutput] = {}

    def take(self, news: Sequence[StreamOutput]) -> list[StreamOutput]:
        """What of it goes out now, with what was held back before."""
        if self._least == 1:
            return list(news)
        ready = []
        for delta in news:
            text = (delta.prompt_index, delta.index)
            held = self._held.pop(text, None)
            delta = delta if held is None else joined(held, delta)
            is_first = text not in self._begun
            self._begun.add(text)
            if is_first or delta.finish_reason is not None or len(delta.token_ids) >= self._least:
                ready.append(delta)
            else:
                self._held[text] = delta
        return ready


def joined(first: StreamOutput, second: StreamOutput) -> StreamOutput:
    """Two deltas of one text as one, which shows no draft. A text that came without a token stays where it came."""
    texts, later = first.texts, second.texts
    if not second.token_ids and texts:
        texts = (*texts[:-1], texts[-1] + second.text)
    elif not first.token_ids and later:
        later = (first.text + later[0], *later[1:])
    return replace(
        second,
        text=first.text + second.text,
        segments=first.segments + second.segments,
        token_ids=FrozenList(first.token_ids + second.token_ids),
        num_accepted=first.num_accepted + second.num_accepted,
        texts=texts + later,
        logprobs=None if second.logprobs is None else [*(first.logprobs or ()), *second.logprobs],
        tree=None,
        prompt_logprobs=first.prompt_logprobs,
    )
