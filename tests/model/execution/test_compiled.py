"""Decoder layers that run compiled: the same logits, features, drafts and bits; and what happens where they cannot."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from transformers import PreTrainedModel

from compiled_models import ALL, UNCOMPILED, build
from foredraft.drafters.parts.layer_set import LayerSet, skipping
from foredraft.model import nodes as nodes_of
from foredraft.model.cache.ragged import KVCache
from foredraft.model.execution import compiled_layers
from foredraft.model.execution.compiled_layers import worth_compiling
from foredraft.model.execution.inductor import Segment
from foredraft.model.execution.native_program import NativeProgram
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes, Wanted
from foredraft.native.build import cpp_compiler
from foredraft.native.library import library
from foredraft.tree import DraftTree
from fresh import forget_compiled_layers, num_compiled_layers
from mutants import with_result
from programs import forked

pytestmark = [
    pytest.mark.skipif(library() is None, reason="only packed models are compiled"),
    pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler"),
]

TREES = (
    [DraftTree.root(3)],
    [DraftTree.chain(3, (4, 5, 6))],
    [DraftTree((7, 8, 9, 4, 5), (-1, 0, 0, 1, 2)), DraftTree.chain(3, (1,)), DraftTree.root(9)],
)


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[CausalLM, CausalLM]]:
    """Adapters that were made: eager and compiled."""
    return {}


def pair(pairs: dict[str, tuple[CausalLM, CausalLM]], name: str) -> tuple[CausalLM, CausalLM]:
    if name not in pairs:
        model = build(name)
        eager = CausalLM(model, execution="eager", probe=False)
        pairs[name] = eager, compiled(model)
    return pairs[name]


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run modules, whatever the number of nodes; test_native_program.py is about forwards without them."""
    monkeypatch.setattr(NativeProgram, "is_possible", False)


@pytest.fixture
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process so far."""
    forget_compiled_layers(monkeypatch)


def compiled(model: PreTrainedModel, **options: Any) -> CausalLM:
    """An adapter whose layers are compiled, as they are for the first long prompt."""
    lm = CausalLM(model, execution="compiled", **options)
    lm.execution.make_ready()
    return lm


def filled(lm: CausalLM, lengths: list[int]) -> KVCache:
    """A cache with prompts of these lengths."""
    cache = lm.new_cache(len(lengths))
    lm.forward(Nodes.from_chains([[(7 * i + length) % 60 for i in range(length)] for length in lengths]), cache)
    cache.commit([range(length) for length in lengths])
    return cache


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ALL)
def test_every_shape_of_a_step_runs_the_same_graphs(name: str, pairs: Any) -> None:
    eager, compiled = pair(pairs, name)
    assert compiled.execution.num_compiled == compiled.num_layers
    assert {check.verdict for check in compiled.probe.checks} == {"right"}
    num_graphs = num_compiled_layers()
    for trees in TREES:
        lengths = [9, 30, 17][: len(trees)]
        nodes = Nodes.from_trees(trees)
        want, got = (lm.forward(nodes, filled(lm, lengths)) for lm in (eager, compiled))
        for row, tree in enumerate(trees):
            assert error(got[row, : len(tree)], want[row, : len(tree)]) < 2e-5
    assert num_compiled_layers() == num_graphs


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_long_prompts_run_attention_in_blocks(name: str, pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_of, "BLOCK", 8)
    nodes = Nodes.from_chains([[(5 * i) % 60 for i in range(29)]])
    want, got = (lm.forward(nodes, filled(lm, [9])) for lm in pair(pairs, name))
    assert error(got, want) < 2e-5


@pytest.mark.parametrize("name", ALL)
def test_features_are_captured_between_compiled_layers(name: str, pairs: Any) -> None:
    eager, compiled = pair(pairs, name)
    wanted = Wanted(last_hidden=True, layer_inputs=(0, 1))
    nodes = Nodes.from_trees(TREES[2])
    want, got = (lm.forward_with(wanted, nodes, filled(lm, [9, 30, 17])) for lm in (eager, compiled))
    for row, tree in enumerate(TREES[2]):
        size = len(tree)
        assert error(got.last_hidden[row, :size], want.last_hidden[row, :size]) < 2e-5
        for layer in (0, 1):
            assert error(got.layer_inputs[layer][row, :size], want.layer_inputs[layer][row, :size]) < 2e-5


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", UNCOMPILED)
def test_models_that_cannot_be_compiled_run_packed_and_say_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = build(name)
    lm = compiled(model, probe=False)
    assert lm.execution.num_compiled == 0
    assert UNCOMPILED[name] in lm.execution.describe()
    assert [record.message for record in caplog.records if "run packed and not compiled" in record.message]
    eager, nodes = CausalLM(model, execution="eager", probe=False), Nodes.from_chains([[3, 4, 5]])
    assert error(lm.forward(nodes, filled(lm, [9])), eager.forward(nodes, filled(eager, [9]))) < 2e-5


def test_sublayers_are_left_out_of_compiled_layers(pairs: Any) -> None:
    eager, compiled = pair(pairs, "llama")
    nodes = Nodes.from_chains([[3, 4, 5]])
    for layer_set in (LayerSet((0,), ()), LayerSet((), (1,)), LayerSet((1,), (1,))):
        want, got = (skipping(lm, layer_set).forward(nodes, filled(lm, [9])) for lm in (eager, compiled))
        assert error(got, want) < 2e-5
    assert error(compiled.forward(nodes, filled(compiled, [9])), eager.forward(nodes, filled(eager, [9]))) < 2e-5


def test_writes_into_weights_are_followed() -> None:
    model = build("llama")
    lm, eager = (
        compiled(model, probe=False),
        CausalLM(model, execution="eager", probe=False),
    )
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        model.model.layers[1].input_layernorm.weight.mul_(3)
    assert lm.refresh()
    nodes = Nodes.from_chains([[3, 4, 5]])
    assert error(lm.forward(nodes, filled(lm, [9])), eager.forward(nodes, filled(eager, [9]))) < 2e-5


def test_hooks_inside_of_a_layer_keep_running() -> None:
    model = build("llama")
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    lm = compiled(model, probe=False)
    assert lm.execution.num_compiled == 1
    assert "has hooks" in lm.execution.describe()
    seen.clear()
    lm.forward(Nodes.from_chains([[3]]), lm.new_cache(1))
    assert seen


@pytest.mark.usefixtures("_nothing_compiled")
def test_layers_that_compute_something_else_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with_result(compiled_layers, "grouped_sdpa", lambda found, _: (found[0] * 1.1, found[1]))(monkeypatch)
    lm = compiled(build("llama"), probe=False)
    assert lm.execution.num_compiled == 0
    assert "differs from its modules" in lm.execution.describe()


@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.sample(2)
@pytest.mark.parametrize("trouble", ["unwritable", "no compiler", "torch"])
def test_what_cannot_be_compiled_runs_packed(trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if trouble == "unwritable":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    elif trouble == "no compiler":
        monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
        monkeypatch.setenv("CXX", "no-such-compiler")
    else:
        monkeypatch.delattr(torch._inductor.compile_fx, "compile_fx_inner")
    model = build("llama")
    compilers = ("no-such-compiler",) if trouble == "no compiler" else inductor_config.cpp.cxx
    with inductor_config.patch({"cpp.cxx": compilers}):
        lm = compiled(model)
    eager = CausalLM(model, execution="eager", probe=False)
    assert lm.execution.num_compiled == 0
    assert "0 decoder layers compiled, " in lm.execution.describe()
    nodes = Nodes.from_chains([[3, 4, 5]])
    assert error(lm.forward(nodes, filled(lm, [9])), eager.forward(nodes, filled(eager, [9]))) < 2e-5


def test_small_models_and_machines_without_a_compiler_are_not_compiled_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = nn.Linear(8192, 4096, device="meta")
    assert worth_compiling([large])
    assert not worth_compiling([nn.Linear(64, 64)])
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not worth_compiling([large])


@pytest.mark.usefixtures("_nothing_compiled")
def test_an_interrupted_compilation_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = str(tmp_path / "mine")  # torch makes relative paths absolute when inductor is imported
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", mine)
    model = build("llama")
    with monkeypatch.context() as patch:

        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(compiled_layers, "compile_segment", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compiled(model, probe=False)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == mine
    assert compiled(model, probe=False).execution.num_compiled == 2


@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.full
def test_two_threads_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = str(tmp_path / "mine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", mine)
    made: list[CausalLM] = []

    def make(name: str) -> None:
        made.append(compiled(build(name), probe=False))

    threads = [threading.Thread(target=make, args=[name]) for name in ("llama", "gpt2", "llama")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lm.execution.num_compiled for lm in made] == [2, 2, 2]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == mine


def logits(lm: CausalLM) -> torch.Tensor:
    return lm.forward(Nodes.from_chains([[3, 4, 5]]), lm.new_cache(1))


def status_of(fork: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])


def compile_and_fork() -> tuple[int, int, int]:
    """How a fork ends that is made while layers are compiled, one that decodes by them, and how many they are."""
    made, is_inside, may_go_on = [], threading.Event(), threading.Event()
    compile_segment = compiled_layers.compile_segment

    def compile_slowly(*given: Any) -> Segment:
        is_inside.set()
        may_go_on.wait(60)
        return compile_segment(*given)

    compiled_layers.compile_segment = compile_slowly
    thread = threading.Thread(target=lambda: made.append(compiled(build("llama"), probe=False)))
    thread.start()
    is_inside.wait(60)
    early = os.fork()
    if not early:
        os._exit(0)
    may_go_on.set()
    thread.join()
    want = logits(made[0])
    late = os.fork()
    if not late:
        os._exit(0 if torch.equal(logits(made[0]), want) else 3)
    return status_of(early), status_of(late), made[0].execution.num_compiled


@pytest.mark.usefixtures("_nothing_compiled")
def test_processes_fork_while_and_after_layers_are_compiled() -> None:
    assert forked(compile_and_fork) == [(0, 0, 2)]
