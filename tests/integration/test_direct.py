"""Forwards in one call, without modules: the bits of the modules, and themselves where somebody has changed them."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from test_replay import TREES, compiled, filled, llama, same, steps
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from architectures import ARCHITECTURES
from compiled_models import ALL
from foretoken.model.cache.ragged import KVCache
from foretoken.model.cache.views import ViewCache
from foretoken.model.capture import Wanted
from foretoken.model.execution import direct, native, regions, tail
from foretoken.model.execution.direct import DirectForward
from foretoken.model.lm import CausalLM
from foretoken.model.nodes import Nodes
from foretoken.tree import DraftTree

pytestmark = [pytest.mark.skipif(native.library() is None, reason="no kernels here"), pytest.mark.usefixtures("ours")]

LENGTHS = [9, 40, 17]
BY_MODULES = {"phi3-longrope": "its angles depend on the longest position of a forward"}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of this test alone, whose calls nobody has recorded."""
    monkeypatch.setattr(regions, "_graphs", {})


def forward_of(lm: CausalLM) -> DirectForward:
    found = lm.execution.direct
    assert found is not None
    return found


def by_modules(lm: CausalLM, lengths: list[int], trees: list[DraftTree]) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectForward, "is_possible", False)
        return steps(lm, lengths, trees)


def runs(lm: CausalLM, lengths: list[int], trees: list[DraftTree], want: list[torch.Tensor]) -> int:
    """How many of three forwards ran without modules; they give what is wanted."""
    count = forward_of(lm).num_runs
    assert same(steps(lm, lengths, trees), want)
    return forward_of(lm).num_runs - count


@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_architectures_have_the_bits_of_their_modules(name: str) -> None:
    architecture = ARCHITECTURES[name]
    for dtype in (torch.float32, torch.bfloat16):
        lm = compiled(architecture.build(architecture.attention[0], dtype))
        if name in BY_MODULES:
            assert lm.execution.direct is None, BY_MODULES[name]
            continue
        for trees in TREES:
            want = by_modules(lm, LENGTHS, trees)
            assert runs(lm, LENGTHS, trees, want) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_prompts_of_many_nodes_run_by_modules(dtype: torch.dtype) -> None:
    lm = compiled(llama(dtype))
    for size, count in ((63, 3), (64, 0)):  # nodes of a chain behind its root
        trees = [DraftTree.chain(3, tuple(range(size)))]
        assert runs(lm, [9], trees, by_modules(lm, [9], trees)) == count


@torch.inference_mode()
def test_logits_of_some_nodes_are_those_of_all() -> None:
    lm = compiled(llama())
    cache, nodes = filled(lm, LENGTHS), Nodes.from_chains([[1, 2, 3], [4], [5, 6]])
    whole, count = lm.forward(nodes, cache), forward_of(lm).num_runs
    for keep in (slice(0, 1), slice(1, 3), slice(0, 0)):
        found = lm.forward(nodes, cache, keep=keep)
        wanted = whole[:, keep]
        assert found.shape == wanted.shape
        assert all(torch.equal(found[row, 0], wanted[row, 0]) for row in range(3) if keep == slice(0, 1))
    listed = lm.forward(nodes, cache, listed=True)
    assert [len(listed[row]) for row in range(3)] == [3, 1, 2]
    assert all(torch.equal(listed[row], whole[row, : len(listed[row])]) for row in range(3))
    assert forward_of(lm).num_runs == count + 4


@pytest.mark.parametrize("place", ["norm", "output", "model", "layer", "everywhere"])
@torch.inference_mode()
def test_hooks_are_followed_and_forgotten(place: str) -> None:
    lm = compiled(llama())
    plain = steps(lm, LENGTHS, TREES[1])

    def hook(_module: nn.Module, _inputs: object, output: object) -> object:
        return output * 1.5 if isinstance(output, torch.Tensor) and output.dim() == 3 else None

    shadow = lm.shadow
    found: dict[str, nn.Module] = {
        "norm": shadow.model.norm,
        "output": shadow.lm_head,
        "model": shadow.model.embed_tokens,
        "layer": lm.layers[2],
    }
    register = register_module_forward_hook if place == "everywhere" else found[place].register_forward_hook
    handle = register(hook)
    try:
        want = by_modules(lm, LENGTHS, TREES[1])
        assert not same(plain, want)
        assert runs(lm, LENGTHS, TREES[1], want) == 0
    finally:
        handle.remove()
    assert runs(lm, LENGTHS, TREES[1], plain) == 3


@torch.inference_mode()
def test_a_forward_that_was_replaced_is_followed_after_a_refresh() -> None:
    lm = compiled(llama())
    norm = lm.shadow.model.norm
    before = norm.forward
    norm.forward = lambda x: before(x) * 2
    lm.refresh()
    want = by_modules(lm, LENGTHS, TREES[2])
    assert runs(lm, LENGTHS, TREES[2], want) == 0


@pytest.mark.parametrize("kind", ["in place", "by others", "norms of layers"])
def test_weights_that_changed_are_used(kind: str) -> None:
    model = llama()
    lm = compiled(model)
    before = steps(lm, LENGTHS, TREES[1])
    with torch.no_grad():
        if kind == "in place":
            model.model.embed_tokens.weight.mul_(1.1)
        elif kind == "by others":
            model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data * 1.1
            model.model.norm.weight.data = model.model.norm.weight.data * 1.1
        else:
            for layer in model.model.layers:
                layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 1.1
    lm.refresh()
    want = by_modules(lm, LENGTHS, TREES[1])
    assert not torch.equal(before[0], want[0])
    assert runs(lm, LENGTHS, TREES[1], want) == 3


@torch.inference_mode()
def test_positions_beyond_what_was_laid_out() -> None:
    model = llama()
    lm = compiled(model)
    lengths = [40, 230, 7]
    assert runs(lm, lengths, TREES[3], by_modules(lm, lengths, TREES[3])) == 3
    lengths = [700]
    assert runs(lm, lengths, TREES[2], by_modules(lm, lengths, TREES[2])) == 3


@torch.inference_mode()
def test_a_token_that_there_is_not_raises_what_the_modules_raise() -> None:
    lm = compiled(llama())
    for token in (160, -1):
        nodes = Nodes.from_chains([[3, token]])
        with pytest.raises(IndexError):
            lm.forward(nodes, filled(lm, [9]))


@torch.inference_mode()
def test_rows_whose_positions_are_ahead_of_their_columns() -> None:
    lm = compiled(llama())
    source = filled(lm, [40])
    chosen = torch.tensor([0, 1, 2, 3, 20, 21, 37, 38, 39]).expand(2, -1)  # of every head

    def forward() -> torch.Tensor:
        view = ViewCache(lm.num_layers, num_rows=1)
        view.choose(0, source, 0, [chosen] * lm.num_layers)
        return lm.forward(Nodes.from_chains([[5, 6, 7]]), view)

    forward()  # records the calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectForward, "is_possible", False)
        want = forward()
    count = forward_of(lm).num_runs
    assert torch.equal(forward(), want)
    assert forward_of(lm).num_runs == count + 1


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-sliding"])
@torch.inference_mode()
def test_trees_that_are_fed_level_by_level(name: str) -> None:
    """Nodes see those of their ancestors that were committed before, and positions count from the root."""
    lm = compiled(ARCHITECTURES[name].build("sdpa", torch.float32))
    trees = [DraftTree((7, 8, 9, 4, 5, 6), (-1, 0, 0, 1, 2, 2)), DraftTree((3, 1, 2, 9), (-1, 0, 0, 2))]
    depths = torch.tensor([[0, 1, 1, 2, 2, 2], [0, 1, 1, 2, 2, 2]])
    ancestors = torch.zeros(2, 6, 6, dtype=torch.bool)
    for row, tree in enumerate(trees):
        ancestors[row, : len(tree), : len(tree)] = torch.from_numpy(tree.ancestor_mask)

    def levels() -> list[torch.Tensor]:
        cache, found = filled(lm, [9, 40]), []
        for first, last, counts in ((0, 1, (1, 1)), (1, 3, (2, 2)), (3, 6, (3, 1))):
            tokens = torch.tensor([[*tree.tokens[first:last], *[3] * (last - len(tree))] for tree in trees])
            seen = ancestors[:, first:last, :last].contiguous()
            nodes = Nodes(tokens, depths[:, :last].contiguous(), counts, seen, first)
            logits = lm.forward(nodes, cache)
            found += [logits[row, : counts[row]] for row in range(2)]
            cache.commit([range(count) for count in counts])
        return found

    levels()  # records the calls
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectForward, "is_possible", False)
        want = levels()
    count = forward_of(lm).num_runs
    assert same(levels(), want)
    assert forward_of(lm).num_runs == count + 3


@torch.inference_mode()
def test_caches_are_told_apart_and_let_go() -> None:
    lm = compiled(llama())
    want = by_modules(lm, LENGTHS, TREES[1])
    for _ in range(3):
        assert runs(lm, LENGTHS, TREES[1], want) == 3
    cache = filled(lm, [9])
    lm.forward(Nodes.from_chains([[1, 2]]), cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


@torch.inference_mode()
def test_rows_further_down_in_a_cache() -> None:
    lm = compiled(llama())
    nodes = Nodes.from_chains([[1, 2], [3]])

    def forward(cache: KVCache) -> torch.Tensor:
        return lm.forward(nodes, cache, first_row=1)

    cache = filled(lm, LENGTHS)
    forward(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectForward, "is_possible", False)
        want = forward(cache)
    count = forward_of(lm).num_runs
    assert torch.equal(forward(cache), want)
    assert forward_of(lm).num_runs == count + 1


def test_threads_share_a_model() -> None:
    lm = compiled(llama())
    forests = [Nodes.from_trees(trees) for trees in TREES]

    def logits(number: int) -> torch.Tensor:
        return lm.forward(forests[number], filled(lm, LENGTHS[: len(TREES[number])]))

    wants = [logits(number) for number in range(len(TREES))]
    failed: list[int] = []

    def run(number: int) -> None:
        failed.extend(number for _ in range(15) if not torch.equal(logits(number), wants[number]))

    threads = [threading.Thread(target=run, args=[number]) for number in range(len(TREES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert forward_of(lm).num_runs > 50


@torch.inference_mode()
def test_a_model_that_computes_something_else_alone_keeps_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = direct.trace

    def wrong(*given: object) -> object:
        found = trace(*given)  # type: ignore[arg-type]
        behind = found.behind
        found.behind = lambda *some: behind(*some) * 1.001  # type: ignore[method-assign]
        return found

    monkeypatch.setattr(direct, "trace", wrong)
    lm = compiled(llama())
    assert lm.execution.direct is None
    assert same(steps(lm, LENGTHS, TREES[1]), by_modules(lm, LENGTHS, TREES[1]))


@torch.inference_mode()
def test_features_without_logits() -> None:
    lm = compiled(llama())
    cache = filled(lm, LENGTHS)
    nodes = Nodes.from_chains([[1, 2], [3], [4, 5]])
    wanted = Wanted(last_hidden=True, layer_inputs=(0, 2))
    whole = lm.forward_with(wanted, nodes, cache)
    count = forward_of(lm).num_runs
    found = lm.forward_with(wanted, nodes, cache, keep=slice(0, 0))
    assert forward_of(lm).num_runs == count + 1
    assert found.last_hidden is not None
    assert whole.last_hidden is not None
    assert torch.equal(found.last_hidden, whole.last_hidden)
    assert all(torch.equal(found.layer_inputs[layer], whole.layer_inputs[layer]) for layer in (0, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_norms_have_the_bits_of_the_modules(dtype: torch.dtype) -> None:
    """Of every width, whatever torch's vectors leave over: its sums are made in their order."""
    kernels = native.library()
    assert kernels is not None
    for size in (17, 64, 100, 576, 2048, 5120, 16384):
        norm = LlamaRMSNorm(size, 1e-5).to(dtype)
        norm.weight = nn.Parameter(torch.randn(size).to(dtype))
        fields = tail._NormFields(size, native.KINDS[dtype], norm.weight.data_ptr(), 1e-5)
        for num_rows in (1, 5, 40):
            states = 3 * torch.randn(1, num_rows, size).to(dtype)
            found = torch.empty_like(states)
            kernels.norm(ctypes.addressof(fields), states.data_ptr(), num_rows, found.data_ptr())
            assert torch.equal(found, norm(states)), (size, num_rows)


@pytest.mark.parametrize(("name", "has_tail"), [("llama", True), ("qwen3", True), ("gemma", False), ("granite", False)])
@torch.inference_mode()
def test_the_last_norm_and_the_output_embedding_run_in_the_same_call(name: str, has_tail: bool) -> None:
    """Not where weights of norms are counted from one, or logits are scaled."""
    lm = compiled(ARCHITECTURES[name].build("sdpa", torch.bfloat16))
    forward = forward_of(lm)
    cache, nodes = filled(lm, LENGTHS), Nodes.from_chains([[1, 2], [3], [4, 5]])
    lm.forward(nodes, cache)  # records the calls
    passed, apart = forward.run(nodes, cache, 0), forward.run(nodes, cache, 0, with_logits=False)
    assert passed is not None
    assert apart is not None
    assert (passed.logits is not None) == has_tail
    assert apart.logits is None
    assert torch.equal(passed.read, apart.read)


def test_a_changed_model_goes_without_modules_once_it_has_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.model.lm.LATER", 4)
    model = llama()
    lm = compiled(model)
    wanted = Wanted(last_hidden=True, layer_inputs=(0, 3))
    for factor in (2.0, 3.0):
        model.model.norm.variance_epsilon *= factor
        assert lm.refresh()
        assert lm.execution.direct is None
        cache, nodes, count = filled(lm, LENGTHS), Nodes.from_chains([[1, 2], [3], [4, 5]]), lm.num_forwards
        found = [lm.forward_with(wanted, nodes, cache) for _ in range(8)]
        assert lm.num_forwards == count + 8
        assert forward_of(lm).num_runs >= 3
        for output in found:
            assert torch.equal(output.logits, found[0].logits)
            assert torch.equal(output.last_hidden, found[0].last_hidden)
            assert all(torch.equal(output.layer_inputs[layer], found[0].layer_inputs[layer]) for layer in (0, 3))
