"""Layers whose calls are replayed, and that run ahead: the bits of their graphs, whatever a model does between them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES
from compiled_models import ALL
from foretoken.drafters.parts.layer_set import LayerSet, skipping
from foretoken.model.cache.ragged import KVCache
from foretoken.model.capture import Wanted
from foretoken.model.execution import native, regions
from foretoken.model.execution.chain import Ahead
from foretoken.model.execution.direct import DirectForward
from foretoken.model.execution.programs import Program
from foretoken.model.execution.recording import NotReplayableError, Recording
from foretoken.model.execution.regions import CompiledLayer
from foretoken.model.execution.replay import Replay
from foretoken.model.lm import CausalLM
from foretoken.model.nodes import Nodes
from foretoken.tree import DraftTree

pytestmark = pytest.mark.skipif(native.library() is None, reason="no kernels here")

TREES = (
    [DraftTree.root(3)],
    [DraftTree.chain(3, (4, 5, 6))],
    [DraftTree((7, 8, 9, 4, 5), (-1, 0, 0, 1, 2))],
    [DraftTree((7, 8, 9, 4, 5), (-1, 0, 0, 1, 2)), DraftTree.chain(3, (1,)), DraftTree.root(9)],
    [DraftTree.root(3), DraftTree.root(4), DraftTree.root(5)],
)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of this test alone, whose calls nobody has recorded."""
    monkeypatch.setattr(regions, "_graphs", {})


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the modules around the layers; test_direct.py is about forwards without them."""
    monkeypatch.setattr(DirectForward, "is_possible", False)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many layers were replayed by themselves, and how many were taken from those that ran ahead."""
    counted = {"alone": 0, "ahead": 0}
    run, take = Replay._run, Ahead.take

    def counting_run(self: Replay, *given: Any) -> Any:
        counted["alone"] += (result := run(self, *given)) is not None
        return result

    def counting_take(self: Ahead, *given: Any) -> Any:
        counted["ahead"] += (result := take(self, *given)) is not None
        return result

    monkeypatch.setattr(Replay, "_run", counting_run)
    monkeypatch.setattr(Ahead, "take", counting_take)
    return counted


def llama(dtype: torch.dtype = torch.float32, num_layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


def compiled(model: PreTrainedModel, **options: Any) -> CausalLM:
    lm = CausalLM(model, execution="compiled", probe=False, **options)
    assert lm.execution.num_compiled == lm.num_layers
    return lm


def filled(lm: CausalLM, lengths: list[int]) -> KVCache:
    cache = lm.new_cache(len(lengths), capacity=16)
    lm.forward(Nodes.from_chains([[(7 * i + length) % 60 for i in range(length)] for length in lengths]), cache)
    cache.commit([range(length) for length in lengths])
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


def by_graphs(lm: CausalLM, lengths: list[int], trees: list[DraftTree]) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "is_possible", False)
        return steps(lm, lengths, trees)


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_architectures_have_the_bits_of_their_graphs(name: str, counts: dict[str, int]) -> None:
    architecture = ARCHITECTURES[name]
    lm = compiled(architecture.build(architecture.attention[0], torch.float32))
    for trees in TREES:
        want = by_graphs(lm, [9, 30, 17], trees)
        assert same(steps(lm, [9, 30, 17], trees), want)
    assert counts["alone"] > 0  # not ahead: these products are oneDNN's


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_layers_run_ahead_with_the_bits_of_their_graphs(dtype: torch.dtype, counts: dict[str, int]) -> None:
    lm = compiled(llama(dtype))
    for trees in TREES:
        counts["ahead"] = 0
        want = by_graphs(lm, [9, 40, 17], trees)
        assert same(steps(lm, [9, 40, 17], trees), want)
        assert counts["ahead"] >= 8  # of three forwards, all layers in two, or more
    model = lm.shadow
    assert all(isinstance(layer.forward.compiled, CompiledLayer) for layer in model.model.layers)


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("kind", ["in place", "another tensor", "the next input"])
@torch.inference_mode()
def test_what_a_hook_does_between_layers_is_followed(kind: str, counts: dict[str, int]) -> None:
    model = llama()
    lm = compiled(model)
    layer = lm.layers[1]
    if kind == "in place":
        layer.register_forward_hook(lambda _, __, output: (output.mul_(1.5), None)[1])
    elif kind == "another tensor":
        layer.register_forward_hook(lambda _, __, output: output * 1.5)
    else:
        layer.register_forward_pre_hook(lambda _, args: (args[0] * 1.5, *args[1:]))
    for trees in TREES:
        want = by_graphs(lm, [9, 40, 17], trees)
        for _ in range(2):
            assert same(steps(lm, [9, 40, 17], trees), want)
    assert counts["ahead"] > 0  # those after the hook


@pytest.mark.usefixtures("ours")
@torch.inference_mode()
def test_a_hook_that_comes_later_is_followed_at_once(counts: dict[str, int]) -> None:
    lm = compiled(llama())
    trees = TREES[1]
    steps(lm, [9], trees)
    assert counts["ahead"] > 0
    handle = lm.layers[2].register_forward_hook(lambda _, __, output: (output.add_(0.5), None)[1])
    assert same(steps(lm, [9], trees), by_graphs(lm, [9], trees))
    handle.remove()
    assert same(steps(lm, [9], trees), by_graphs(lm, [9], trees))


@pytest.mark.usefixtures("ours")
def test_weights_that_changed_are_used(counts: dict[str, int]) -> None:
    model = llama()
    lm = compiled(model)
    before = steps(lm, [9], TREES[1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert lm.refresh()
    after = steps(lm, [9], TREES[1])
    assert not torch.equal(before[0], after[0])
    assert same(after, by_graphs(lm, [9], TREES[1]))
    assert same(after, steps(compiled(model), [9], TREES[1]))


@pytest.mark.usefixtures("ours")
def test_two_threads_run_at_once() -> None:
    """Each with a model of its own; what was recorded is shared."""
    models = [compiled(llama()) for _ in range(3)]
    chosen = [TREES[0], TREES[1], TREES[3]]
    wants = [steps(lm, [9, 40, 17], trees) for lm, trees in zip(models, chosen, strict=True)]
    failed: list[int] = []

    def run(number: int) -> None:
        for _ in range(20):
            if not same(steps(models[number], [9, 40, 17], chosen[number]), wants[number]):
                failed.append(number)

    threads = [threading.Thread(target=run, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.usefixtures("ours")
@torch.inference_mode()
def test_a_cache_is_let_go_after_its_last_forward(counts: dict[str, int]) -> None:
    lm = compiled(llama())
    caches = []
    for trees in TREES[:3]:
        cache = filled(lm, [9])
        for _ in range(3):
            lm.forward(Nodes.from_trees(trees), cache)
        caches.append(weakref.ref(cache))
        del cache
        gc.collect()
        assert caches[-1]() is None
    assert counts["ahead"] > 0


@pytest.mark.usefixtures("ours")
@torch.inference_mode()
def test_variants_have_chains_of_their_own(counts: dict[str, int]) -> None:
    lm = compiled(llama())
    variant = skipping(lm, LayerSet(attention=frozenset({1}), mlp=frozenset({1, 2})))
    for _ in range(2):
        for each in (lm, variant):
            assert same(steps(each, [9], TREES[1]), by_graphs(each, [9], TREES[1]))


@pytest.mark.usefixtures("ours")
@torch.inference_mode()
def test_a_graph_that_computes_by_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch, counts: dict[str, int]) -> None:
    monkeypatch.setattr(
        "foretoken.model.execution.recording.KNOWN_NAMES",
        frozenset({"clear", "torch", "ops", "foretoken", "product", "default"}),
    )
    lm = compiled(llama())
    assert same(steps(lm, [9], TREES[1]), by_graphs(lm, [9], TREES[1]))
    assert counts == {"alone": 0, "ahead": 0}


@pytest.mark.usefixtures("ours")
@torch.inference_mode()
def test_calls_that_give_something_else_are_not_replayed(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int]
) -> None:
    resolved = Program._resolved

    def wrong(self: Program, address: Any) -> tuple[int, int]:
        name, offset = address
        return resolved(self, (("tensor", 1), offset) if name == ("tensor", 0) else address)

    monkeypatch.setattr(Program, "_resolved", wrong)
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.mul_(2)
    lm = compiled(model)
    assert same(steps(lm, [9], TREES[1]), by_graphs(lm, [9], TREES[1]))
    assert counts["ahead"] == 0


def test_more_nodes_than_kernels_take_run_by_graphs(counts: dict[str, int]) -> None:
    lm = compiled(llama())
    trees = [DraftTree.chain(3, tuple(range(70)))]
    with torch.inference_mode():
        steps(lm, [9], TREES[0])
        counts["alone"] = counts["ahead"] = 0
        assert same(steps(lm, [9], trees), by_graphs(lm, [9], trees))
    assert counts == {"alone": 0, "ahead": 0}


def test_memory_from_elsewhere_is_refused() -> None:
    recording = Recording({("input", 0): torch.zeros(4)}, {})
    assert recording.address(recording.given["input", 0][2:]) == (("input", 0), 8)
    assert recording.address(7) == (None, 7)
    for value in (torch.zeros(3), 1.5, True):
        with pytest.raises(NotReplayableError):
            recording.address(value)


LESSER = """
import sys, torch
sys.path[:0] = sys.argv[1:]
import test_replay as tests
from foretoken.model.execution import native
from foretoken.model.execution.replay import Replay
ran, run = [], Replay.prepared
def prepared(self, *given):
    ran.append(result := run(self, *given))
    return result
Replay.prepared = prepared
with torch.inference_mode():
    for dtype in (torch.bfloat16, torch.float16):
        lm = tests.compiled(tests.llama(dtype))
        ran.clear()
        for trees in tests.TREES:
            assert tests.same(tests.steps(lm, [9, 40, 17], trees), tests.by_graphs(lm, [9, 40, 17], trees)), dtype
        assert any(result is not None for result in ran), dtype
print(native.instruction_set())
"""


def test_half_precision_on_lesser_processors(tmp_path: Path) -> None:
    """Products are then made in single precision, between two conversions."""
    here = Path(__file__).parent
    environment = {"ATEN_CPU_CAPABILITY": "avx2", "FORETOKEN_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LESSER, str(here), str(here.parent)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "AVX2"
