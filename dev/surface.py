"""The public surface as text: names, signatures, methods with their keys, help texts, and fields of HTTP.

    python dev/surface.py > before.txt     # at one commit; then at another, and diff the two

A change that should leave the surface alone leaves this text alone, and one that removes something shows by the diff
what it removes.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator

import click
import typer.main

MODULES = (
    "foredraft",
    "foredraft.drafting",
    "foredraft.testing",
    "foredraft.zoo",
    "foredraft.errors",
    "foredraft.classic",
    "foredraft.classic.sampling",
    "foredraft.classic.ngram_assisted",
    "foredraft.classic.survey",
    "foredraft.classic.utils.logits_processor",
    "foredraft.classic.utils.caching",
    "foredraft.config.sampling",
    "foredraft.config.engine",
    "foredraft.config.speculative",
)


def _signature(value: object) -> str:
    try:
        return str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""


def names(module_name: str) -> Iterator[str]:
    """Public names of a module, with signatures, and the public members of classes."""
    module = importlib.import_module(module_name)
    listed = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name
    ]
    for name in sorted(name for name in listed if not name.startswith("_")):
        value = getattr(module, name)
        yield f"{module_name}.{name}{_signature(value) if callable(value) else ''}"
        if inspect.isclass(value):
            fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
            for member in sorted(fields | {one for one in vars(value) if not one.startswith("_")}):
                part = getattr(value, member, None)
                yield f"{module_name}.{name}.{member}{_signature(part) if inspect.isfunction(part) else ''}"


def methods() -> Iterator[str]:
    """Methods of drafting and their keys with defaults."""
    from foredraft.methods import methods as found

    for name, method in sorted(found().items()):
        options = getattr(method, "options", None)
        keys = dataclasses.fields(options) if options is not None and dataclasses.is_dataclass(options) else ()
        yield f"method {name}: {', '.join(f'{key.name}={key.default!r}' for key in keys)}"


def helps() -> Iterator[str]:
    """Options of every verb with their help texts."""
    from foredraft.cli import app

    def walk(command: click.Command, path: str) -> Iterator[str]:
        for parameter in command.params:
            shown = "/".join([*parameter.opts, *parameter.secondary_opts])
            yield f"{path} {shown} default={parameter.default!r}: {getattr(parameter, 'help', None)}"
        for name in sorted(getattr(command, "commands", {})):
            child = command.get_command(click.Context(command), name)
            yield f"{path} {name}: {child.help}"
            yield from walk(child, f"{path} {name}")

    yield from walk(typer.main.get_command(app), "foredraft")


def routes() -> Iterator[str]:
    """Fields that requests may have, by endpoint."""
    from foredraft.serve import parsed_request, responses

    for module in (parsed_request, responses):
        for name, value in sorted(vars(module).items()):
            if name.isupper() and isinstance(value, (set, frozenset, dict, tuple)):
                listed = sorted(map(str, value))
                yield f"{module.__name__}.{name}: {', '.join(listed)}"


def main() -> None:
    for module in MODULES:
        print(re.sub(r" at 0x[0-9a-f]+", "", "\n".join(names(module))))
    for part in (methods, helps, routes):
        print("\n".join(part()))


if __name__ == "__main__":
    main()
