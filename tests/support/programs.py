"""The command line, or functions, in processes of their own: forks of this one, which need not load torch again.

Real streams, signals, exit codes and terminals; what an interpreter does before its first line has tests elsewhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import get_context
from typing import Any, NoReturn

from foredraft.__main__ import main


def _stream(number: int, encoding: str) -> Any:
    """As the interpreter makes it: None where it is closed."""
    with suppress(OSError):
        os.fstat(number)
        name, _, errors = encoding.partition(":")
        errors = "backslashreplace" if number == 2 else errors or "strict"
        return open(number, "r" if number == 0 else "w", 1 if number == 2 else -1, name, errors, closefd=False)
    return None


def become(arguments: list[str], env: Mapping[str, str] | None = None) -> NoReturn:
    """Be ``python -m foredraft`` with these arguments, in a child."""
    os.closerange(3, 4096)  # the parent of a `Popen` waits for one of them
    os.environ.update(env or {})
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, os.environ.get("PYTHONIOENCODING", "utf-8") if number < 2 else "utf-8")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    for each in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)  # a suite under nohup hands on that it is ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    sys.argv = ["foredraft", *arguments]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code)


def started(
    arguments: list[str], *, closed: int | None = None, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """The command with options of `subprocess.Popen`.

    Args:
      closed: the standard stream that it does not have.
    """

    def child() -> NoReturn:
        try:
            if closed is not None:
                os.close(closed)
            become(arguments, env)
        finally:
            os._exit(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: threads of this process are not in a fork
        return subprocess.Popen(["foredraft", *arguments], preexec_fn=child, restore_signals=False, **options)


def ran(arguments: list[str], *, input: Any = None, **options: Any) -> subprocess.CompletedProcess[Any]:
    """The command, once it has ended; what it wrote is captured unless it goes elsewhere."""
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with started(arguments, **given) as process:
        output, errors = process.communicate(input, timeout=300)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def forked(*functions: Callable[[], Any]) -> list[Any]:
    """What functions return, each in a process of its own, all at the same time; none may take longer than minutes."""
    context = get_context("fork")
    processes, ends = [], []
    for function in functions:
        end, other = context.Pipe(duplex=False)
        process = context.Process(target=lambda function=function, other=other: other.send(function()), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        other.close()
        processes.append(process)
        ends.append(end)
    try:
        assert all(end.poll(300) for end in ends), "a process hangs"
        found = [end.recv() for end in ends]  # EOFError where one has failed, which has said why
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * len(processes)
        return found
    finally:
        for process in processes:
            process.kill()
