"""Every error that the library raises on purpose, below one base class.

ForedraftError
├── ConfigError              a parameter is unknown, out of range or contradicts another
│   └── GrammarError             a grammar is invalid, costs too much, or needs another tokenizer
├── PromptError              a prompt is empty, malformed or contains ids outside the vocabulary
│   └── ContextLengthError       a prompt does not fit the context of the model
├── TreeError                a draft tree is malformed, or contains a token that its distribution cannot produce
├── ShapeError               tensors given to a pure function do not fit together
├── NumericsError            the model returned NaN, or left no token possible
│   └── NoTokenError             the sampling parameters of a request leave no token possible
├── UnsupportedModelError    the model cannot be verified exactly; the message gives the reason
│   ├── UnsupportedStateError    the model has state that cannot be rolled back (recurrent, convolutional)
│   └── ProbeError               chains through the adapter disagree with the model itself
├── TokenizerMismatchError   drafter and target do not share a tokenizer
├── CheckpointError          a checkpoint is missing, truncated or of an unknown layout
├── DatastoreError           a datastore or its corpus is missing, damaged or foreign, or cannot be written
├── NothingAcceptedError     a search has found no setting under which a draft is accepted
├── CopyError                an object that belongs to one process cannot be pickled or copied
└── EngineBusyError          one engine was entered from two threads at once
"""

from __future__ import annotations

import sys


class ForedraftError(Exception):
    """Base class of every error that this library raises on purpose."""


class ConfigError(ForedraftError, ValueError):
    """A parameter is unknown, out of range, or contradicts another."""


class GrammarError(ConfigError):
    """A grammar cannot be compiled, costs too much, or is not supported for this tokenizer."""


class PromptError(ForedraftError, ValueError):
    """A prompt is empty, malformed, or contains token ids outside the vocabulary."""


class ContextLengthError(PromptError):
    """A prompt leaves no room for a single new token in the model's context."""


class TreeError(ForedraftError, ValueError):
    """A draft tree is malformed, or contains a token to which its own distribution gives probability zero."""


class ShapeError(ForedraftError, ValueError):
    """Tensors given to a pure function do not fit together."""


class NumericsError(ForedraftError, ArithmeticError):
    """The model returned NaN, or the sampling parameters left no token possible."""


class NoTokenError(NumericsError):
    """The sampling parameters of a request leave no token possible, because they contradict each other."""


class UnsupportedModelError(ForedraftError, ValueError):
    """The model cannot be decoded exactly by this library."""


class UnsupportedStateError(UnsupportedModelError):
    """The model has state that cannot be rolled back exactly."""


class ProbeError(UnsupportedModelError):
    """The logits of a chain through the adapter differ from the model's own."""


class TokenizerMismatchError(ForedraftError, ValueError):
    """Drafter and target do not share one tokenizer."""


class CheckpointError(ForedraftError, OSError):
    """A checkpoint is missing, truncated, or of an unknown layout."""


class DatastoreError(ForedraftError, OSError):
    """A datastore, its corpus or a saved history is missing, is damaged, was not written by foredraft, or cannot be
    written."""


class NothingAcceptedError(ForedraftError, RuntimeError):
    """A search has found no setting under which a drafted token is accepted."""


class CopyError(ForedraftError, TypeError):
    """An object that belongs to the process that made it cannot be pickled or copied."""


class EngineBusyError(ForedraftError, RuntimeError):
    """An engine was entered from two threads at once."""


# -- exceptions that end only the row that caused them: which may be contained, and how they are reported ------------


def is_fatal(error: BaseException) -> bool:
    """Return whether an error concerns every row and must not be contained: a lack of memory, or an exception that ends
    the program.

    Exceptions outside ``Exception``, such as KeyboardInterrupt and SystemExit, end the program. Two kinds of them are
    contained. One is the panic of a Rust library. The other is asyncio's CancelledError, which can only come from an
    event loop inside the callee, since no loop cancels a synchronous call. On CPUs torch reports a lack of memory as a
    plain RuntimeError whose message names its allocator.
    """
    torch = sys.modules.get("torch")  # if torch is not loaded, none of its errors can be raised
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
    """Return whether Rust code panicked. pyo3 raises panics as an error that ``except Exception`` does not catch."""
    return type(error).__name__ == "PanicException" and type(error).__module__.startswith("pyo3")


def as_exception(fault: BaseException) -> Exception:
    """Return the fault if it is an Exception, else a RuntimeError that wraps it.

    Panics of Rust libraries are not Exceptions, but a caller who receives one in a result must be able to catch it with
    ``except Exception``.
    """
    if isinstance(fault, Exception):
        return fault
    error = RuntimeError(error_with_type(fault))
    error.__cause__ = fault
    return error


MOST_CHARACTERS = 1000
"""Length of the longest message that is passed on. A caller's code may put a whole array into a message."""


def shortened_message(message: str) -> str:
    """Return the message. Of a long message, return both ends."""
    if len(message) <= MOST_CHARACTERS:
        return message
    return f"{message[: MOST_CHARACTERS // 2]} ... {message[-MOST_CHARACTERS // 2 :]}"


def error_with_type(error: BaseException) -> str:
    """Return type and message of an error, shortened. The result is valid even if the message cannot be formatted."""
    try:
        return shortened_message(f"{type(error).__name__}: {error}")
    except Exception:
        return type(error).__name__


def error_text(error: BaseException) -> str:
    """Return the text of an error for the result of a row. Errors of other libraries include their type."""
    return shortened_message(str(error)) if isinstance(error, ForedraftError) else error_with_type(error)


def error_in_words(error: BaseException, most_characters: int = 300) -> str:
    """Return the message of an error of another library on one line.

    The type comes first only if the message is not a sentence: the message of a KeyError, for example, is a key.
    """
    message = " ".join(str(error).split())
    is_sentence = " " in message and not isinstance(error, LookupError)
    return (message if is_sentence else f"{type(error).__name__}: {message}")[:most_characters]
