"""Forwards in one call, without modules: what the modules compute, with the same bits whatever runs beside a node."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES, but_variants, in_turns
from compiled_models import UNCOMPILED
from foredraft.drafters.parts.layer_set import LayerSet, skipping
from foredraft.model.cache.ragged import KVCache
from foredraft.model.cache.views import ViewCache
from foredraft.model.execution import ends, native_program, tracing
from foredraft.model.execution.native_program import NativeProgram
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes, Wanted
from foredraft.native import abi
from foredraft.native import library as native
from foredraft.tree import DraftTree
from fresh import forget_programs

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")

BY_MODULES = {
    **{name: "own kernels" for name, why in UNCOMPILED.items() if why == "its own attention code"},
    "deepseek-v3": "their projections have 48 and 64 outputs, which are no multiples of 32",
    "qwen3-moe": "their projections have 48 and 64 outputs, which are no multiples of 32",
}
LENGTHS = [9, 40, 17]
TREES = (
    [DraftTree.root(3)],
    [DraftTree.chain(3, (4, 5, 6))],
    [DraftTree((7, 8, 9, 4, 5), (-1, 0, 0, 1, 2))],
    [DraftTree((7, 8, 9, 4, 5), (-1, 0, 0, 1, 2)), DraftTree.chain(3, (1,)), DraftTree.root(9)],
    [DraftTree.root(3), DraftTree.root(4), DraftTree.root(5)],
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.015}
"""Of strong random weights, which make small differences large."""


def llama(dtype: torch.dtype = torch.float32, num_layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def recorded(model: PreTrainedModel, **options: Any) -> CausalLM:
    lm = CausalLM(model, execution="packed", probe=False, **options)
    assert lm.execution.program is not None, lm.execution.why_no_program
    return lm


def program_of(lm: CausalLM) -> NativeProgram:
    found = lm.execution.program
    assert found is not None, lm.execution.why_no_program
    return found


def filled(lm: CausalLM, lengths: list[int]) -> KVCache:
    cache = lm.new_cache(len(lengths), capacity=16)
    for row, length in enumerate(lengths):
        for first in range(0, length, 50):
            chain = [(7 * i + length) % 60 for i in range(first, min(first + 50, length))]
            lm.forward(Nodes.from_chains([chain]), cache, first_row=row, keep=slice(0, 0))
            cache.commit([range(len(chain))], row)
    return cache


def steps(lm: CausalLM, lengths: list[int], trees: list[DraftTree]) -> list[torch.Tensor]:
    """Logits and features of three forwards over these trees, one after another."""
    found, cache = [], filled(lm, lengths[: len(trees)])
    for _ in range(3):
        wanted = Wanted(last_hidden=True, layer_inputs=tuple(range(1, lm.num_layers)))
        output = lm.forward_with(wanted, Nodes.from_trees(trees), cache)
        for row, tree in enumerate(trees):
            states = [output.last_hidden, *output.layer_inputs.values()]
            found += [output.logits[row][: len(tree)], *(each[row][: len(tree)] for each in states)]
        cache.commit([[0]] * len(trees))
    return found


def by_modules(lm: CausalLM, lengths: list[int], trees: list[DraftTree]) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeProgram, "is_possible", False)
        return steps(lm, lengths, trees)


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def close(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
    return all(float((a - b).norm()) <= TOLERANCE[want[0].dtype] * float(b.norm()) for a, b in pairs)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "dtype"),
    but_variants(in_turns(["float32", "bfloat16", "float16"])),
)
def test_architectures_compute_what_their_modules_do(name: str, dtype: str) -> None:
    """And a node has its bits in any tree, row and batch."""
    architecture = ARCHITECTURES[name]
    lm = CausalLM(architecture.build(architecture.attention[0], getattr(torch, dtype)), execution="packed", probe=False)
    if name in BY_MODULES:
        assert lm.execution.program is None
        assert BY_MODULES[name] in lm.execution.why_no_program
        return
    program = program_of(lm)
    for trees in TREES:
        count, found = program.num_runs, steps(lm, LENGTHS, trees)
        assert program.num_runs >= count + 3
        assert close(found, by_modules(lm, LENGTHS, trees))
    alone = lm.new_cache(1, capacity=16)
    cache = filled(lm, LENGTHS)
    tree = TREES[3][0]
    forest = lm.forward(Nodes.from_trees(TREES[3]), cache)
    for path in ((0, 1, 3), (0, 2, 4)):
        alone = filled(lm, LENGTHS[:1])
        for node in path:
            logits = lm.forward(Nodes.from_chains([[tree.tokens[node]]]), alone)
            assert torch.equal(logits[0, 0], forest[0, node])
            alone.commit([range(1)])


@torch.inference_mode()
def test_more_nodes_than_a_step_has_run_by_modules() -> None:
    lm = recorded(llama())
    for size, count in ((64, 1), (65, 0)):
        before = program_of(lm).num_runs
        lm.forward(Nodes.from_chains([[i % 60 for i in range(size)]]), lm.new_cache(1))
        assert program_of(lm).num_runs == before + count


@torch.inference_mode()
def test_logits_of_some_nodes_are_those_of_all() -> None:
    lm = recorded(llama())
    cache, nodes = filled(lm, LENGTHS), Nodes.from_chains([[1, 2, 3], [4], [5, 6]])
    whole, count = lm.forward(nodes, cache), program_of(lm).num_runs
    for keep in (slice(0, 1), slice(1, 3), slice(0, 0)):
        found = lm.forward(nodes, cache, keep=keep)
        wanted = whole[:, keep]
        assert found.shape == wanted.shape
        for row, size in enumerate(nodes.counts):
            real = len(range(size)[keep])
            assert torch.equal(found[row, :real], wanted[row, :real])
    listed = lm.forward(nodes, cache, listed=True)
    assert [len(listed[row]) for row in range(3)] == [3, 1, 2]
    assert all(torch.equal(listed[row], whole[row, : len(listed[row])]) for row in range(3))
    assert program_of(lm).num_runs == count + 4


@pytest.mark.parametrize("place", ["norm", "output", "model", "layer", "everywhere"])
@torch.inference_mode()
def test_hooks_are_followed_and_forgotten(place: str) -> None:
    lm = recorded(llama())
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
        want, count = by_modules(lm, LENGTHS, TREES[1]), program_of(lm).num_runs
        assert not close(plain, want)
        assert same(steps(lm, LENGTHS, TREES[1]), want)
        assert program_of(lm).num_runs == count
    finally:
        handle.remove()
    assert same(steps(lm, LENGTHS, TREES[1]), plain)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["in place", "by others", "norms of layers", "matrices", "all", "another epsilon"])
def test_what_changed_in_a_model_is_used(kind: str) -> None:
    model = llama()
    lm = recorded(model)
    before = steps(lm, LENGTHS, TREES[1])
    with torch.no_grad():
        if kind == "in place":
            model.model.embed_tokens.weight.mul_(1.1)
        elif kind == "by others":
            model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data * 1.1
            model.model.norm.weight.data = model.model.norm.weight.data * 1.1
        elif kind == "norms of layers":
            for layer in model.model.layers:
                layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 1.1
        elif kind == "matrices":
            model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
        elif kind == "all":
            for parameter in model.parameters():
                parameter.mul_(1.01)
        else:
            model.model.norm.variance_epsilon *= 1e4
    assert lm.refresh() or kind in ("by others", "norms of layers")
    after = steps(lm, LENGTHS, TREES[1])
    assert not torch.equal(before[0], after[0])
    assert same(after, steps(recorded(model), LENGTHS, TREES[1]))
    assert close(after, by_modules(lm, LENGTHS, TREES[1]))


@torch.inference_mode()
def test_a_context_may_end_where_its_angles_do() -> None:
    lm = recorded(llama())
    cache = filled(lm, [252])
    count = program_of(lm).num_runs
    lm.forward(Nodes.from_chains([[1, 2, 3, 4]]), cache)
    assert program_of(lm).num_runs == count + 1


@torch.inference_mode()
def test_a_token_that_there_is_not_raises_what_the_modules_raise() -> None:
    lm = recorded(llama())
    for token in (160, -1):
        nodes = Nodes.from_chains([[3, token]])
        with pytest.raises(IndexError):
            lm.forward(nodes, filled(lm, [9]))


@torch.inference_mode()
def test_logits_without_numbers_stay_without() -> None:
    model = llama()
    model.model.embed_tokens.weight[57] = torch.nan
    lm = recorded(model)
    logits = lm.forward(Nodes.from_trees([DraftTree((3, 57, 4), (-1, 0, 0))]), lm.new_cache(1))
    assert logits[0].isnan().all(-1).tolist() == [False, True, False]


@torch.inference_mode()
def test_rows_whose_positions_are_ahead_of_their_columns() -> None:
    lm = recorded(llama())
    source = filled(lm, [40])
    chosen = torch.tensor([0, 1, 2, 3, 20, 21, 37, 38, 39]).expand(2, -1)  # of every head

    def forward() -> list[torch.Tensor]:
        view = ViewCache(lm.num_layers, num_rows=1)
        view.choose(0, source, [chosen] * lm.num_layers)
        return [lm.forward(Nodes.from_chains([[5, 6, 7]]), view)]

    count, found = program_of(lm).num_runs, forward()
    assert program_of(lm).num_runs == count + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeProgram, "is_possible", False)
        assert close(found, forward())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2-sliding"])
@torch.inference_mode()
def test_trees_that_are_fed_level_by_level_have_the_bits_of_those_fed_at_once(name: str) -> None:
    """Nodes see those of their ancestors that were committed before, and positions count from the root."""
    lm = recorded(ARCHITECTURES[name].build("sdpa", torch.float32))
    trees = [DraftTree((7, 8, 9, 4, 5, 6), (-1, 0, 0, 1, 2, 2)), DraftTree((3, 1, 2, 9), (-1, 0, 0, 2))]
    depths = torch.tensor([[0, 1, 1, 2, 2, 2], [0, 1, 1, 2, 2, 2]])
    ancestors = torch.zeros(2, 6, 6, dtype=torch.bool)
    for row, tree in enumerate(trees):
        ancestors[row, : len(tree), : len(tree)] = torch.from_numpy(tree.ancestor_mask)
    whole = lm.forward(Nodes.from_trees(trees), filled(lm, [9, 40]))
    cache, count = filled(lm, [9, 40]), program_of(lm).num_runs
    for first, last, counts in ((0, 1, (1, 1)), (1, 3, (2, 2)), (3, 6, (3, 1))):
        tokens = torch.tensor([[*tree.tokens[first:last], *[3] * (last - len(tree))] for tree in trees])
        seen = ancestors[:, first:last, :last].contiguous()
        nodes = Nodes(tokens, depths[:, :last].contiguous(), counts, seen, first)
        logits = lm.forward(nodes, cache)
        for row in range(2):
            assert torch.equal(logits[row, : counts[row]], whole[row, first : first + counts[row]])
        cache.commit([range(count) for count in counts])
    assert program_of(lm).num_runs == count + 3


@torch.inference_mode()
def test_caches_are_told_apart_and_let_go() -> None:
    lm = recorded(llama())
    want = steps(lm, LENGTHS, TREES[1])
    for _ in range(3):
        assert same(steps(lm, LENGTHS, TREES[1]), want)
    cache = filled(lm, [9])
    lm.forward(Nodes.from_chains([[1, 2]]), cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("threads_of_torch")
@pytest.mark.parametrize("least_shared", [0, native_program.LEAST_SHARED])
def test_threads_share_a_model_on_any_number_of_threads(least_shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a forward keeps threads together for its products, more than there are processors to run them."""
    monkeypatch.setattr(native_program, "LEAST_SHARED", least_shared)
    lm = recorded(llama())
    forests = [Nodes.from_trees(trees) for trees in TREES]

    def logits(number: int) -> torch.Tensor:
        return lm.forward(forests[number], filled(lm, LENGTHS[: len(TREES[number])]))

    wants = [logits(number) for number in range(len(TREES))]
    failed: list[int] = []

    def run(number: int) -> None:
        torch.set_num_threads(1 + number % 3)
        failed.extend(number for _ in range(15) if not torch.equal(logits(number), wants[number]))

    threads = [threading.Thread(target=run, args=[number]) for number in range(len(TREES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert program_of(lm).num_runs > 50


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", ["a code", "the last states", "an input"])
@torch.inference_mode()
def test_a_program_that_computes_something_else_is_not_taken(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor is it stored. The control: without the fault the same model has one."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    forget_programs(monkeypatch)
    if fault == "a code":
        monkeypatch.setitem(abi.CODES, "rsqrt", abi.CODES["sqrt"])
    elif fault == "an input":
        take = tracing.LayerProgram.__init__

        def wrong(self: Any, *given: Any) -> None:
            take(self, *given)
            given[1].inputs = (0, *sorted(given[1].inputs[1:], reverse=True))  # sines for cosines

        monkeypatch.setattr(tracing.LayerProgram, "__init__", wrong)
    else:
        trace = ends.trace_ends
        monkeypatch.setattr(
            "foredraft.model.execution.execution.trace_ends", lambda *given: _without_norm(trace(*given))
        )
    lm = CausalLM(llama(), execution="packed", probe=False)
    assert lm.execution.program is None
    assert not [*tmp_path.glob("programs/*")]
    monkeypatch.undo()
    forget_programs(monkeypatch)
    assert recorded(llama())


def _without_norm(found: Any) -> Any:
    found.behind.constants.mul_(1e6)
    return found


@torch.inference_mode()
def test_features_without_logits() -> None:
    lm = recorded(llama())
    cache = filled(lm, LENGTHS)
    nodes = Nodes.from_chains([[1, 2], [3], [4, 5]])
    wanted = Wanted(last_hidden=True, layer_inputs=(0, 2))
    whole = lm.forward_with(wanted, nodes, cache)
    count = program_of(lm).num_runs
    found = lm.forward_with(wanted, nodes, cache, keep=slice(0, 0))
    assert program_of(lm).num_runs == count + 1
    assert found.last_hidden is not None
    assert whole.last_hidden is not None
    assert torch.equal(found.last_hidden, whole.last_hidden)
    assert all(torch.equal(found.layer_inputs[layer], whole.layer_inputs[layer]) for layer in (0, 2))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "phi", "gpt2", "opt", "olmo2"])
def test_variants_without_sublayers_have_programs_of_their_own(name: str) -> None:
    lm = recorded(llama() if name == "llama" else ARCHITECTURES[name].build("sdpa", torch.float32))
    count = program_of(lm).num_runs
    for chosen in (LayerSet(attention=frozenset({1}), mlp=frozenset({0})), LayerSet(frozenset({1}), frozenset({1}))):
        variant = skipping(lm, chosen)
        before = program_of(variant).num_runs
        found = steps(variant, [9], TREES[1])
        assert program_of(variant).num_runs > before
        assert close(found, by_modules(variant, [9], TREES[1]))
        assert not close(found, steps(lm, [9], TREES[1]))
    assert program_of(lm).num_runs > count


@pytest.mark.full
def test_prompts_are_compiled_when_the_first_long_one_comes() -> None:
    model = llama()
    lm = CausalLM(model, execution="compiled")
    assert program_of(lm).is_possible
    assert lm.execution.num_compiled == 0
    steps(lm, [9], TREES[1])
    assert lm.execution.num_compiled == 0
    lm.forward(Nodes.from_chains([[i % 60 for i in range(80)]]), lm.new_cache(1))
    assert lm.execution.num_compiled == lm.num_layers


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["compiled", "packed"])
@pytest.mark.parametrize("name", ["llama", "phi", "gpt2"])
def test_steps_stay_native_after_a_long_prompt(name: str, kind: str) -> None:
    """What modules run by once a long prompt has come was taken for a forward that somebody had replaced: steps then
    ran by modules for good, with other bits."""
    lm = CausalLM(llama() if name == "llama" else ARCHITECTURES[name].build("sdpa", torch.float32), execution=kind)
    layers = LayerSet(attention=frozenset({1}), mlp=frozenset({0}))
    early = skipping(lm, layers)
    want = [steps(each, [9], TREES[1]) for each in (lm, early)]
    for each in (lm, early):
        each.forward(Nodes.from_chains([[i % 60 for i in range(80)]]), each.new_cache(1))
    late = skipping(lm, layers)
    for each in (lm, early, late):
        each.execution.refresh_if_stale()
    before = [program_of(each).num_runs for each in (lm, early, late)]
    got = [steps(each, [9], TREES[1]) for each in (lm, early, late)]
    assert all(program_of(each).num_runs > count for each, count in zip((lm, early, late), before, strict=True))
    assert same(got[0], want[0])
    assert same(got[1], want[1])
    assert same(got[2], want[1])


def test_a_trace_that_fails_prints_nothing() -> None:
    """Torch logged a traceback of twenty lines for every model whose experts cannot be traced, which then ran."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    linear = nn.Linear(4, 4)
    try:
        with pytest.raises(RuntimeError):
            tracing.traced(
                lambda nodes, numbers, tensors, inputs: torch._grouped_mm(tensors[0], tensors[0], tensors[1].int()),
                [(linear, "weight"), (linear, "bias")],
                0,
                lambda mode, nodes: (),
            )
        assert not said
        logger.error("heard")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in said] == ["heard"]
