"""Draws the draft trees of the method pages: docs/methods/NAME.svg, from a step of the shipped model.

    python docs/make_trees.py NAME [--config '{"method": ...}'] [--prompt TEXT] [--max-new-tokens 48]

Every method works, since every draft is a `DraftTree`; `tree_svg` draws any of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from html import escape
from pathlib import Path

from foredraft import LLM, SamplingParams
from foredraft.engine.drafter import StepResult
from foredraft.engine.row import Row
from foredraft.tree import DraftTree

ROW_HEIGHT, LETTER, GAP, MARGIN = 18, 6.6, 26, 8


def tree_svg(tree: DraftTree, words: Sequence[str], path: Sequence[int] = (0,)) -> str:
    """A drawing of any draft, the root to the left, one line per leaf, accepted nodes filled.

    Args:
      words: what stands in every node.
      path: accepted nodes, root first.
    """
    rows = _rows(tree)
    widths = [len(word) * LETTER + 10 for word in words]
    columns = [
        max(w for w, d in zip(widths, tree.depths, strict=True) if d == depth) for depth in range(tree.depth + 1)
    ]
    lefts = [MARGIN + sum(columns[:depth]) + GAP * depth for depth in range(tree.depth + 1)]
    accepted, shapes = set(path), []
    for node in range(len(tree)):
        x, y = lefts[tree.depths[node]], MARGIN + rows[node] * ROW_HEIGHT
        parent = tree.parents[node]
        if parent >= 0:
            start, top = lefts[tree.depths[parent]] + widths[parent], MARGIN + rows[parent] * ROW_HEIGHT
            middle = (start + x) / 2
            shapes.append(
                f'<path d="M{start:.0f} {top + 7:.0f}C{middle:.0f} {top + 7:.0f} {middle:.0f} {y + 7:.0f} {x:.0f} '
                f'{y + 7:.0f}" class="{"on" if node in accepted else "off"}"/>'
            )
        shapes.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{widths[node]:.0f}" height="14" rx="4" '
            f'class="{"hit" if node in accepted else "miss"}"/>'
            f'<text x="{x + 5:.0f}" y="{y + 10.5:.1f}">{escape(words[node])}</text>'
        )
    width, height = lefts[-1] + columns[-1] + MARGIN, 2 * MARGIN + (max(rows) + 1) * ROW_HEIGHT
    style = (
        "text{font:11px ui-monospace,monospace;fill:#222}.hit{fill:#bfe3bf;stroke:#3a7d3a}.miss{fill:#f2f2f2;"
        "stroke:#aaa}path{fill:none}.on{stroke:#3a7d3a;stroke-width:1.5}.off{stroke:#bbb}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


def _rows(tree: DraftTree) -> list[int]:
    """The line of every node: a first child beside its parent, every other one below all before it."""
    rows, free = [0] * len(tree), 0
    stack = [(0, True)]
    while stack:
        node, is_first = stack.pop()
        if not is_first:
            free += 1
        rows[node] = free
        stack += [(child, child == tree.children[node][0]) for child in reversed(tree.children[node])]
    return rows


def best_step(llm: LLM, prompt: str, max_new_tokens: int) -> StepResult:
    """The step of a greedy answer in which most drafted tokens were accepted; of those the one with most nodes."""
    drafter, results = llm.drafting.new_drafter(), list[StepResult]()
    observe = drafter.observe

    def watched(rows: Sequence[Row], found: Sequence[StepResult]) -> None:
        results.extend(found)
        observe(rows, found)

    drafter.observe = watched  # type: ignore[method-assign]
    with llm.engine(drafter) as engine:
        asked = llm.chat_prompt([{"role": "user", "content": prompt}])["prompt_token_ids"]
        engine.add_request(asked, SamplingParams(temperature=0.0, max_tokens=max_new_tokens))
        for _ in engine.run():
            pass
    return max(results, key=lambda result: (result.num_accepted, len(result.tree)))


def drawing(llm: LLM, result: StepResult) -> str:
    """The draft of a step, with the text of its tokens."""
    assert llm.tokenizer is not None
    words = [repr(llm.tokenizer.decode([token]))[1:-1].replace(" ", "\u00b7") for token in result.tree.tokens]
    return tree_svg(result.tree, words, result.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--config", help="by default the method of that name")
    parser.add_argument("--prompt", default="How do I use the command tar?")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args()
    llm = LLM("zoo:tiny", options.config or options.name)
    best = best_step(llm, options.prompt, options.max_new_tokens)
    page = Path(__file__).with_name("methods") / f"{options.name}.svg"
    page.write_text(drawing(llm, best), encoding="utf-8")


if __name__ == "__main__":
    main()
