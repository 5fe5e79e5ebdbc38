"""What a target would say after each of its tokens alone."""

from __future__ import annotations

import torch

from foretoken.drafters.adjacency import AdjacencyMatrix
from foretoken.engine.model import CausalLM
from foretoken.engine.nodes import Nodes
from foretoken.engine.tree import DraftTree


@torch.inference_mode()
def vocabulary_matrix(target: CausalLM, num_candidates: int, batch_size: int = 255) -> AdjacencyMatrix:
    """The candidates that follow every token right behind the first token of a text.

    The BOS token, or token 0 of models without one, is the root of a tree whose children are the tokens: a forward
    per ``batch_size`` of them. That is the work of a prompt as long as the vocabulary, once.

    Raises: TreeError for a target that verifies chains only.
    Exactness: any state is as good as another for what is generated. Randomness: none.
    """
    first = getattr(target.config, "bos_token_id", None)
    root = first if isinstance(first, int) and 0 <= first < target.vocab_size else 0
    matrix = AdjacencyMatrix(target.vocab_size, num_candidates)
    for start in range(0, target.vocab_size, batch_size):
        tokens = range(start, min(start + batch_size, target.vocab_size))
        tree = DraftTree((root, *tokens), (-1, *[0] * len(tokens)))
        logits = target.forward(Nodes.from_trees([tree]), target.new_cache(1))
        matrix.update(tokens, logits[0, 1:].topk(num_candidates, dim=-1).indices.cpu().numpy())
    return matrix
