"""The forwards of an engine, at the shapes that its promise of bits asks for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from foretoken.engine.drafter import Requirements
from foretoken.model.capture import Output, Wanted
from foretoken.model.execution.packing import HALVES, packed_dtype
from foretoken.model.nodes import Nodes
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.config.engine import EngineConfig
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.execution.kernels import Bucket
    from foretoken.model.lm import CausalLM

NO_LIMIT = 1 << 20


class Forwards:
    """Reads prompts and verifies drafts with the target.

    In strict mode, and by default in half precision, a row is to keep its bits whatever runs beside it: chains and
    prompts are then padded to shapes that were measured to do so (a bucket), or where there are none, in strict mode,
    every step runs at the largest shape there is.

    Args:
      target: the model.
      cache: of its rows.
      config: of the engine.
      max_model_len: tokens of the longest row.
      requires: what the drafter wants beside the logits.
    """

    def __init__(
        self, target: CausalLM, cache: KVCache, config: EngineConfig, max_model_len: int, requires: Requirements
    ) -> None:
        self._target = target
        self._cache = cache
        self._config = config
        self._max_model_len = max_model_len
        self._wanted = Wanted(requires.last_hidden, requires.layer_inputs)
        self._keeps_prompt_logits = requires.prompt_logits
        is_half = target.dtype in HALVES and packed_dtype(target.dtype) == target.dtype
        self._wants_bucket = config.is_strict or (config.exactness == "default" and is_half)
        self._bucket: Bucket | None = None
        self._is_current = False

    def begin_step(self) -> None:
        """Ask anew which shapes keep bits: the number of threads may have changed, or the model."""
        self._is_current = False

    @property
    def bucket(self) -> Bucket | None:
        """The shapes at which steps of chains run, or None where each runs at its own."""
        if not self._is_current:
            self._bucket = self._target.kernel_facts(self._config.strict_width).bucket if self._wants_bucket else None
            self._is_current = True
        return self._bucket

    @property
    def _has_one_shape(self) -> bool:
        return self._config.is_strict and self.bucket is None

    @property
    def longest_chain(self) -> int:
        """How many tokens a draft may have that is to run at shapes which keep bits."""
        bucket = self.bucket
        if bucket is not None:
            return bucket.max_nodes - 1
        return self._config.strict_width - 1 if self._has_one_shape else NO_LIMIT

    @property
    def _view_length(self) -> int | None:
        if not self._has_one_shape:
            return None
        return self._max_model_len + max(self._config.prefill_chunk_size, self._config.strict_width)

    def prompt_shape(self, start: int, length: int) -> tuple[int, ...] | None:
        """What prompts that are read in one forward have in common; None where each is read alone.

        Where a row is to keep its bits, what a prompt leaves in the cache depends on the prompt alone: prompts are read
        one by one, or those together whose chunks begin at one place and are padded to one width.
        """
        bucket = self.bucket
        if bucket is None:
            return None if self._has_one_shape else ()
        width = bucket.prefill_width(length)
        return None if bucket.rows_per_call(width) is None else (start, width)

    def read(self, chunks: Seq[Seq[int]], first_row: int) -> Output:
        """Run the next tokens of prompts in neighbouring rows. Logits only where the drafter wants them."""
        bucket = self.bucket
        width = self._config.prefill_chunk_size if self._has_one_shape else None
        if bucket is not None:
            width = bucket.prefill_width(len(chunks[0]))
        nodes = Nodes.from_chains(chunks, width)
        return self._target.forward_with(
            self._wanted,
            nodes,
            self._cache,
            first_row=first_row,
            keep=None if self._keeps_prompt_logits else slice(0, 0),
            view_length=self._view_length,
            rows_per_call=None if bucket is None else bucket.rows_per_call(nodes.width),
        )

    def num_nodes(self, sizes: Seq[int], are_chains: bool) -> int:
        """How many nodes a forward over drafts of these sizes runs, padding included."""
        if self._has_one_shape:
            return self._config.max_num_seqs * self._config.strict_width
        bucket = self.bucket
        if bucket is None or not (are_chains and self.pads_chains):
            return sum(sizes)
        return len(sizes) * bucket.width(len(sizes), max(sizes))

    def fitted(self, trees: list[DraftTree]) -> list[DraftTree]:
        """Drafts cut to the longest chain that keeps bits, where all are chains."""
        if all(len(tree) == 1 for tree in trees):
            return trees
        longest = self.longest_chain
        return [tree.cut(longest) for tree in trees] if all(tree.is_chain for tree in trees) else trees

    @property
    def pads_chains(self) -> bool:
        """Whether a chain costs what the longest beside it costs; not where every node attends by itself."""
        return self._has_one_shape or (self.bucket is not None and self._target.execution.kernels is None)

    def verify(self, trees: Seq[DraftTree]) -> Output:
        """Run drafts, one for each of the first rows; logits of every node."""
        wanted, bucket = self._wanted, self.bucket
        if self._has_one_shape:
            padding = [DraftTree.root(trees[0].tokens[0])] * (self._config.max_num_seqs - len(trees))
            nodes = Nodes.from_trees([*trees, *padding], self._config.strict_width)
            return self._target.forward_with(wanted, nodes, self._cache, view_length=self._view_length)
        if bucket is None or not all(tree.is_chain for tree in trees):
            return self._target.forward_with(wanted, Nodes.from_trees(trees), self._cache, listed=True)
        width = max(map(len, trees))
        nodes = Nodes.from_trees(trees, bucket.width(len(trees), width))
        return self._target.forward_with(wanted, nodes, self._cache, bucket=bucket, listed=True)
