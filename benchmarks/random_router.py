"""A router that chooses among replicas by lot: what routing by beginnings is held against in `cluster.py chats`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.serve.ray.router import PrefixRouter


class Lot:
    """Stands for `Affinity`, and remembers nothing."""

    def choose(self, ids: Sequence[int], session: str, loads: Mapping[str, int]) -> str:
        return random.choice(list(loads))

    def note(self, ids: Sequence[int], session: str, replica: str) -> None: ...


class RandomRouter(PrefixRouter):
    """Sends each request to any replica."""

    def initialize_state(self, **options: Any) -> None:
        """Called by Ray Serve."""
        self._affinity = Lot()
