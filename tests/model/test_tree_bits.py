"""Every node of a draft has the bits of the same token decoded plainly, where steps run by the library's own kernels.

Trees and chains of up to 64 nodes side by side in ragged batches, over several rounds, on models of several structures,
by every instruction set that this machine has. Stock kernels round by the shape of their call meanwhile, so that none
of them can have a part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from compiled_models import build
from covering import pairwise
from foredraft import LLM, SamplingParams, zoo
from foredraft.model.cache.ragged import KVCache
from foredraft.model.execution.native_program import NativeProgram
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.native import library as native
from foredraft.native.abi import MOST_NODES
from foredraft.testing import hostile_kernels
from foredraft.tree import DraftTree
from harness import random_ids
from instruction_sets import limit_to

DTYPES = [torch.bfloat16, torch.float32]
ROUNDED = [(torch.float32, "bfloat16"), (torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.float16, "int8")]
"""Models, and caches that round."""
MODELS = ("llama", "gemma3", "qwen3", "gpt2", "zoo:tiny")
"""Grouped heads, windows that fill, norms of queries and keys, learned positions and biases; and a trained one."""
NAMES = [name if name in ("llama", "gpt2") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]

PROMPTS = (90, 3, 41, 11)
"""Tokens of the rows: within the windows and past them, a prompt of more tokens than a draft may have."""


def instruction_sets() -> list[str]:
    """Those that this machine runs, the widest first; without kernels none."""
    widest, sets = native.instruction_set(), list(native.OPTIONS)
    return [] if widest is None or native.library() is None else sets[sets.index(widest) :]


@pytest.fixture(autouse=True)
def _hostile() -> Iterator[None]:
    with hostile_kernels():
        yield


SETS = instruction_sets() or [""]


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The instruction set by which models run that are loaded in the test."""
    if not request.param:
        pytest.skip("no kernels here")
    if native.library(request.param) is None:
        pytest.fail(f"no kernels were made for {request.param}")
    limit_to(request.param, monkeypatch)
    return str(request.param)


def model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    return zoo.load("tiny", dtype=dtype)[0] if name == "zoo:tiny" else build(name, dtype)


def grown(num_nodes: int, root: int, seed: int, vocab_size: int) -> DraftTree:
    """A random tree, half of whose nodes hang on the one before: deep, wide and uneven."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents = [root], [-1]
    while len(tokens) < num_nodes:
        parent, token = len(tokens) - 1, int(torch.randint(vocab_size, (), generator=generator))
        if torch.rand((), generator=generator) < 0.5:
            parent = int(torch.randint(len(tokens), (), generator=generator))
        if token not in [tokens[node] for node, other in enumerate(parents) if other == parent]:
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


def drafts(number: int, roots: list[int], vocab_size: int) -> list[DraftTree]:
    """Of a round: in turns over the rows, a tree and a chain of the largest size, a small tree, and no draft."""

    def chain(root: int) -> DraftTree:
        return DraftTree.chain(root, [token % vocab_size for token in random_ids(MOST_NODES - 1, 50 + number)])

    makers: list[Callable[[int], DraftTree]] = [
        lambda root: grown(MOST_NODES, root, number, vocab_size),
        chain,
        DraftTree.root,
        lambda root: grown(13, root, 20 + number, vocab_size),
    ]
    return [makers[(row + number) % len(makers)](root) for row, root in enumerate(roots)]


def longest_path(tree: DraftTree) -> list[int]:
    return list(max((tree.path(leaf) for leaf in tree.leaves), key=len))


class Plain:
    """Plain decoding of one row, alone.

    Args:
      prompt: of which nothing was said yet.
    """

    def __init__(self, lm: CausalLM, prompt: list[int]) -> None:
        self._lm = lm
        self._length = len(prompt)
        self._states = read(lm, [prompt]).export(0, len(prompt))

    def say(self, tokens: Sequence[int], *, for_good: bool = False) -> list[torch.Tensor]:
        """Logits (V,) after each of these tokens, one at a time; they stay, or are forgotten again."""
        cache, found = self._lm.new_cache(1), []
        cache.load(0, self._states, self._length)
        for token in tokens:
            found.append(self._lm.forward(Nodes.from_chains([[token]]), cache)[0, 0].clone())
            cache.commit([[0]])
        if for_good:
            self._length += len(tokens)
            self._states = cache.export(0, self._length)
        return found


def read(lm: CausalLM, prompts: list[list[int]]) -> KVCache:
    """A cache that holds prompts, each read alone."""
    cache = lm.new_cache(len(prompts))
    for row, prompt in enumerate(prompts):
        lm.forward(Nodes.from_chains([prompt]), cache, first_row=row, keep=slice(0, 0))
        cache.commit([range(len(prompt))], row)
    return cache


@torch.inference_mode()
def check_drafts(lm: CausalLM, num_rounds: int = 2) -> None:
    """Every node of every row and round against plain decoding of its own path."""
    assert lm.guarantee("default").kind == "bit-identical", lm.guarantee("default").describe()
    prompts = [[token % lm.vocab_size for token in random_ids(length, length)] for length in PROMPTS]
    plain = [Plain(lm, prompt) for prompt in prompts]
    cache, pending = read(lm, prompts), [row + 1 for row in range(len(prompts))]
    for number in range(num_rounds):
        trees = drafts(number, pending, lm.vocab_size)
        logits = lm.forward(Nodes.from_trees(trees), cache)
        for row, tree in enumerate(trees):
            for path in map(tree.path, tree.leaves):
                said = plain[row].say([tree.tokens[node] for node in path])
                for node, want in zip(path, said, strict=True):
                    assert torch.equal(logits[row, node], want), (number, row, node)
        paths = [longest_path(tree) for tree in trees]
        cache.commit(paths)
        for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
            plain[row].say([tree.tokens[node] for node in path], for_good=True)
            pending[row] += 40  # the bonus


@pytest.mark.sample(2)
@pytest.mark.parametrize(*pairwise(name=NAMES, dtype=DTYPES, kernels=SETS), ids=str, indirect=["kernels"])
def test_every_node_of_a_ragged_batch_is_plain_decoding(name: str, dtype: torch.dtype, kernels: str) -> None:
    lm = CausalLM(model(name, dtype))
    check_drafts(lm)
    assert kernels in lm.execution.describe()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    *pairwise(name=["llama", "gemma3", "gpt2"], rounded=ROUNDED, kernels=SETS), ids=str, indirect=["kernels"]
)
def test_every_node_is_plain_decoding_over_rounded_keys_and_values(
    name: str, rounded: tuple[torch.dtype, str], kernels: str
) -> None:
    dtype, kept = rounded
    lm = CausalLM(model(name, dtype), kv_cache_dtype=kept)
    assert lm.execution.program is not None
    check_drafts(lm, num_rounds=1)
    assert lm.execution.program.num_runs
    assert lm.new_cache().dtype == getattr(torch, kept)


@pytest.mark.parametrize(
    ("name", "dtype", "kernels"),
    [
        pytest.param(name, dtype, chosen, marks=pytest.mark.slow if is_taken else pytest.mark.full)
        for name in MODELS
        for chosen in SETS
        for dtype in DTYPES
        for is_taken in [(name, dtype) in (("llama", torch.bfloat16), ("gpt2", torch.float32))]
    ],
    ids=str,
    indirect=["kernels"],
)
def test_every_node_is_plain_decoding_in_compiled_layers(
    name: str, dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where modules run: somebody watches them, for instance."""
    monkeypatch.setattr(NativeProgram, "is_possible", False)
    lm = CausalLM(model(name, dtype), execution="compiled")
    lm.execution.make_ready()
    assert lm.execution.num_compiled == lm.num_layers
    check_drafts(lm, num_rounds=1)


@pytest.mark.full
@pytest.mark.usefixtures("threads_of_torch")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_node_is_plain_decoding_on_two_threads(name: str, dtype: torch.dtype, kernels: str) -> None:
    torch.set_num_threads(2)
    check_drafts(CausalLM(model(name, dtype)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_texts_of_drafted_trees_are_equal_in_batches(dtype: torch.dtype, kernels: str) -> None:
    """With a model of noise, whose tokens are near ties all the time."""
    params = [SamplingParams(temperature=t, seed=5, max_tokens=24, ignore_eos=True) for t in (0, 0.8, 0)]
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7] * 9, [9, 10], [3] * 30)]
    config = {"method": "token_recycling", "max_draft_nodes": 12, "length_policy": "fixed"}
    plain = LLM(build("llama", dtype), max_num_seqs=3)
    drafted = plain.with_speculative_config(config)
    results = [llm.generate(prompts, params) for llm in (plain, drafted)]
    first, second = ([output.outputs[0].token_ids for output in each] for each in results)
    assert first == second
    assert sum(output.metrics.speculative_decoding["num_accepted_draft_tokens"] for output in results[1]) > 0
