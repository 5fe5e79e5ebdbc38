"""Every refusal of the library, below one base.

ForedraftError
├── ConfigError              a parameter is unknown, out of range or contradicts another
│   └── GrammarError             what an output must match is no grammar, costs too much, or needs another tokenizer
├── PromptError              a prompt is empty, malformed or holds ids outside the vocabulary
├── ContextLengthError       a prompt does not fit the context of the model
├── TreeError                a draft tree is malformed, or carries a token that its own distribution cannot produce
├── ShapeError               tensors given to a pure function do not fit together
├── NumericsError            the model returned NaN, or left no token possible
├── UnsupportedModelError    the model cannot be verified exactly; the message says why
│   ├── UnsupportedStateError    state that cannot be rolled back (recurrent, convolutional)
│   └── ProbeError               chains through the adapter disagree with the model itself
├── TokenizerMismatchError   drafter and target do not share a tokenizer
├── CheckpointError          a checkpoint is missing, truncated or of an unknown layout
├── DatastoreError           a datastore or its corpus is missing, damaged or foreign, or it cannot be written
├── NothingAcceptedError     a search has found no setting under which a draft is accepted
├── CopyError                what belongs to one process was to be pickled or copied
└── EngineBusyError          one engine was entered from two threads at once
"""

from __future__ import annotations

import sys


class ForedraftError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(ForedraftError, ValueError):
    """A parameter is unknown, out of range, or contradicts another."""


class GrammarError(ConfigError):
    """A grammar cannot be compiled, costs too much, or is not supported for this tokenizer."""


class PromptError(ForedraftError, ValueError):
    """A prompt is empty, malformed, or holds token ids outside the vocabulary."""


class ContextLengthError(PromptError):
    """A prompt leaves no room for a single new token in the model's context."""


class TreeError(ForedraftError, ValueError):
    """A draft tree is malformed, or carries a token to which its own distribution gives probability zero."""


class ShapeError(ForedraftError, ValueError):
    """Tensors given to a pure function do not fit together."""


class NumericsError(ForedraftError, ArithmeticError):
    """The model returned NaN, or the sampling parameters left no token possible."""


class NoTokenError(NumericsError):
    """The sampling parameters of a request contradict each other: they leave no token possible."""


class UnsupportedModelError(ForedraftError, ValueError):
    """The model cannot be decoded exactly by this library."""


class UnsupportedStateError(UnsupportedModelError):
    """The model keeps state that cannot be rolled back exactly."""


class ProbeError(UnsupportedModelError):
    """Logits of a chain through the adapter differ from the model's own."""


class TokenizerMismatchError(ForedraftError, ValueError):
    """Drafter and target do not share one tokenizer."""


class CheckpointError(ForedraftError, OSError):
    """A checkpoint is missing, truncated, or of an unknown layout."""


class DatastoreError(ForedraftError, OSError):
    """A datastore, its corpus or a saved history is missing, damaged or foreign, or cannot be written."""


class NothingAcceptedError(ForedraftError, RuntimeError):
    """A search has found no setting under which a drafted token is accepted."""


class CopyError(ForedraftError, TypeError):
    """An object that belongs to the process which made it was to be pickled or copied."""


class EngineBusyError(ForedraftError, RuntimeError):
    """An engine was entered from two threads at once."""


# -- exceptions that are contained in the row that they came from: which may be, and how they are told ---------------


def is_fatal(error: BaseException) -> bool:
    """Whether an error concerns every row, so that it is never contained: memory has run out, or the program is to end.

    Whatever is no Exception asks for an end, as KeyboardInterrupt and SystemExit do. Two do not: panics of libraries in
    Rust, and asyncio's CancelledError, which comes from a loop of the callee's own, for no loop cancels a synchronous
    call. On CPUs torch reports a lack of memory by a plain RuntimeError, in which its allocator names itself.
    """
    torch = sys.modules.get("torch")  # whose errors nobody raises who has not loaded it
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_fatal, error.exceptions))
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
        return True
    return not (isinstance(error, Exception) or is_panic(error) or _is_cancelled(error))


def _is_cancelled(error: BaseException) -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and isinstance(error, asyncio.CancelledError)


def is_panic(error: BaseException) -> bool:
    """Whether code in Rust gave up: pyo3 raises that past everything that catches Exception."""
    return type(error).__name__ == "PanicException" and type(error).__module__.startswith("pyo3")


def as_exception(fault: BaseException) -> Exception:
    """The fault, as an Exception whatever it is: panics of libraries in Rust are not, and ``except Exception`` must see
    them where results carry them to a caller."""
    if isinstance(fault, Exception):
        return fault
    error = RuntimeError(described(fault))
    error.__cause__ = fault
    return error


MOST_CHARACTERS = 1000
"""Longest message that is passed on. Code of callers may put a whole array into one."""


def shortened(message: str) -> str:
    """A message, or the two ends of a long one."""
    if len(message) <= MOST_CHARACTERS:
        return message
    return f"{message[: MOST_CHARACTERS // 2]} ... {message[-MOST_CHARACTERS // 2 :]}"


def described(error: BaseException) -> str:
    """Type and message of an error, shortened, also of one whose message cannot be made."""
    try:
        return shortened(f"{type(error).__name__}: {error}")
    except Exception:
        return type(error).__name__


def told(error: BaseException) -> str:
    """An error as the result of a row tells it: ours speak for themselves, others with their type."""
    return shortened(str(error)) if isinstance(error, ForedraftError) else described(error)
