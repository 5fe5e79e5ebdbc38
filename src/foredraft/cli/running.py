"""Surroundings of every verb: loading, messages, standard streams and exit codes."""

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
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.status import Status

from foredraft.cli.quick_imports import quick_imports
from foredraft.config.other_systems import aliases
from foredraft.errors import ConfigError, ForedraftError, error_text
from foredraft.machine import collector_paused

if TYPE_CHECKING:
    from foredraft.config.speculative import SpeculativeLike
    from foredraft.llm import LLM

_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")

EXIT_REFUSED = 2
EXIT_DIFFERS = 3
EXIT_INTERRUPTED = 130


def choose_model(model: str | None) -> str:
    """Name of the model that was given, else of the best one available. If the chosen model is a toy, a line says
    so."""
    from foredraft import zoo

    if model is not None:
        return model
    chosen = zoo.default()
    if zoo.manifest(chosen).is_toy:
        real = next(name for name in zoo.names() if not zoo.manifest(name).is_toy)
        say(f"{chosen} is a toy model without useful answers. {zoo.why_missing(real)}")
    return chosen


class _Notices(logging.Handler):
    """Shows records of the library on standard error, and the current stage of loading as a status.

    On a terminal the status is a line that is replaced and removed. Elsewhere, the first stage has a line of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_quiet = False
        self.least = logging.INFO
        self._status: Status | None = None
        self._latest = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record gets a line. If there is a status, a stage updates it instead."""
        if not _is_stage(record):
            return record.levelno >= self.least
        text = record.getMessage()
        is_new, self._latest = text != self._latest, text
        if self._status is not None:
            self._status.update(text)
        return is_new and record.levelno >= self.least and self._status is None and not self.is_quiet

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"foredraft: {self.format(record)}\n")  # a progress display may have replaced the stream

    def begin(self, text: str, *, is_fixed: bool) -> None:
        """Show a status.

        Args:
          is_fixed: write a line that stays, also on a terminal.
        """
        if self.is_quiet or text == self._latest:
            return
        self._latest = text
        if is_fixed or not sys.stderr.isatty() or isinstance(sys.stderr, FileProxy):
            say(text)
        else:
            self._status = Console(stderr=True).status(text)
            self._status.start()
            logging.getLogger("foredraft").setLevel(logging.DEBUG)  # for all stages

    def end(self) -> None:
        """Remove the status."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _is_stage(record: logging.LogRecord) -> bool:
    return bool(vars(record).get("is_stage"))


@contextmanager
def notices() -> Iterator[None]:
    """Show records of the library while a verb runs: loaded models, stages of loading, and warnings."""
    logger = logging.getLogger("foredraft")
    handler, level = _Notices(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        handler.end()
        logger.setLevel(level)
        logger.removeHandler(handler)


def _handlers() -> list[_Notices]:
    return [one for one in logging.getLogger("foredraft").handlers if isinstance(one, _Notices)]


def be_verbose() -> None:
    """Show details of loading and decoding until the verb ends."""
    logging.getLogger("foredraft").setLevel(logging.DEBUG)
    for handler in _handlers():
        handler.least = logging.DEBUG


def be_quiet() -> None:
    """Show no status until the verb ends; load lines and warnings stay."""
    for handler in _handlers():
        handler.is_quiet = True


def show_loading(model: str) -> None:
    """Show at once that a model is being loaded: importing torch alone takes seconds."""
    is_at_hub = not model.startswith("zoo:") and not os.path.exists(os.path.expanduser(model))
    for handler in _handlers():
        handler.begin(f"loading {model} ...", is_fixed=is_at_hub)  # downloads have bars of their own


def hide_loading() -> None:
    """Remove the status of `show_loading`."""
    for handler in _handlers():
        handler.end()


def load_llm(model: str, config: SpeculativeLike, **options: Any) -> LLM:
    """Load the model of a verb, with a status on standard error."""
    show_loading(model)
    try:
        with collector_paused():
            with quick_imports():
                from foredraft.llm import LLM
            hide_progress_of_loading()
            return LLM(model, config, **options)
    finally:
        hide_loading()


def hide_progress_of_loading() -> None:
    """Hide the progress bars of transformers: the status is enough."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Context of writing a file.

    Raises: ConfigError if it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; choose another place") from None


def say(line: str) -> None:
    """Write one line for people to standard error."""
    typer.echo(f"foredraft: {line}", err=True)


def read_text(file: str) -> str:
    """Text of a file.

    Raises: ConfigError if it cannot be read.
    """
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def put_json(record: Mapping[str, Any]) -> None:
    """Write one JSON object as a line of standard output.

    Characters that the encoding of the stream cannot represent are escaped. So are U+2028, U+2029 and U+0085, which
    some readers take for line breaks. NaN and infinities become null.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except ValueError:
        from foredraft.bench.report import plain_data

        record = plain_data(record)
        text = json.dumps(record, ensure_ascii=False)
    stream = getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # a progress bar replaces the stream by its own
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record)
    stream.write(_LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n")
    stream.flush()


class _Stream(io.FileIO):
    """File behind a standard stream. The stream reports at most once that it cannot be written.

    Args:
      descriptor: descriptor of the open file.
      is_needed: raise a ConfigError if the stream cannot be written. If False, the data is dropped.
    """

    def __init__(self, descriptor: int, *, is_needed: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_needed = is_needed

    def write(self, data: Any) -> int:
        """Write all data: the layer above may have no buffer for the rest."""
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
                self._is_needed = False  # the end of the process writes the rest again
                raise ConfigError(
                    f"standard output cannot be written ({error.strerror}), so further output is lost; make room, or "
                    "redirect it"
                ) from None
        return size


@contextmanager
def standard_streams() -> Iterator[None]:
    """Context of the command line in which closed or unwritable standard streams are handled.

    Python sets closed streams to None. If standard output cannot be written, it ends with code 0 or with a traceback.
    In this context lost output is an error, and lost messages are not.
    """
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # a terminal of unknown width has 0, at which rich writes nothing
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the process runs
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    elif sys.stderr is sys.__stderr__:
        sys.stderr = _over_reporting_file(sys.stderr, is_needed=False)
    try:
        if sys.stdout is None:
            raise ConfigError("standard output is closed; redirect it, for example to /dev/null")
        if sys.stdout is sys.__stdout__:
            sys.stdout = _over_reporting_file(sys.stdout, is_needed=True)
        try:
            yield
        finally:
            sys.stdout.flush()
    except ConfigError as error:
        say(f"error: {error_text(error)}")
        sys.exit(EXIT_REFUSED)
    except BrokenPipeError:
        _drop_output()
        sys.exit()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich and typer end with code 1 then
            sys.exit()
        raise


def _over_reporting_file(stream: Any, *, is_needed: bool) -> Any:
    """Stream over a `_Stream` with the same settings."""
    raw = _Stream(stream.fileno(), is_needed=is_needed)
    options = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, newline="\n", **options)


def _drop_output() -> None:
    """Drop all further output: its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tolerate_encodings() -> None:
    """Write characters that the encoding of a stream cannot represent as escapes.

    Invalid bytes of standard input are marked, so that prompts with them are refused.
    """
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=errors)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors of the library into a message on standard error and a documented exit code."""
    try:
        yield
    except ForedraftError as error:
        say(f"error: {error_text(error)}")
        raise typer.Exit(EXIT_REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit from None


def respell(arguments: Sequence[str]) -> list[str]:
    """Replace options of other tools by those of foredraft: ``--assistant-model=X`` -> ``--draft-model=X``."""
    names = {"model": "--draft-model", "num_speculative_tokens": "--num-speculative-tokens"}
    table = {
        "--" + name.replace("_", "-"): names[alias.key]
        for name, alias in aliases("speculative_config").items()
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
