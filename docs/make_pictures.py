"""Draws the pictures of docs/how_it_works.md and docs/architecture.md: python docs/make_pictures.py."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

STYLE = (
    "text{font:13px ui-sans-serif,system-ui,sans-serif;fill:#222}.code{font-family:ui-monospace,monospace}"
    ".small{font-size:11px;fill:#555}.strong{font-weight:600}.box{fill:#eef3fa;stroke:#4a6fa5}"
    ".hit{fill:#bfe3bf;stroke:#3a7d3a}.miss{fill:#f2f2f2;stroke:#aaa}.kept{fill:#dbe6f5;stroke:#4a6fa5}"
    ".free{fill:#fff;stroke:#ccc;stroke-dasharray:3 3}.pending{fill:#fbe6b8;stroke:#b8860b}"
    "path{fill:none;stroke:#555;stroke-width:1.4}.on{stroke:#3a7d3a;stroke-width:2}.off{stroke:#bbb}"
)
HEAD = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" style="fill:#555;stroke:none"/></marker></defs>'
)


def box(x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 5) -> str:
    """A rectangle of one of the kinds in `STYLE`."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" class="{kind}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def arrow(data: str) -> str:
    """A line with a head at its end, as the data of an SVG path."""
    return f'<path d="{data}" marker-end="url(#arrow)"/>'


def picture(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    """A whole SVG file on a white ground."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img"><title>{escape(title)}</title><style>{STYLE}</style>{HEAD}'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


def loop() -> str:
    """The four verbs of a step, and what goes from one to the next."""
    verbs = [
        ("draft", "the drafter", "proposes tokens"),
        ("verify", "one forward pass", "of the target"),
        ("accept", "compare with the", "target's choices"),
        ("commit", "keep accepted", "tokens in the cache"),
    ]
    between = ["draft tree", "distributions", "accepted + bonus"]
    shapes = []
    for place, (verb, first, second) in enumerate(verbs):
        x = 16 + place * 182
        shapes += [box(x, 40, 128, 74), text(x + 64, 62, verb, "strong")]
        shapes += [text(x + 64, 82, first, "small"), text(x + 64, 98, second, "small")]
    for place, words in enumerate(between):
        x = 144 + place * 182
        shapes += [arrow(f"M{x} 77H{x + 52}"), text(x + 27, 30, words, "small")]
    shapes += [arrow("M626 116V150H80V118"), text(353, 168, "until the end of the text, or the token limit", "small")]
    return picture(706, 182, "The loop of speculative decoding", shapes)


NODES = (("\\n", -1), ('"', 0), (":", 0), ("age", 1), ("name", 1), ("=", 3))
ACCEPTED = (0, 1, 3)
PLACES = ((16, 66), (96, 40), (96, 104), (176, 20), (176, 66), (256, 20))


def kind_of(node: int) -> str:
    """The kind of box of a node."""
    return "pending" if node == 0 else "hit" if node in ACCEPTED else "miss"


def tree() -> str:
    """A draft tree, its nodes as a list, and the mask."""
    shapes = []
    for node, (_, parent) in enumerate(NODES):
        if parent >= 0:
            (x0, y0), (x1, y1) = PLACES[parent], PLACES[node]
            kind = "on" if node in ACCEPTED else "off"
            curve = f"M{x0 + 52} {y0 + 14}C{x0 + 66} {y0 + 14} {x1 - 14} {y1 + 14} {x1} {y1 + 14}"
            shapes.append(f'<path d="{curve}" class="{kind}"/>')
    for node, (word, _) in enumerate(NODES):
        x, y = PLACES[node]
        shapes += [box(x, y, 52, 28, kind_of(node)), text(x + 26, y + 19, word, "code")]
        shapes.append(text(x + 26, y + 41, f"node {node}", "small"))
    shapes.append(text(16, 170, "The tree. Node 0 is pending; green nodes are accepted.", "small", "start"))
    left, top, size = 452, 34, 20
    shapes.append(text(left - 8, 18, "attends to", "small", "end"))
    shapes += [box(left, top - 22, 66, 18, "kept", 2), text(left + 33, top - 9, "the text", "small")]
    for column in range(len(NODES)):
        x = left + 70 + column * size
        shapes.append(text(x + size / 2, top - 9, str(column), "small"))
    for row in range(len(NODES)):
        y = top + row * size
        shapes.append(text(left - 8, y + 14, f"{row}  {NODES[row][0]}", "code", "end"))
        shapes.append(box(left, y, 66, size - 2, "kept", 2))
        seen, node = set[int](), row
        while node >= 0:
            seen.add(node)
            node = NODES[node][1]
        for column in range(len(NODES)):
            kind = kind_of(row) if column in seen else "free"
            shapes.append(box(left + 70 + column * size, y, size - 2, size - 2, kind, 2))
    shapes.append(text(left - 62, 170, "The mask: a node sees the text, its ancestors and itself.", "small", "start"))
    return picture(730, 184, "A draft tree and its attention mask", shapes)


def cache() -> str:
    """The columns of one row before, within and after a step."""
    committed = ["{", "\\n", '"', "name", "..."]
    lines = [
        ("before the step", [(word, "kept") for word in committed], "the pending token is not in the cache"),
        (
            "after verify",
            [(word, "kept") for word in committed] + [(word, kind_of(node)) for node, (word, _) in enumerate(NODES)],
            "all nodes were written",
        ),
        (
            "after commit",
            [(word, "kept") for word in committed]
            + [(NODES[node][0], "kept") for node in ACCEPTED]
            + [("", "free")] * 3,
            "accepted nodes moved together; the rest is free",
        ),
    ]
    shapes = []
    for line, (title, cells, words) in enumerate(lines):
        y = 16 + line * 58
        shapes.append(text(112, y + 18, title, "strong", "end"))
        for place, (word, kind) in enumerate(cells):
            x = 124 + place * 50
            shapes += [box(x, y, 46, 26, kind, 3), text(x + 23, y + 18, word, "code")]
        shapes.append(text(124, y + 42, words, "small", "start"))
    x = 124 + 8 * 50 - 2
    shapes += [arrow(f"M{x} 196V162"), text(x, 210, "length of the row: a rollback only changes this number", "small")]
    return picture(700, 220, "The cache of one row", shapes)


def program() -> str:
    """The parts of the program, from interfaces to kernels."""
    rows = [
        ("interfaces", ["llm.py", "hf/", "cli/", "serve/", "classic/"]),
        ("requests", ["engine/frontend.py", "engine/scheduler.py", "engine/row.py"]),
        ("the loop", ["engine/engine.py", "engine/governor.py", "engine/drafts.py", "accept.py"]),
        ("drafters", ["lookup/", "lm/", "heads/", "selfdraft/", "iterate/"]),
        ("the model", ["model/lm.py", "model/cache/", "sampling/"]),
        ("kernels", ["model/execution/", "native/"]),
    ]
    shapes = []
    for line, (title, names) in enumerate(rows):
        y = 14 + line * 56
        shapes.append(text(84, y + 22, title, "strong", "end"))
        width = (590 - 8 * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            x = 98 + place * (width + 8)
            shapes += [
                box(round(x, 1), y, round(width, 1), 36),
                text(round(x + width / 2, 1), y + 22, name, "small code"),
            ]
        if line + 1 < len(rows):
            shapes.append(arrow(f"M393 {y + 38}V{y + 54}"))
    return picture(704, 14 + 56 * len(rows), "The parts of foredraft", shapes)


def main() -> None:
    """Write the pictures beside this file."""
    folder = Path(__file__).parent
    for name, drawing in (("how_loop", loop), ("how_tree", tree), ("how_cache", cache), ("architecture", program)):
        (folder / f"{name}.svg").write_text(drawing(), encoding="utf-8")


if __name__ == "__main__":
    main()
