"""Columns of the cache and memories of drafters, left by rows that have ended to prompts that begin like them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.config.engine import EngineConfig
    from foretoken.engine.batch import Member
    from foretoken.engine.drafter import Drafter
    from foretoken.model.cache.prefixes import PrefixStore
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM


class Reuse:
    """Fills rows of a cache from a store of prefixes and puts them there when they end; without a store, nothing.

    Args:
      prefixes: the store, perhaps shared with other engines over one target.
      target: whose weights may change, after which rows that began before are not kept.
      cache: of the rows.
      drafter: has a memory of rows, too.

    Raises: ConfigError for a store under a config that promises every bit.
    """

    def __init__(
        self, prefixes: PrefixStore | None, target: CausalLM, cache: KVCache, drafter: Drafter, config: EngineConfig
    ) -> None:
        if prefixes is not None and config.is_strict:
            raise ConfigError(
                "exactness='strict' must reproduce every bit, but keys and values of earlier rows were rounded at "
                "other shapes; keep no prefixes, or use exactness='default'"
            )
        self._prefixes = prefixes
        self._target = target
        self._cache = cache
        self._drafter = drafter

    def recall(self, member: Member, slot: int) -> int:
        """Take over what is known of the prompt's beginning, as far as the drafter can go on from there.

        Returns: how many tokens of the prompt are in the cache now.
        """
        member.num_changes = self._target.num_changes
        if self._prefixes is None:
            return 0
        prompt = member.row.token_ids[: member.num_to_prefill]
        remembered = partial(self._drafter.recall, member.row)
        member.num_prefilled = self._prefixes.load(prompt, self._cache, slot, remembered)
        member.row.num_cached_tokens = member.num_prefilled
        return member.num_prefilled

    def keep(self, member: Member, slot: int) -> None:
        """Leave what a row has in the caches, unless it may be wrong or is of other weights."""
        row = member.row
        is_doubtful = member.is_in_doubt or row.finish_reason == "error"
        if self._prefixes is None or is_doubtful or member.num_changes != self._target.num_changes:
            return
        length = self._cache.lengths[slot]
        self._prefixes.keep(row.token_ids, self._cache, slot, length, partial(self._drafter.keep, row))

    def clear(self) -> None:
        """Drop all of it."""
        if self._prefixes is not None:
            self._prefixes.clear()
