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
"""Granularity in columns at which rows are counted. Drafts and padding of a step fit within one such unit."""

PREFIX_DIVISOR = 4
"""Divisor of the plan that limits the memory of cached prefixes. The memory of prefixes is added to the plan."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the keys and values of an engine, and its planned limit.

    Args:
      allocated_bytes: memory of the target's and the drafter's caches, including views of constant size.
      planned_bytes: limit of the plan; None without a plan.
      planned_share: share of the plan that the rows occupy, see `MemoryPlan.fits`; None without a plan.
      prefix_bytes: memory of cached prefixes, including the drafter's part. Cached prefixes are added to the plan, up
        to a quarter of it.
    """

    allocated_bytes: int
    planned_bytes: int | None = None
    planned_share: float | None = None
    prefix_bytes: int = 0

    @classmethod
    def of(cls, plan: MemoryPlan | None, lengths: Sequence[int], allocated: int, prefix_bytes: int = 0) -> MemoryUse:
        """Compute the current use.

        Args:
          lengths: lengths of the rows in the target's cache.
          allocated: bytes of all caches.
        """
        if plan is None:
            return cls(allocated, prefix_bytes=prefix_bytes)
        return cls(allocated, plan.num_bytes, plan.share(lengths), prefix_bytes)


class MemoryPlan:
    """Limits the caches to a number of bytes. Memory is counted as it is allocated.

    A lazy cache (`KVCache.is_lazy`) allocates the columns of every row. Other caches allocate the longest row times the
    number of rows.

    A request is admitted when it fits beside the running rows. If the running rows have grown too long together, the
    newest row gives up its slot and waits before all others. The prompt of that row is then read again, and its output
    is replayed.

    Args:
      num_bytes: limit for keys and values of the target, drafts included, and for those caches of drafters that grow
        with the row.
      target: owner of the cache.
      own_caches: caches of the drafter. Caches of constant size, such as views of `sparse_kv`, are logged and added to
        the plan.
      is_lazy: see `KVCache.is_lazy`.
      share: description of the share of free memory that ``num_bytes`` is; empty if bytes were given.

    Exactness: output is replayed as chains, by the same kernels that generated it. Under bitwise exactness no bit
    changes.
    Raises: ConfigError for a limit that is too small for a single row.
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
                f"max_kv_bytes is {num_bytes}, enough for {self.max_cells} tokens of {target.name} and its drafter "
                f"({of_target} + {of_drafter} bytes each), but {2 * STEP} are needed; raise max_kv_bytes "
                f"(--max-kv-bytes) to at least {2 * STEP * self.bytes_per_token}"
            )
        views = sum(own.column_bytes() * own.most_columns for own in own_caches if own.most_columns is not None)
        on_top = f"; views of constant size add {views / 1e6:.1f} MB per row" if views else ""
        logger.info(
            "keys and values: at most %s%s, which is %d tokens in all rows%s (per token, %d bytes for %s and %d for "
            "its drafter)%s; max_kv_bytes (--max-kv-bytes) sets this limit.",
            size_text(num_bytes),
            f" ({share} of the free memory)" if share else "",
            self.max_cells,
            "" if is_lazy else ", each row counted with the length of the longest",
            of_target,
            target.name,
            of_drafter,
            on_top,
        )

    @classmethod
    def of(
        cls, config: EngineConfig, target: CausalLM, cache: KVCache, own_caches: Sequence[DraftCache]
    ) -> MemoryPlan | None:
        """Make the plan that a config requests, if any, and set the limits of the target's and the drafter's caches."""
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
        """Return whether rows fit into the cache together, each with ``room`` more tokens up to its maximum length.

        Rows of 100, 30 and 190 tokens count as 192, 128 and 256 columns: multiples of 64, and 64 more for drafts. In a
        cache that is not lazy they count as three rows of 256.
        """
        return self._cells([min(len(row.token_ids) + room, row.max_length) for row in rows]) <= self.max_cells

    def share(self, lengths: Sequence[int]) -> float:
        """Share of the plan that rows of these lengths occupy."""
        return self._cells(lengths) / self.max_cells

    def max_nodes(self, lengths: Sequence[int]) -> int:
        """Largest number of nodes of a draft for which the cache stays within the plan.

        Args:
          lengths: number of columns of each row of the cache, at least one row.
        """
        if self._is_lazy:
            return (self.max_cells - sum(lengths)) // len(lengths)
        return self.max_cells // len(lengths) - max(lengths)

    @property
    def most_tokens(self) -> int:
        """Length of the longest row that fits alone, in tokens."""
        return (self.max_cells // STEP - 1) * STEP

    def _cells(self, lengths: Sequence[int]) -> int:
        """Number of columns that rows of these lengths count as."""
        columns = list(map(self._columns, lengths))
        return sum(columns) if self._is_lazy else len(columns) * max(columns, default=0)

    def _columns(self, length: int) -> int:
        return -(-length // STEP) * STEP + STEP

    def check(self, prompt_length: int, max_length: int) -> None:
        """Check that a request fits at least alone.

        Raises: ContextLengthError if it does not.
        """
        if self._columns(max_length) > self.max_cells:
            needed = self._columns(max_length) * self.bytes_per_token
            raise ContextLengthError(
                f"a request of {prompt_length} tokens that may grow to {max_length} needs {needed} bytes of keys and "
                f"values, but max_kv_bytes is {self.num_bytes}, so it could never run; lower max_tokens, shorten the "
                "prompt, or raise max_kv_bytes (--max-kv-bytes)"
            )


def bytes_per_token(target: CausalLM) -> int:
    """Memory of the keys and values of one token, all layers together, in bytes. Measured by a forward pass."""
    count, cache = target.num_forwards, target.new_cache(1, capacity=1)
    target.forward(Nodes.from_chains([[0]]), cache)
    target.num_forwards = count
    return cache.column_bytes


def available_on(device: torch.device) -> int | None:
    """Memory that can still be allocated on a device, in bytes; None if the system does not report it.

    On a CUDA device the available memory is the free memory plus the memory that torch has reserved and does not use.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_bytes() if device.type == "cpu" else None
