"""How deep a draft may be where its nodes are limited."""

from __future__ import annotations

from foretoken.errors import ConfigError


def depth_within(length: int, max_nodes: int | None, num_branches: int) -> int:
    """Draft length within the node limit: a level of a tree has as many nodes as there are branches.

    10 nodes, root included, hold 4 levels of 2 branches.

    Raises: ConfigError where there is no room for one level.
    """
    if max_nodes is None:
        return length
    depth = (max_nodes - 1) // num_branches
    if depth == 0:
        raise ConfigError(
            f"max_draft_nodes={max_nodes} leaves no room for one level of num_draft_branches={num_branches}; raise the "
            f"first to {num_branches + 1} or more"
        )
    return min(length, depth)
