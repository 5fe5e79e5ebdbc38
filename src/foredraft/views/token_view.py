"""The token view: who has proposed a token, what was rejected beside it, and the pages that show this to people."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from foredraft.engine.frontend import TARGET, StreamOutput
from foredraft.tree import DraftTree

MAX_BRANCHES = 8
"""Rejected branches that are told of a step, the likeliest by the drafter's order first."""
TOKENS = {"/* tokens.css */": "tokens.css", "// tokens.js": "tokens.js"}
"""Placeholders of pages, and the files of this package that replace them."""


def tell_drafts(tokenizer: Any, delta: StreamOutput, part: slice) -> dict[str, Any]:
    """The source of each of some tokens of a step, and the branches that were rejected where the draft was left.

    Args:
      tokenizer: makes texts of branches; None leaves them empty.
      part: tokens of the step.
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
    """Branches that leave the path, each from where it does."""
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
    """Nodes of the accepted tokens, the root first."""
    path = [0]
    for token in tokens:
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    return path


def page(room: str, name: str) -> str:
    """A page of the package's ``room``, the token view inside it wherever it asks for it."""
    text = files(room).joinpath(name).read_text(encoding="utf-8")
    for place, part in TOKENS.items():
        text = text.replace(place, files("foredraft.views").joinpath(part).read_text(encoding="utf-8"))
    return text
