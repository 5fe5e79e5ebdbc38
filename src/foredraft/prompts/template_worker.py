"""Program that renders chat templates, in a process of its own: what a template does there, only that process meets.

It imports nothing but the standard library and Jinja, and is started by `foredraft.prompts.templates`. A request is a
length and a marshalled pair of a template and its variables. An answer is a kind, a length and a text.
"""

from __future__ import annotations

import json
import marshal
import os
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

HEAD = struct.Struct("<Q")
TEXT, UNREADABLE, FAILED, NO_MEMORY = b"TUFM"
"""Kinds of answers: the text, a template that is not Jinja, one that fails or refuses, and one that is too large."""
SECONDS, BYTES = 1.0, 64 * 2**20
"""Processor time and memory of one request."""
MOST_OF_REASON = 1000
"""Characters."""


def main() -> None:
    """Answer requests from standard input until it ends."""
    given, told = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    used_bytes = _prepared()
    while len(head := given.read(HEAD.size)) == HEAD.size:
        data = given.read(HEAD.unpack(head)[0])
        kind, text = _rendered_within_limits(data, used_bytes)
        _answer(told, kind, text)


def _answer(told: BinaryIO, kind: int, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    told.write(bytes([kind]) + HEAD.pack(len(data)))
    told.write(data)
    told.flush()


def _prepared() -> int:
    """Let the timer of processor time end the process, and measure the memory in use, in bytes.

    Returns: 0 where there is no ``/proc`` (Linux), and memory therefore not bounded.
    """
    if sys.platform == "win32":
        return 0
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _rendered_within_limits(data: bytes, used_bytes: int) -> tuple[int, str]:
    """The answer to a request. The system ends the process after `SECONDS`, also inside of one long operation."""
    _limit(SECONDS, used_bytes and used_bytes + BYTES + 8 * len(data))  # texts of four bytes a character, twice
    try:
        return rendered(*marshal.loads(data))
    except MemoryError:
        return NO_MEMORY, ""
    finally:
        _limit(0, used_bytes and -1)


def _limit(seconds: float, num_bytes: int) -> None:
    """Bound processor time and memory: 0 seconds or -1 bytes remove a bound, 0 bytes change none."""
    if sys.platform == "win32":
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if num_bytes:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = num_bytes if hard < 0 or 0 <= num_bytes < hard else hard
        resource.setrlimit(resource.RLIMIT_AS, (soft if num_bytes >= 0 else hard, hard))


def rendered(template: str, variables: dict[str, Any] | None) -> tuple[int, str]:
    """The text of a template, or why there is none.

    Args:
      variables: None to read the template only.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        compiled = _compiled(template)
    except TemplateSyntaxError as error:
        return UNREADABLE, f"{error}, line {error.lineno}"[-MOST_OF_REASON:]
    except MemoryError:
        raise
    except Exception as error:  # of the Python that Jinja writes
        return UNREADABLE, _described(error)
    if variables is None:
        return TEXT, ""
    try:
        return TEXT, str(compiled.render(**variables))
    except MemoryError:
        raise
    except TemplateError as error:
        return FAILED, str(error)[:MOST_OF_REASON]
    except Exception as error:  # whatever a template divides, indexes or adds
        return FAILED, _described(error)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_OF_REASON]


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """A template in the environment that transformers gives to chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks what an assistant has said, for training; its text is that of its body."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja has it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> str:
            return str(caller())

    class Dict:
        """``dict``, without what else a class can do."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Attributes(Namespace):
        """``namespace``, without names that Python gives a meaning."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            given = dict(*args[1:], **kwargs)
            for name in given:
                _check(name)
            Namespace.__init__(args[0], given)

        def __setitem__(self, name: str, value: Any) -> None:
            _check(name)
            super().__setitem__(name, value)

    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}, which begins with an underscore")

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals |= {"dict": Dict(), "namespace": Attributes}
    return environment.from_string(template)


if __name__ == "__main__":
    sys.path += sys.argv[1:]  # where Jinja lies, and what it needs
    import jinja2.sandbox  # noqa: F401  # before memory is counted

    main()
