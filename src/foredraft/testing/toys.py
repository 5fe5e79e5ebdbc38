"""Small random models, reference logits for trees, and drafters that are always right or always wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from foredraft.engine.drafter import Drafter, DrafterFacts, DraftSize
from foredraft.engine.row import Row
from foredraft.tree import DraftTree


def toy_model(
    vocab_size: int = 64,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    scale: float = 0.25,
    **sizes: int,
) -> PreTrainedModel:
    """Return a two-layer Llama with strong random weights, built in milliseconds.

    Args:
      scale: standard deviation of its matrices; see `strengthen`.
      sizes: fields of `LlamaConfig` to override.

    Randomness: ``seed``.
    """
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(
        vocab_size=vocab_size, bos_token_id=None, eos_token_id=None, pad_token_id=None, **{**shape, **sizes}
    )
    return strengthen(LlamaForCausalLM(config), seed, scale).to(dtype).eval()


def strengthen(model: PreTrainedModel, seed: int = 0, scale: float = 0.25) -> PreTrainedModel:
    """Redraw the weights of a random model in place, so that every error in a mask or a position changes its logits.

    Matrices get the standard deviation ``scale``. Norms and biases are spread around their initial values.

    Returns: the model.
    Randomness: ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            noise *= scale if parameter.ndim > 1 else scale / 2
            start = parameter.flatten()[0]
            is_constant = bool((parameter == start).all()) and start.item() in (0.0, 1.0)
            parameter.copy_(noise.to(parameter) + (start if is_constant else 0.0))
    return model


def perturbed(model: PreTrainedModel, scale: float, seed: int = 0) -> PreTrainedModel:
    """Return a copy of a model with noise on its weights, for a drafter that is sometimes right and sometimes wrong.

    Args:
      scale: standard deviation of the noise, relative to that of each parameter. 0 gives an equal copy.

    Randomness: ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().mean()
            parameter.add_((scale * noise).to(parameter) * spread)
    return copied


def reference_node_logits(model: PreTrainedModel, prefix: list[int], tree: DraftTree) -> torch.Tensor:
    """Return logits (N, V) after every node of a tree, computed by one plain forward pass per root-to-leaf path.

    The model gets no cache, no mask and no positions. This is the reference for every other way to compute the logits.

    Args:
      prefix: tokens before the pending one, which is the root of ``tree``.
    """
    rows: list[torch.Tensor | None] = [None] * len(tree)
    for leaf in tree.leaves:
        nodes = tree.path(leaf)
        ids = torch.tensor([[*prefix, *(tree.tokens[node] for node in nodes)]], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        for depth, node in enumerate(nodes):
            rows[node] = logits[len(prefix) + depth]
    return torch.stack([row for row in rows if row is not None])


class PerfectDrafter(Drafter):
    """A drafter that proposes the tokens of plain decoding, so that every draft is accepted to its end.

    Args:
      texts: prompt and output of plain decoding, one per row. A row finds its text by its present tokens.
      num_speculative_tokens: depth of the draft.
      num_branches: number of branches; with 2 or more, wrong siblings come before every right node.
    """

    facts = DrafterFacts("perfect")

    def __init__(
        self, texts: Iterable[Sequence[int]], num_speculative_tokens: int, *, vocab_size: int, num_branches: int = 1
    ) -> None:
        self._texts = [tuple(text) for text in texts]
        self._num_tokens = num_speculative_tokens
        self._num_branches = num_branches
        self._vocab_size = vocab_size

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        return [self._tree(row, min(budget, self._num_tokens)) for row, budget in zip(rows, budgets, strict=True)]

    def _tree(self, row: Row, depth: int) -> DraftTree:
        future = self._future(row)[:depth]
        wrong = ([token + shift for token in future] for shift in range(1, self._num_branches))
        decoys = [(*future[:i], tokens[i] % self._vocab_size) for tokens in wrong for i in range(len(future))]
        return DraftTree.from_paths(row.pending, [*decoys, future], source=self.name)

    def _future(self, row: Row) -> tuple[int, ...]:
        known = tuple(row.token_ids)
        matches = (text for text in self._texts if text[: len(known)] == known)
        return next(matches, known)[len(known) :]


class WrongDrafter(PerfectDrafter):
    """A drafter that proposes a wrong token at every node: never the token of plain decoding."""

    facts = DrafterFacts("wrong")

    def _future(self, row: Row) -> tuple[int, ...]:
        return tuple((token + 1) % self._vocab_size for token in super()._future(row))
