"""The shape of an answer: what completions and chat have in common."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.serve.tokens import TokenNames
from foretoken.views.drafts import Drafts

if TYPE_CHECKING:
    from foretoken.serve.asking import Asking
    from foretoken.serve.served import Served
    from foretoken.sessions.outputs import RequestOutput, StreamOutput


class Form(ABC):
    """Makes the objects of an answer.

    Attributes:
      prefix: of ids.
      kinds: of whole answers, and of chunks.
    """

    prefix: ClassVar[str]
    kinds: ClassVar[tuple[str, str]]

    def __init__(self, asking: Asking, served: Served) -> None:
        self._asking = asking
        self._fingerprint = served.fingerprint
        self._names = TokenNames(served.llm.tokenizer, asking.names_ids)
        self._drafts = Drafts(served.llm.tokenizer)
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    def frame(self, is_chunk: bool) -> dict[str, Any]:
        """What every object begins with."""
        return {
            "id": self._id,
            "object": self.kinds[is_chunk],
            "created": self._created,
            "model": self._asking.model,
            "system_fingerprint": self._fingerprint,
        }

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Choices of chunks before the first token."""

    @abstractmethod
    def choices(self, delta: StreamOutput) -> list[dict[str, Any]]:
        """Choices of the chunks for what a step has brought one text: one for each token, or one for all."""

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Choices of the whole answer."""

    def _parts(self, delta: StreamOutput) -> list[slice]:
        """Tokens of a step that a chunk holds, for each chunk."""
        length = len(delta.token_ids)
        return [slice(i, i + 1) for i in range(length)] if self._asking.by_token else [slice(0, length)]

    def _tell(self, choice: dict[str, Any], delta: StreamOutput, part: slice) -> dict[str, Any]:
        """A choice with what was asked for beside its text."""
        if self._asking.returns_ids:
            choice["token_ids"] = list(delta.token_ids[part])
        if self._asking.returns_drafts:
            choice["draft"] = self._drafts.of(delta, part)
        return choice
