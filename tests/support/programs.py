"""The command line, in this process over streams of its own, or in a fork of it, which need not load torch again."""

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
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from foredraft.__main__ import main
from foredraft.ending import ENDING

STREAMS = ("stdin", "stdout", "stderr")


def _stream(number: int, encoding: str, descriptor: int | None = None) -> Any:
    """As the interpreter makes it: None where it is closed."""
    with suppress(OSError):
        os.fstat(number if descriptor is None else descriptor)
        name, _, errors = encoding.partition(":")
        errors = "backslashreplace" if number == 2 else errors or "strict"
        file, mode = (number if descriptor is None else descriptor), "r" if number == 0 else "w"
        return open(file, mode, 1 if number == 2 else -1, name, errors, closefd=False)
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


def started(arguments: list[str], *, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
    """The command in a fork, with options of `subprocess.Popen`."""

    def child() -> NoReturn:
        try:
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


def called(
    arguments: list[str],
    *,
    stdin: bytes = b"",
    stdout: int | None = None,
    stderr: int | None = None,
    closed: int | None = None,
    encoding: str = "utf-8",
    is_unbuffered: bool = False,
) -> subprocess.CompletedProcess[str]:
    """The command in this process, with standard streams as the interpreter makes them.

    Args:
      stdout, stderr: descriptors to write to; by default what is written is captured.
      closed: the standard stream that it does not have.
      encoding: of standard input and output, as in PYTHONIOENCODING.
    """
    names = [*STREAMS, *map("__{}__".format, STREAMS)]
    before = {name: getattr(sys, name) for name in ("argv", "unraisablehook", *names)}
    handlers = {number: signal.getsignal(number) for number in ENDING}
    with TemporaryFile() as read, TemporaryFile() as out, TemporaryFile() as errors:
        read.write(stdin)
        read.seek(0)
        places = [
            read.fileno(),
            out.fileno() if stdout is None else stdout,
            errors.fileno() if stderr is None else stderr,
        ]
        try:
            for number, place in enumerate(places):
                stream = None if number == closed else _stream(number, encoding if number < 2 else "utf-8", place)
                if is_unbuffered and number == 1:
                    stream.reconfigure(write_through=True)
                setattr(sys, STREAMS[number], stream)
                setattr(sys, f"__{STREAMS[number]}__", stream)
            sys.argv = ["foredraft", *arguments]
            try:
                main()
                code: Any = 0
            except SystemExit as end:
                code = end.code or 0
        finally:
            for stream in filter(None, [getattr(sys, name) for name in names]):
                with suppress(OSError, ValueError):
                    stream.close()
            for name, value in before.items():
                setattr(sys, name, value)
            for each, handler in handlers.items():
                signal.signal(each, handler)
        out.seek(0)
        errors.seek(0)
        written = out.read().decode(encoding.partition(":")[0]), errors.read().decode()
    return subprocess.CompletedProcess(arguments, code, *written)


def printed(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """What any program prints, which has to succeed."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
