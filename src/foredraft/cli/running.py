"""The surroundings of every verb: loading, messages, standard streams and exit codes."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foredraft.config.foreign import aliases
from foredraft.errors import ConfigError, ForedraftError, described

if TYPE_CHECKING:
    from foredraft.config.speculative import SpeculativeLike
    from foredraft.llm import LLM

_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")

EXIT_REFUSED = 2
EXIT_DIFFERS = 3
EXIT_INTERRUPTED = 130


def choose_model(model: str | None) -> str:
    """The model that was named, else the best one available; where that is a toy, the user is told."""
    from foredraft import zoo

    if model is not None:
        return model
    chosen = zoo.default()
    if zoo.manifest(chosen).is_toy:
        real = next(name for name in zoo.names() if not zoo.manifest(name).is_toy)
        say(f"{chosen} is a toy that babbles. {zoo.why_missing(real)}")
    return chosen


class _Notices(logging.Handler):
    """Shows what the library says about models, and what was done differently than asked, on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"foredraft: {self.format(record)}\n")  # which a progress display may have replaced


@contextmanager
def notices() -> Iterator[None]:
    """While a verb runs: one line for every model that is loaded, and warnings."""
    logger = logging.getLogger("foredraft")
    handler, level = _Notices(logging.INFO), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def load_llm(model: str, config: SpeculativeLike, **options: Any) -> LLM:
    """The model behind a verb. Progress of loading shows on terminals only."""
    from foredraft.llm import LLM

    hide_progress_of_loading()
    return LLM(model, config, **options)


def hide_progress_of_loading() -> None:
    """Hide the progress of loading where standard error is not a terminal."""
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raises: ConfigError where writing inside of it fails."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; choose another place") from None


def say(line: str) -> None:
    """One line for people, on standard error."""
    typer.echo(f"foredraft: {line}", err=True)


def read_text(file: str) -> str:
    """A file that an option names.

    Raises: ConfigError for one that cannot be read.
    """
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def put_json(record: Mapping[str, Any]) -> None:
    """One object on a line of standard output: readable where its encoding can hold it, escaped elsewhere.

    What some readers take for a line end (U+2028, U+2029, U+0085) is always escaped. NaN and infinities, which JSON has
    no words for, become null.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        from foredraft.bench.report import plain_data

        record = plain_data(record)
        text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record)
    sys.stdout.write(_LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
    sys.stdout.flush()


class _Stream(io.FileIO):
    """The file behind a standard stream, which tells at most once that it cannot be written.

    Args:
      descriptor: of the open file.
      is_needed: raise a ConfigError then; else what is written is lost without a word.
    """

    def __init__(self, descriptor: int, *, is_needed: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_needed = is_needed

    def write(self, data: Any) -> int:
        """All of it: what lies above may have no buffer to write the rest from."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                rest = rest[super().write(rest) or 0 :]
        except BrokenPipeError:
            if self._is_needed:
                raise
        except OSError as error:
            if self._is_needed:
                self._is_needed = False  # the end of the process writes what is left once more
                raise ConfigError(
                    f"standard output cannot be written ({error.strerror}), so what was to follow is lost; make room, "
                    "or send it elsewhere"
                ) from None
        return size


@contextmanager
def standard_streams() -> Iterator[None]:
    """Whatever the command line runs, with streams that were closed or cannot be written.

    Python has None for a stream that was closed, and ends with code 0, or with a traceback at the very end, where
    standard output cannot be written. Output that is lost is a refusal here; lost messages are not.
    """
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # a terminal that does not tell its width has 0, at which rich writes nothing
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the process runs
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    elif sys.stderr is sys.__stderr__:
        sys.stderr = _told(sys.stderr, is_needed=False)
    try:
        if sys.stdout is None:
            raise ConfigError("standard output is closed; give it a place, /dev/null for instance")
        if sys.stdout is sys.__stdout__:
            sys.stdout = _told(sys.stdout, is_needed=True)
        try:
            yield
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        say(described(error))
        sys.exit(EXIT_REFUSED)
    except BrokenPipeError:
        _drop_output()
        sys.exit()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich and typer end with code 1 then
            sys.exit()
        raise


def _told(stream: Any, *, is_needed: bool) -> Any:
    """The same stream over a `_Stream`."""
    raw = _Stream(stream.fileno(), is_needed=is_needed)
    options = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, newline="\n", **options)


def _drop_output() -> None:
    """Let what is still to be written go nowhere: the reader has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tolerate_encodings() -> None:
    """No text of a model or a user breaks a stream: what its encoding cannot hold is written as an escape.

    Bytes of standard input that are not text are marked, so that prompts with them are refused by name.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=errors)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what is raised on purpose into a message on standard error and a documented exit code."""
    try:
        yield
    except ForedraftError as error:
        say(described(error))
        raise typer.Exit(EXIT_REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit from None


def respell(arguments: Sequence[str]) -> list[str]:
    """Options of other tools under their names here: ``--assistant-model=X`` -> ``--draft-model=X``."""
    names = {"model": "--draft-model", "num_speculative_tokens": "--num-speculative-tokens"}
    table = {
        "--" + name.replace("_", "-"): names[alias.key]
        for name, alias in aliases("SpeculativeConfig").items()
        if alias.key in names and name not in ("draft", "draft_model")
    }
    table |= {"-md": "--draft-model", "--draft": "--num-speculative-tokens", "--max-tokens": "--max-new-tokens"}
    spelled: list[str] = []
    for place, argument in enumerate(arguments):
        if argument == "--":
            return [*spelled, *arguments[place:]]
        name, equals, value = argument.partition("=")
        spelled.append(table.get(name, name) + equals + value)
    return spelled
