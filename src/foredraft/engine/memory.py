"""Plan of the memory for keys and values: which rows fit, and how large their drafts may be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foredraft.config.engine import EngineConfig, available_bytes, share_of, size_text
from foredraft.engine.drafter import DraftCache
from foredraft.engine.row import Row
from foredraft.errors import ConfigError, ContextLengthError
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes

logger = logging.getLogger("foredraft")

STEP = 64
"""Columns by which rows are counted. Drafts and padding of a step lie within the next one."""

PREFIX_DIVISOR = 4
"""Part of a plan that kept prefixes may take on top of it."""


@dataclass(frozen=True)
class MemoryUse:
    """Keys and values of an engine, and the plan for them.

    Args:
      allocated_bytes: of the target and of its drafter, views of constant size included.
      planned_bytes: that may be taken; None without a plan.
      planned_share: of the plan that the rows count as, see `MemoryPlan.fits`; None without a plan.
      prefix_bytes: memory of kept prefixes, the drafter's part included. They come on top,
        up to a quarter of the plan.
    """

    allocated_bytes: int
    planned_bytes: int | None = None
    planned_share: float | None = None
    prefix_bytes: int = 0

    @classmethod
    def of(cls, plan: MemoryPlan | None, lengths: Sequence[int], allocated: int, prefix_bytes: int = 0) -> MemoryUse:
        """As it is now.

        Args:
          lengths: of the rows in the target's cache.
          allocated: bytes of all caches.
        """
        if plan is None:
            return cls(allocated, prefix_bytes=prefix_bytes)
        return cls(allocated, plan.num_bytes, plan.share(lengths), prefix_bytes)


class MemoryPlan:
    """Keeps the cache within a number of bytes: what is counted is what is allocated.

    That is the columns of every row where memory is lazy (`KVCache.is_lazy`), else rows times the longest of them.

    A request comes in when it fits beside those that run. When they have grown too long together, the one that came
    last leaves its slot, waits before all others, and is read again; what it has said so far is replayed.

    Args:
      num_bytes: of keys and values of the target, drafts included, and of drafters' caches that grow with the text.
      target: whose cache it is.
      own_caches: caches of the drafter. Those of constant size, views of `sparse_kv`, are told and come on top.
      is_lazy: see `KVCache.is_lazy`.
      share: text that says which share of free memory ``num_bytes`` is; empty for a number that was given.

    Exactness: what was said is replayed as chains, by the kernels that said it: under a native promise no bit changes.
    Raises: ConfigError for a plan that does not hold one row of any length.
    """

    def __init__(
        self,
        num_bytes: int,
        target: CausalLM,
        own_caches: Sequence[DraftCache] = (),
        share: str = "",
        *,
        is_lazy: bool = False,
    ) -> None:
        self.num_bytes, self._is_lazy = num_bytes, is_lazy
        of_target = bytes_per_token(target)
        of_drafter = sum(own.column_bytes() for own in own_caches if own.most_columns is None)
        self.bytes_per_token = of_target + of_drafter
        self.max_cells = num_bytes // self.bytes_per_token
        if self.max_cells < 2 * STEP:
            raise ConfigError(
                f"max_kv_bytes is {num_bytes}, which holds {self.max_cells} tokens of {target.name} and its drafter "
                f"({of_target} + {of_drafter} bytes each); it must hold {2 * STEP}: give "
                f"{2 * STEP * self.bytes_per_token} or more"
            )
        views = sum(own.column_bytes() * own.most_columns for own in own_caches if own.most_columns is not None)
        on_top = f"; {views / 1e6:.1f} MB a row for views of constant size come on top" if views else ""
        logger.info(
            "keys and values: %s at most%s, which is %d tokens in all rows%s (%d bytes a token of %s and %d of its "
            "drafter)%s; max_kv_bytes sets this limit.",
            size_text(num_bytes),
            f" ({share} of the memory that is free)" if share else "",
            self.max_cells,
            "" if is_lazy else ", each counted as long as the longest",
            of_target,
            target.name,
            of_drafter,
            on_top,
        )

    @classmethod
    def of(
        cls, config: EngineConfig, target: CausalLM, cache: KVCache, own_caches: Sequence[DraftCache]
    ) -> MemoryPlan | None:
        """The plan that a config asks for, if it does, to which an empty cache and those of the drafter are bound."""
        if config.max_kv_bytes is None:
            return None
        given = config.max_kv_bytes
        if isinstance(given, str):
            num_bytes = share_of("max_kv_bytes", given, available_on(target.device))
            plan = cls(num_bytes, target, own_caches, given, is_lazy=cache.is_lazy)
        else:
            plan = cls(given, target, own_caches, is_lazy=cache.is_lazy)
        for each in (cache, *(own.cache for own in own_caches if own.most_columns is None)):
            each.limit(plan.max_cells)
        return plan

    def fits(self, rows: Sequence[Row], room: int = 0) -> bool:
        """Whether these may be in the cache together, each with ``room`` further tokens, as far as it can grow.

        Rows of 100, 30 and 190 tokens count as 192, 128 and 256, in steps of 64 and one for drafts, or as three of 256.
        """
        return self._cells([min(len(row.token_ids) + room, row.max_length) for row in rows]) <= self.max_cells

    def share(self, lengths: Sequence[int]) -> float:
        """Of the plan that rows of these lengths count as."""
        return self._cells(lengths) / self.max_cells

    def max_nodes(self, lengths: Sequence[int]) -> int:
        """Largest number of nodes of a draft so that the cache need not grow beyond the plan.

        Args:
          lengths: columns of all rows of the cache, at least one.
        """
        if self._is_lazy:
            return (self.max_cells - sum(lengths)) // len(lengths)
        return self.max_cells // len(lengths) - max(lengths)

    @property
    def most_tokens(self) -> int:
        """Length of the longest row that fits alone."""
        return (self.max_cells // STEP - 1) * STEP

    def _cells(self, lengths: Sequence[int]) -> int:
        """Columns of rows of these lengths, of all of them together."""
        columns = list(map(self._columns, lengths))
        return sum(columns) if self._is_lazy else len(columns) * max(columns, default=0)

    def _columns(self, length: int) -> int:
        return -(-length // STEP) * STEP + STEP

    def check(self, prompt_length: int, max_length: int) -> None:
        """Raises: ContextLengthError for a request that does not fit even alone."""
        if self._columns(max_length) > self.max_cells:
            needed = self._columns(max_length) * self.bytes_per_token
            raise ContextLengthError(
                f"a request of {prompt_length} tokens that may grow to {max_length} needs {needed} bytes of keys and "
                f"values, and max_kv_bytes is {self.num_bytes}, so it could never run; lower max_tokens, shorten the "
                "prompt, or raise max_kv_bytes"
            )


def bytes_per_token(target: CausalLM) -> int:
    """Memory that the keys and values of one token take in a cache, all layers together; found by a forward."""
    count, cache = target.num_forwards, target.new_cache(1, capacity=1)
    target.forward(Nodes.from_chains([[0]]), cache)
    target.num_forwards = count
    return cache.column_bytes


def available_on(device: torch.device) -> int | None:
    """Memory that can still be allocated there, in bytes; None where the system does not say.

    Of a CUDA device what is free, and what this process has freed and torch holds for what comes next.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_bytes() if device.type == "cpu" else None
