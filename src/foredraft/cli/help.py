"""Help of the verbs: options in panels, examples, and rare options behind ``--help-all``."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

BASICS, DRAFTING, SAMPLING = "Basics", "Drafting", "Sampling"
OUTPUT, LOADING, LIMITS = "Output format", "Loading", "Limits"
PANELS = (BASICS, DRAFTING, SAMPLING, OUTPUT, LOADING, LIMITS)
"""Panels of options in the order of the help; options without one are basics."""

HELP_ALL = "--help-all"
WIDEST = 100
"""Limit on columns of the help."""
_NAMES = 31
"""Width of the column of option names. The explanation of a longer name begins on the next line."""

Entry = tuple[str, str]
"""Name and explanation of an option, an argument or a verb."""


class _Help:
    """Mix-in of commands: their help in plain text, and ``--help-all``."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without rare options."""
        formatter.write(rendered(ctx, is_whole=False))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the whole help for ``--help-all``."""
        self.show_whole(ctx, args)
        return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]

    def show_whole(self, ctx: Any, args: list[str]) -> None:
        """Show the whole help and exit if the arguments contain ``--help-all``."""
        verbs: Any = getattr(ctx.command, "commands", ())
        ends = bool(verbs) and not ctx.command.invoke_without_command  # at the first word, which may be no verb
        own = takewhile(
            lambda argument: argument != "--" and argument not in verbs and not (ends and argument[:1] != "-"), args
        )
        if HELP_ALL in own:
            typer.echo(rendered(ctx, is_whole=True), color=ctx.color)
            ctx.exit()


class HelpCommand(_Help, TyperCommand):
    """A verb with help in panels."""


class HelpGroup(_Help, TyperGroup):
    """Verbs with help in panels."""


def rendered(ctx: Any, *, is_whole: bool) -> str:
    """Help of a command as text.

    Args:
      is_whole: include rare options.
    """
    command = ctx.command
    params = [one for one in command.get_params(ctx) if "--help" not in one.opts]
    shown = [one for one in params if is_whole or not getattr(one, "hidden", False)]
    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = [f"{_bold('Usage:')} {ctx.command_path} {' '.join(_usage(command, params))}", ""]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width, break_on_hyphens=False), ""]
    panels = [*_options(shown), *_verbs(ctx)]
    lengths = [len(name) + 4 for _, entries in panels for name, _ in entries]
    column = max([length for length in lengths if length <= _NAMES], default=_NAMES)
    for title, entries in panels:
        lines += [_bold(f"{title}:"), *_listed(entries, column, width), ""]
    if command.epilog:
        lines += [_bold("Examples:"), *textwrap.indent(command.epilog, "  ").splitlines(), ""]
    num_rare = len(params) - len(shown)
    if num_rare:
        lines += [f"{HELP_ALL} lists every option ({num_rare} more)."]
    return "\n".join(lines).rstrip() + "\n"


def _usage(command: Any, params: Sequence[Any]) -> Iterator[str]:
    yield "[OPTIONS]"
    yield from (_argument(one) for one in params if one.param_type_name == "argument")
    if getattr(command, "commands", None) is not None:
        yield "COMMAND" if not command.invoke_without_command else "[COMMAND]"


def _options(params: Sequence[Any]) -> Iterator[tuple[str, list[Entry]]]:
    """Panels with their options, in the order of `PANELS`; none is empty."""
    panels: dict[str, list[Entry]] = {title: [] for title in PANELS}
    for one in params:
        panels.setdefault(one.rich_help_panel or BASICS, []).append((_name(one), _explanation(one)))
    filled = {title: entries for title, entries in panels.items() if entries}
    if len(filled) == 1:
        filled = {"Options": next(iter(filled.values()))}
    yield from filled.items()


def _verbs(ctx: Any) -> Iterator[tuple[str, list[Entry]]]:
    """Groups of verbs below a command."""
    panels: dict[str, list[Entry]] = {}
    for name in getattr(ctx.command, "commands", ()):
        verb = ctx.command.get_command(ctx, name)
        first = re.split(r"(?<=[.:]) |\n", inspect.cleandoc(verb.help or ""))[0].rstrip(":")
        panels.setdefault(verb.rich_help_panel or "Commands", []).append((name, first))
    yield from panels.items()


def _argument(one: Any) -> str:
    name = str(one.metavar or one.name.upper())
    return name if one.required or name.startswith("[") else f"[{name}]"


def _name(one: Any) -> str:
    """``-m, --model MODEL``."""
    if one.param_type_name == "argument":
        return _argument(one)
    names = sorted(one.opts, key=len)[:1] + [name for name in one.opts if name != min(one.opts, key=len)][:1]
    switched = " / ".join([", ".join(names), *one.secondary_opts])
    return switched if one.is_flag else f"{switched} {one.metavar or 'VALUE'}"


def _explanation(one: Any) -> str:
    default = None if one.required or one.param_type_name == "argument" else one.default
    is_told = one.show_default is not False and isinstance(default, (str, int, float)) and not isinstance(default, bool)
    text = str(one.help or "")
    if is_told and default != "":
        text = f"{text} [default: {default}]"
    return f"{text} [required]" if one.required and one.param_type_name != "argument" else text


def _listed(entries: Iterable[Entry], column: int, width: int) -> Iterator[str]:
    """Lines in two columns: names, and explanations from ``column`` on."""
    for name, text in entries:
        wrapped = textwrap.wrap(text, width - column, break_on_hyphens=False) or [""]
        if len(name) + 4 > column:
            yield f"  {name}"
        else:
            yield f"  {name}".ljust(column) + wrapped.pop(0)
        yield from (" " * column + line for line in wrapped)


def _bold(text: str) -> str:
    return typer.style(text, bold=True)


def split_docstring(text: str) -> tuple[str | None, str | None]:
    """Description and examples of a verb, from its docstring. Lines of a paragraph are joined; lines of examples are
    kept."""
    about, _, examples = text.partition("\n\nExamples:\n")
    flowing = re.sub(r"(?<!\n)\n(?!\n)", " ", about)
    return flowing or None, textwrap.dedent(examples).rstrip() or None
