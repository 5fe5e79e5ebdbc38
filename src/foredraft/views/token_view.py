"""Token view: the source of each token and the rejected branches beside it, and assembly of the HTML pages that show
them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from foredraft.engine.frontend import TARGET, StreamOutput
from foredraft.tree import DraftTree

MAX_BRANCHES = 8
"""Maximum number of rejected branches shown per step, in the drafter's order (most likely first)."""
TOKENS = {"/* tokens.css */": "tokens.css", "// tokens.js": "tokens.js", "// markdown.js": "markdown.js"}
"""Placeholders in pages, and the files of this package that replace them."""


def tell_drafts(tokenizer: Any, delta: StreamOutput, part: slice) -> dict[str, Any]:
    """Return the source of each token in a part of a step, and the branches that were rejected where the draft ended.

    Args:
      tokenizer: tokenizer that decodes the branches; None leaves their text empty.
      delta: output of a step.
      part: slice of the step's tokens.
    """
    tree = delta.tree
    path = _path(tree, delta.token_ids[: delta.num_accepted]) if tree is not None else [0]
    sources = []
    for place in range(part.start, part.stop):
        is_drafted = tree is not None and place < delta.num_accepted and place + 1 < len(path)
        sources.append(tree.source_of(path[place + 1]) if tree is not None and is_drafted else TARGET)
    has_bonus = part.stop > delta.num_accepted
    rejected = _rejected(tokenizer, tree, path) if tree is not None and has_bonus else []
    return {"sources": sources, "rejected": rejected}


def _rejected(tokenizer: Any, tree: DraftTree, path: list[int]) -> list[dict[str, Any]]:
    """Branches that leave the accepted path, each from the node where it leaves it."""
    kept = set(path)
    parents = set(tree.parents)
    found = []
    for leaf in range(1, len(tree)):
        if leaf in parents or leaf in kept:
            continue
        branch = []
        node = leaf
        while node not in kept:
            branch.append(node)
            node = tree.parents[node]
        tokens = [tree.tokens[each] for each in reversed(branch)]
        text = "" if tokenizer is None else tokenizer.decode(tokens)
        found.append({"after": path.index(node), "text": text, "token_ids": tokens, "source": tree.source_of(leaf)})
    return found[:MAX_BRANCHES]


def _path(tree: DraftTree, tokens: Iterable[int]) -> list[int]:
    """Nodes of the accepted tokens, beginning with the root."""
    path = [0]
    for token in tokens:
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    return path


def page(package: str, name: str) -> str:
    """Return an HTML page of a package, with the token view and the Markdown renderer inserted at their placeholders.

    Args:
      package: package that contains the page.
      name: file name of the page.
    """
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    for place, part in TOKENS.items():
        text = text.replace(place, files("foredraft.views").joinpath(part).read_text(encoding="utf-8"))
    return text
