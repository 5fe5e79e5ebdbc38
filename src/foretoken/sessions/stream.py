"""What the caller of one call holds: its deltas as they come, and its results at any time."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

from foretoken.engine.stats import SequenceStats
from foretoken.errors import CopyError
from foretoken.sessions.outputs import RequestOutput, StreamOutput
from foretoken.sessions.runner import Runner
from foretoken.sessions.session import Session


class Stream(Iterator[StreamOutput]):
    """The stream of the requests of one call, step by step.

    Iterate for the deltas; `outputs` has what was collected so far, at any time. Use it as a context manager, or
    close it, to end early.
    """

    def __init__(self, runner: Runner, session: Session) -> None:
        self._runner = runner
        self._session = session

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyError(
            "a stream belongs to the LLM that generates it, so it can neither be copied nor pickled; outputs() gives "
            "what has come so far, which can"
        )

    @property
    def num_prompts(self) -> int:
        return len(self._session.requests)

    @property
    def num_finished(self) -> int:
        """Prompts all of whose texts have ended."""
        return self._session.num_finished

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, in all texts."""
        return self._session.num_tokens

    @property
    def finish_reasons(self) -> list[str | None]:
        """Of all texts; None of those that run."""
        return [text.finish_reason for request in self._session.requests for text in request.texts]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of prompts that were taken over from earlier requests instead of being read."""
        return sum(request.texts[0].row.num_cached_tokens for request in self._session.requests)

    @property
    def stats(self) -> SequenceStats:
        """Counters of all texts together."""
        return self._session.stats

    @property
    def fault(self) -> BaseException | None:
        """What broke off a step, or the error of the first text that ended in one, whatever becomes of the others."""
        return self._session.failure or self._session.fault

    def outputs(self) -> list[RequestOutput]:
        """Results in the order of the prompts; what has not ended counts as aborted."""
        return self._session.outputs()

    def output(self, prompt_index: int) -> RequestOutput:
        """The result for one prompt."""
        return self._session.output(prompt_index)

    def __next__(self) -> StreamOutput:
        session = self._session
        self._runner.advance(session)
        if session.is_closed:
            raise StopIteration
        if session.news:
            return session.news.popleft()
        if session.error is not None:
            raise session.error
        raise StopIteration

    def take(self) -> list[StreamOutput]:
        """What has come since, without stepping: another thread calls `LLM.step` meanwhile. See `fault` after it."""
        news = list(self._session.news)
        self._session.news.clear()
        return news

    @property
    def is_waiting(self) -> bool:
        """Whether no step has touched any of its rows."""
        return self._session.is_waiting

    @property
    def is_finished(self) -> bool:
        """Whether nothing comes any more."""
        session = self._session
        return not session.news and (session.is_closed or session.failure is not None or session.is_finished)

    def close(self) -> None:
        """End the requests that have not finished. Closing twice is harmless."""
        if not self._session.is_closed:
            self._runner.end(self._session)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._session.is_closed:
            self._runner.abandon(self._session)
