"""The predictions of a target after each single token of its vocabulary."""

from __future__ import annotations

import torch

from foretoken.drafters.parts.adjacency import AdjacencyMatrix
from foretoken.model.lm import CausalLM
from foretoken.model.nodes import Nodes


@torch.inference_mode()
def vocabulary_matrix(target: CausalLM, num_candidates: int, batch_size: int = 256) -> AdjacencyMatrix:
    """The candidates that follow every token where it stands alone, at the beginning of a text.

    The tokens of a forward stand side by side in one row, each seeing itself only. That is the work of a prompt as
    long as the vocabulary, once.

    Exactness: any state is as good as another for what is generated. Randomness: none.
    """
    matrix = AdjacencyMatrix(target.vocab_size, num_candidates)
    for start in range(0, target.vocab_size, batch_size):
        tokens = torch.arange(start, min(start + batch_size, target.vocab_size))
        alone = torch.eye(len(tokens), dtype=torch.bool)
        nodes = Nodes(tokens[None], torch.zeros_like(tokens)[None], (len(tokens),), alone[None])
        logits = target.forward(nodes, target.new_cache(1))
        matrix.update(tokens.tolist(), logits[0].topk(num_candidates, dim=-1).indices.cpu().numpy())
    return matrix
