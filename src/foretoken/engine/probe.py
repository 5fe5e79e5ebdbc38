"""What the probe of a model compares: plain forwards over the paths of small trees, without cache and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from foretoken.engine.tree import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_LENGTHS = (11, 8)  # ragged on purpose
PROBE_TREES = (
    DraftTree((0, 1, 2, 3, 4, 5, 6), (-1, 0, 0, 1, 1, 2, 4)),  # two siblings on two levels
    DraftTree((0, 1, 2, 3, 4), (-1, 0, 0, 2, 2)),
)
PROBE_CHAINS = (DraftTree.chain(0, (1, 2, 3, 4)), DraftTree.chain(0, (1, 2, 3)))
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 0.1


@dataclass(frozen=True)
class Reference:
    """Plain forwards of the model over the paths of the probe's trees, without cache and masks."""

    prefix: tuple[int, ...]
    node_tokens: tuple[int, ...]
    logits: dict[tuple[int, ...], torch.Tensor]
    tolerance: float

    def relabel(self, tree: DraftTree) -> DraftTree:
        """The same shape with real token ids."""
        return DraftTree(tuple(self.node_tokens[token] for token in tree.tokens), tree.parents)

    def error(self, logits: torch.Tensor, prefixes: Sequence[list[int]], trees: Sequence[DraftTree]) -> float:
        """Largest root-mean-square error of a node's logits, relative to the spread of the true ones."""
        worst = 0.0
        for row, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
            for node in range(len(tree)):
                text = (*prefix, tree.tokens[0], *tree.path_tokens(node))
                want = self.logits[text]
                got = logits[row, node].double().cpu()
                spread = (want - want.mean()).square().mean().sqrt().clamp_min(1e-12)
                error = ((got - want).square().mean().sqrt() / spread).item()
                worst = max(worst, error if error == error else float("inf"))  # NaN counts as wrong
        return worst


@torch.inference_mode()
def reference_of(model: PreTrainedModel, vocab_size: int, device: torch.device) -> Reference:
    ids = np.random.default_rng(0).permutation(vocab_size)[: max(PROBE_LENGTHS) + 7] % vocab_size
    ids = np.resize(ids, max(PROBE_LENGTHS) + 7)
    prefix = tuple(int(i) for i in ids[: max(PROBE_LENGTHS)])
    node_tokens = tuple(int(i) for i in ids[max(PROBE_LENGTHS) :])
    logits: dict[tuple[int, ...], torch.Tensor] = {}
    for trees in (PROBE_TREES, PROBE_CHAINS):
        for length, shape in zip(PROBE_LENGTHS, trees, strict=True):
            tree = DraftTree(tuple(node_tokens[token] for token in shape.tokens), shape.parents)
            for leaf in tree.leaves:
                text = (*prefix[:length], tree.tokens[0], *tree.path_tokens(leaf))
                ends = range(length + 1, len(text) + 1)
                if any(text[:end] not in logits for end in ends):
                    rows = model(input_ids=torch.tensor([text], device=device), use_cache=False).logits[0]
                    for end in ends:
                        logits[text[:end]] = rows[end - 1].double().cpu()
    dtype = model.get_input_embeddings().weight.dtype
    return Reference(prefix, node_tokens, logits, TOLERANCES.get(dtype, HALF_TOLERANCE))
