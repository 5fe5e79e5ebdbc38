"""Program that renders chat templates in a separate process, which confines whatever a template does.

The worker imports only the standard library and Jinja, and is started by `foredraft.prompts.templates`. A request is a
length followed by a marshalled pair of template and variables. A response is a kind, a length and text.
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
"""Kinds of responses: rendered text, a template that is not valid Jinja, a template that fails or raises, and one that
needs too much memory."""
SECONDS, BYTES = 1.0, 64 * 2**20
"""Processor time and memory limits of one request."""
MOST_OF_REASON = 1000
"""Maximum number of characters of an error message."""


def main() -> None:
    """Process requests from standard input until it ends."""
    given, told = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
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
    """Make the processor-time timer end this process, and measure the memory in use.

    Returns: memory in use, in bytes; 0 without ``/proc`` (outside Linux), where memory is not limited.
    """
    if sys.platform == "win32":
        return 0
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _rendered_within_limits(data: bytes, used_bytes: int) -> tuple[int, str]:
    """Render a request. The operating system kills this process after `SECONDS` of processor time, even inside one long
    operation."""
    # 8 bytes of memory per byte of input: a string may take 4 bytes per character, and exists twice
    _limit(SECONDS, used_bytes and used_bytes + BYTES + 8 * len(data))
    try:
        return rendered(*marshal.loads(data))
    except MemoryError:
        return NO_MEMORY, ""
    finally:
        _limit(0, used_bytes and -1)


def _limit(seconds: float, num_bytes: int) -> None:
    """Set the limits of processor time and memory. 0 seconds and -1 bytes remove a limit; 0 bytes leave the memory
    limit unchanged."""
    if sys.platform == "win32":
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if num_bytes:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = num_bytes if hard < 0 or 0 <= num_bytes < hard else hard
        resource.setrlimit(resource.RLIMIT_AS, (soft if num_bytes >= 0 else hard, hard))


def rendered(template: str, variables: dict[str, Any] | None) -> tuple[int, str]:
    """Render a template.

    Args:
      variables: values for the template; None to only compile it.

    Returns: the kind of the response, and the text or the reason of the failure.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        compiled = _compiled(template)
    except TemplateSyntaxError as error:
        return UNREADABLE, f"{error}, line {error.lineno}"[-MOST_OF_REASON:]
    except MemoryError:
        raise
    except Exception as error:  # an error in the Python code that Jinja generates
        return UNREADABLE, _described(error)
    if variables is None:
        return TEXT, ""
    try:
        return TEXT, str(compiled.render(**variables))
    except MemoryError:
        raise
    except TemplateError as error:
        return FAILED, str(error)[:MOST_OF_REASON]
    except Exception as error:  # templates may divide by zero, index out of range and so on
        return FAILED, _described(error)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MOST_OF_REASON]


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """Compile a template in the same environment that transformers uses for chat templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """Tag ``{% generation %}``, which marks the assistant's output for training. The tag renders to the text of its
        body."""

        tags = {"generation"}  # noqa: RUF012 - required by Jinja

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> str:
            return str(caller())

    class Dict:
        """``dict`` without the other attributes of a class."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Attributes(Namespace):
        """``namespace`` that refuses names with a leading underscore."""

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
            raise SecurityError(f"a namespace cannot contain {name!r}, because the name begins with an underscore")

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
    sys.path += sys.argv[1:]  # locations of Jinja and its dependencies
    import jinja2.sandbox  # noqa: F401  # before memory is measured

    main()
