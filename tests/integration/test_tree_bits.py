"""Every node of a draft, trees included, has the bits of the same token decoded plainly, where the kernels are ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compiled_models import own_products
from foretoken import LLM, SamplingParams
from foretoken.model.execution import native
from foretoken.model.lm import CausalLM
from foretoken.model.nodes import Nodes
from foretoken.tree import DraftTree

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let small models run by these kernels, too."""
    with own_products(monkeypatch):
        yield


def model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_path_of_a_tree_is_plain_decoding(dtype: torch.dtype) -> None:
    lm = CausalLM(model(dtype), execution="compiled", packs_all=True)
    assert lm.execution.kernels is not None
    assert lm.execution.num_compiled == 3
    prompts = [[5, 6, 7, 8] * 20, [9, 10, 11], [3] * 41]
    said = [[20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]

    def begun(rows: list[int]) -> object:
        cache = lm.new_cache(len(rows))
        for index, row in enumerate(rows):
            lm.forward(Nodes.from_chains([prompts[row]]), cache, first_row=index)
            cache.commit([list(range(len(prompts[row])))], index)
        return cache

    plain: list[list[torch.Tensor]] = []
    for row in range(3):
        cache = begun([row])
        plain.append([])
        for token in said[row]:
            plain[row].append(lm.forward(Nodes.from_chains([[token]]), cache)[0, 0].clone())
            cache.commit([[0]])  # type: ignore[attr-defined]

    cache = begun([0, 1, 2])
    first, second, third = said
    trees = [
        DraftTree((first[0], 1, first[1], 2, 3, first[2], 4, 5, first[3], 6), (-1, 0, 0, 0, 1, 2, 2, 4, 5, 5)),
        DraftTree.chain(second[0], second[1:]),
        DraftTree.root(third[0]),
    ]
    paths = [[0, 2, 5, 8], [0, 1, 2, 3], [0]]
    logits = lm.forward(Nodes.from_trees(trees), cache)
    for row, path in enumerate(paths):
        for depth, node in enumerate(path):
            assert torch.equal(logits[row, node], plain[row][depth]), (row, node)
    cache.commit(paths)  # type: ignore[attr-defined]
    again = lm.forward(Nodes.from_chains([[77], [77], [third[1]]]), cache)
    alone = begun([0])
    for token in first:
        lm.forward(Nodes.from_chains([[token]]), alone)
        alone.commit([[0]])  # type: ignore[attr-defined]
    assert torch.equal(again[0, 0], lm.forward(Nodes.from_chains([[77]]), alone)[0, 0])
    assert torch.equal(again[2, 0], plain[2][1])


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_nodes", [31, 64])
@torch.inference_mode()
def test_a_path_of_a_wide_tree_is_plain_decoding(dtype: torch.dtype, num_nodes: int) -> None:
    lm = CausalLM(model(dtype), execution="compiled", packs_all=True)
    said = [20, 21, 22, 23, 24]

    def begun() -> object:
        cache = lm.new_cache(1)
        lm.forward(Nodes.from_chains([[5, 6, 7, 8] * 20]), cache)
        cache.commit([list(range(80))])
        return cache

    cache, plain = begun(), []
    for token in said:
        plain.append(lm.forward(Nodes.from_chains([[token]]), cache)[0, 0].clone())
        cache.commit([[0]])  # type: ignore[attr-defined]
    tokens, parents, path = [said[0]], [-1], [0]
    for token in said[1:]:  # others before and behind it, below what comes before it
        for other in range((num_nodes - 1) // 4 - 1):
            tokens.append(100 + other)
            parents.append(path[-1])
        path.append(len(tokens))
        tokens.append(token)
        parents.append(path[-2])
    tree = DraftTree(
        (*tokens, *range(200, 200 + num_nodes - len(tokens))), (*parents, *[0] * (num_nodes - len(tokens)))
    )
    assert len(tree) == num_nodes
    logits = lm.forward(Nodes.from_trees([tree]), begun())
    for depth, node in enumerate(path):
        assert torch.equal(logits[0, node], plain[depth]), node


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_texts_of_drafted_trees_are_equal_in_batches(dtype: torch.dtype) -> None:
    """With a model of noise, whose tokens are near ties all the time."""
    target = model(dtype)
    params = [SamplingParams(temperature=t, seed=5, max_tokens=24, ignore_eos=True) for t in (0, 0.8, 0)]
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7] * 9, [9, 10], [3] * 30)]
    config = {"method": "token_recycling", "max_draft_nodes": 12, "length_policy": "fixed"}
    plain = LLM(target, execution="compiled", max_num_seqs=3)
    drafted = LLM(target, config, execution="compiled", max_num_seqs=3)
    texts = [[output.outputs[0].token_ids for output in llm.generate(prompts, params)] for llm in (plain, drafted)]
    assert texts[0] == texts[1]
