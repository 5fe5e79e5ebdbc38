"""A trajectory as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from foretoken.engine.budget import CAUSES, counted

if TYPE_CHECKING:
    from foretoken.views.trajectory import Block, Trajectory


_CERTAIN, _EARLY, _WRONG, _CUT = "certain", "early", "wrong", "cut"
_NUMBER = 4  # columns of the iteration
_MARK = {_CERTAIN: "=", _EARLY: "+", _WRONG: " ", _CUT: "-"}
_LEGEND = {
    _CERTAIN: "right, and nothing wrong before it",
    _EARLY: "right already, after something wrong",
    _WRONG: "not right yet",
    _CUT: "cut off: not verified in this iteration",
}

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 0 0 1.5em }
td, th { padding: 2px 6px; font: 12px/1.5 ui-monospace, monospace; white-space: pre; border: 1px solid #fff }
th { text-align: right; font-weight: normal; color: #666 }
.certain { background: #cfe8cf } .early { background: #cfe0f5 } .wrong { background: #f0f0f0; color: #777 }
.cut { color: #aaa }
"""


def text(trajectory: Trajectory, width: int | None = None) -> str:
    """A table per block: a line per iteration, = for certain tokens, + for those that are right early.

    Args:
      width: wider tables are cut into parts of fewer positions, one below the other.
    """
    lines = [summary(trajectory), *(f"  {_MARK[state]!r} {words}" for state, words in _legend(trajectory).items())]
    for number, block in enumerate(trajectory.blocks):
        words = [[_MARK[state] + word for word, state in row] for row in _rows(trajectory, block)]
        widths = [max(map(len, column)) for column in zip(*words, strict=True)]
        lines += ["", title(number, block)]
        for start, end in _parts(widths, width):
            if end - start < len(widths):
                lines.append(f"     positions {block.start + start} to {block.start + end - 1}")
            for iteration, row in enumerate(words):
                cells = " ".join(word.ljust(size) for word, size in zip(row[start:end], widths[start:end], strict=True))
                lines.append(f"{iteration:>4} {cells}".rstrip())
    return "\n".join(lines) + "\n"


def _parts(widths: list[int], limit: int | None) -> Iterator[tuple[int, int]]:
    """Ranges of columns that fit: [5, 5, 5] in 17 columns, 4 of them for the iteration: (0, 2), (2, 3)."""
    start, used = 0, _NUMBER
    for place, size in enumerate(widths):
        if limit is not None and place > start and used + 1 + size > limit:
            yield start, place
            start, used = place, _NUMBER
        used += 1 + size
    yield start, len(widths)


def html(trajectory: Trajectory) -> str:
    """The same as a page; no other file is needed to look at it."""
    legend = " ".join(
        f'<span class="{state}">&nbsp;{escape(words)}&nbsp;</span>' for state, words in _legend(trajectory).items()
    )
    tables = "".join(
        f"<h3>{escape(title(number, block))}</h3><table>{''.join(_html_rows(trajectory, block))}</table>"
        for number, block in enumerate(trajectory.blocks)
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Jacobi trajectory</title>'
        f"<style>{_STYLE}</style></head><body><h2>Jacobi trajectory</h2><p>{escape(summary(trajectory))}</p>"
        f"<p>{legend}</p>{tables}</body></html>\n"
    )


def _legend(trajectory: Trajectory) -> dict[str, str]:
    """The states that its tables show."""
    has_cuts = any(block.cuts for block in trajectory.blocks)
    return {state: words for state, words in _LEGEND.items() if has_cuts or state != _CUT}


def summary(trajectory: Trajectory) -> str:
    """One line on the whole."""
    return (
        f"{len(trajectory.token_ids)} tokens in {trajectory.num_iterations} iterations "
        f"({trajectory.tokens_per_iteration:.2f} each), {trajectory.num_right_early} positions right early"
    )


def title(number: int, block: Block) -> str:
    """One line on a block, and on what was cut off it."""
    last = block.start + len(block) - 1
    said = (
        f"block {number}, positions {block.start} to {last}: {block.num_iterations} iterations for {len(block)} tokens"
    )
    cut = [f"{counted(count, 'guess')} cut off by {CAUSES[cause]}" for cause, count in sorted(block.cuts.items())]
    return "; ".join([said, *cut])


def _html_rows(trajectory: Trajectory, block: Block) -> Iterator[str]:
    for iteration, row in enumerate(_rows(trajectory, block)):
        cells = "".join(f'<td class="{state}">{escape(word)}</td>' for word, state in row)
        yield f"<tr><th>{iteration}</th>{cells}</tr>"


def _rows(trajectory: Trajectory, block: Block) -> Iterator[list[tuple[str, str]]]:
    """Words and their states, of the initial guess and of every iterate."""
    reaches = (len(block), *(block.verified or [len(block)] * block.num_iterations))
    for iterate, reach in zip((block.initial, *block.iterates), reaches, strict=True):
        right = [token == wanted for token, wanted in zip(iterate, block.fixed_point, strict=True)]
        num_certain = right.index(False) if False in right else len(right)
        yield [
            (word(trajectory, token), _state(place, num_certain, right[place], reach))
            for place, token in enumerate(iterate)
        ]


def _state(place: int, num_certain: int, is_right: bool, reach: int) -> str:
    if place < num_certain:
        return _CERTAIN
    if place >= reach:
        return _CUT
    return _EARLY if is_right else _WRONG


def word(trajectory: Trajectory, token: int) -> str:
    """A token as it looks in its text, control characters escaped; its id where there is no tokenizer."""
    if trajectory.tokenizer is None:
        return str(token)
    decoded = str(trajectory.tokenizer.decode([token], skip_special_tokens=False))
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in decoded) or "''"
