"""Arguments of ``generate`` that it does not pass on to a callable, read from the frame that calls it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationMixin

from foretoken.model.support import CACHE_ARGUMENTS

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_MAX_FRAMES = 16  # wrappers that may stand between ``generate`` and the callable


@dataclass(frozen=True)
class GenerateArguments:
    """Arguments of the surrounding ``generate``; all of them empty where there is none.

    Args:
      streamer: it has the prompt already.
      assistant_model, synced_gpus: as given by the user.
      cache: as given by the user, by any of its names.
    """

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None
    cache: Any = None

    @classmethod
    def find(cls) -> GenerateArguments:
        """The ``generate`` that called whoever calls this."""
        frame = sys._getframe(1)
        for _ in range(_MAX_FRAMES):
            if frame.f_code is _GENERATE:
                known = frame.f_locals
                return cls(
                    known.get("streamer"),
                    known.get("assistant_model"),
                    known.get("synced_gpus"),
                    given_cache(known.get("kwargs", {})),
                )
            if frame.f_back is None:
                break
            frame = frame.f_back
        return cls()


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The key-value cache among keyword arguments, None without one; `transformers` 5.24 renamed it."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)
