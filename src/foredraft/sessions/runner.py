"""One engine shared by many calls: who steps, who gets what, what happens when a step breaks off, and the
stream that a caller holds."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, NoReturn

from foredraft.config.sampling import SamplingParams
from foredraft.engine.engine import Engine
from foredraft.engine.exclusive_use import ExclusiveUse
from foredraft.engine.row import Row
from foredraft.engine.stats import RowStats, StepProfile
from foredraft.errors import CopyError, EngineBusyError, PromptError
from foredraft.model.default_device import makes_on_cpu
from foredraft.sessions.idle import IdleWatch
from foredraft.sessions.outputs import RequestOutput, StreamOutput
from foredraft.sessions.payoff import PayoffWatch
from foredraft.sessions.prompts import Prompt
from foredraft.sessions.session import Request, Session, TextStream


class Runner:
    """Runs the sessions of several calls over one engine.

    A session's caller steps the engine until its own session has news; results of other sessions are kept for them.
    So calls from several threads, and calls made while a stream is open, share batches and all give right results.

    Args:
      new_engine: makes the engine, and another one when the target runs in another way than it did.
      num_spec_tokens: K, for the metrics.
      lock: held while the target runs; runners of one target share it.
      payoff: counts rows that have ended.
    """

    def __init__(
        self,
        new_engine: Callable[[], Engine],
        num_spec_tokens: int,
        lock: threading.RLock,
        payoff: PayoffWatch,
    ) -> None:
        self._new_engine = new_engine
        self._engine = new_engine()
        self._execution = self._engine.target.execution
        self._num_changes = self._engine.target.num_changes
        self._num_spec_tokens = num_spec_tokens
        self._lock = lock
        self._payoff = payoff
        self._use = ExclusiveUse()  # of the thread that has the lock
        self._num_requests = 0
        self._session_of: dict[Row, Session] = {}  # while it is unfinished
        self._abandoned: deque[Session] = deque()
        self._idle = IdleWatch(self)

    @property
    def profile(self) -> StepProfile:
        return self._engine.profile

    @property
    def engine(self) -> Engine:
        """As it is now; another one takes its place when the target runs in another way."""
        return self._engine

    @property
    def num_unfinished(self) -> int:
        """Rows that are queued or running."""
        return len(self._session_of)

    @property
    def num_running(self) -> int:
        """Rows in the cache."""
        return self._engine.num_running

    @makes_on_cpu
    def open(self, prompts: Sequence[Prompt], params: Sequence[Callable[[int], SamplingParams]]) -> Session:
        """Queue the prompts of one call, all of them or, when one is refused, none.

        Args:
          params: one for each prompt, given the number of the request.

        Raises: PromptError, naming the prompt by its place; UnsupportedModelError when the owner of the model has made
          it one that cannot be decoded exactly.
        """
        with self._lock:
            if self._use.is_taken:
                raise EngineBusyError("a logits processor called the LLM it runs in; give it another LLM")
            self._follow_target()
            requests: list[Request] = []
            try:
                for place, (prompt, params_of) in enumerate(zip(prompts, params, strict=True)):
                    requests.append(self._add(place, prompt, params_of(self._num_requests)))
            except BaseException:
                for request in requests:
                    self._engine.abort(request.id)
                raise
            session = Session(requests, self._engine, self._num_spec_tokens)
            self._idle.end()
            self._session_of.update(dict.fromkeys(session.rows, session))
            return session

    def _follow_target(self) -> None:
        """Decode with the model as it is now. Rows that are running go on over what they have in the cache."""
        target = self._engine.target
        target.refresh()
        if target.num_changes != self._num_changes:
            self._engine.forget_prefixes()
            self._num_changes = target.num_changes
        self._end_abandoned()
        if target.execution is not self._execution and not self._session_of:
            self._renew_engine()  # its drafter and its cache are made for the model as it was
            self._execution = target.execution

    def _add(self, place: int, prompt: Prompt, params: SamplingParams) -> Request:
        request_id = str(self._num_requests)
        self._num_requests += 1
        try:
            rows = self._engine.add_request(prompt.token_ids, params, request_id, output_ids=prompt.output_ids)
        except PromptError as error:
            raise type(error)(f"prompt {place}: {error}") from None
        for row in rows:  # before any step
            row.cache_salt = prompt.cache_salt
        return Request(request_id, prompt, params, perf_counter(), [TextStream(row) for row in rows])

    def advance(self, session: Session) -> None:
        """Step until this session has news or has ended.

        Raises: what broke off a step, in every session that had rows in it; those whose rows only waited go on. Ctrl-C
          ends the call in which it was noticed as well.
        """
        while not (session.news or session.is_closed):
            with self._lock:
                if session.failure is not None:
                    raise session.failure
                if session.news or session.is_closed or session.is_finished:
                    return
                self._end_abandoned()
                self._step(session)

    def step(self) -> bool:
        """One step for whoever has a session open, for a thread that does nothing else; whether there was one to make.

        What it has brought, or what broke it off, lies with the sessions.
        """
        with self._lock:
            self._end_abandoned()
            has_rows = bool(self._session_of)
            if has_rows:
                self._step(None)
            return has_rows

    def _step(self, session: Session | None) -> None:
        """Step on behalf of a session, or of all of them."""
        started = perf_counter()
        self._use.take(sys._getframe())
        try:
            outputs = self._engine.step()
            ended = perf_counter()
            for output in outputs:
                owner = self._session_of.get(output.row)
                if owner is None:  # of a call that was cut off before it could wait for it
                    self._engine.abort(output.row.request_id)
                    continue
                if not owner.take(output, started, ended) and not output.row.is_finished:
                    self._engine.abort_row(output.row, "error")
                if output.row.is_finished:
                    del self._session_of[output.row]
                    self._payoff.ended(output.row.stats)
        except BaseException as error:
            failed = self._fail(error)
            is_of_others = failed and session not in failed and isinstance(error, Exception)
            if not is_of_others:
                raise
        finally:
            self._use.give_back()
            self._note_idle()

    def _fail(self, error: BaseException) -> set[Session]:
        """End the sessions that had rows in what broke off; the engine has ended these rows already."""
        untouched = set(self._engine.waiting_rows)
        failed = {session for row, session in self._session_of.items() if row not in untouched}
        for session in failed:
            session.failure = error
        for session in failed:
            self._withdraw(session)
        return failed

    def _withdraw(self, session: Session) -> None:
        """Leave nothing of a session in the engine, and count what has not ended as aborted."""
        for request in session.requests:
            if not request.is_finished:
                self._engine.abort(request.id)
        for row in session.rows:
            self._session_of.pop(row, None)
        session.abort()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._session_of:
            self._idle.begin()

    def rest(self) -> None:
        """Give back the memory of keys and values, unless a request has come meanwhile."""
        with self._lock:
            self._end_abandoned()
            if not self._session_of:
                self._engine.release_memory()

    def _renew_engine(self) -> None:
        profile = self._engine.profile
        self._engine = self._new_engine()
        self._engine.profile = profile

    def end(self, session: Session) -> None:
        """Take what is unfinished of a session out of the engine."""
        with self._lock:
            if self._use.is_taken:
                self.abandon(session)
                return
            session.is_closed = True
            try:
                self._withdraw(session)
            except BaseException as error:  # cut off in the engine, which then ends all rows that run
                self._fail(error)
                raise

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self.end(self._abandoned[0])
            self._abandoned.popleft()

    def abandon(self, session: Session) -> None:
        """End a session before the next step; may be called from anywhere, a garbage collection included."""
        self._abandoned.append(session)


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
    def stats(self) -> RowStats:
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
