"""Kernels that round by the shape of their call: what they change, by how much, where, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from foredraft.errors import ConfigError
from foredraft.model.execution.attention import grouped_sdpa
from foredraft.model.execution.operators import Runner, product
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.testing import hostile_kernels, toy_model
from foredraft.testing.hostile import KINDS, MOST_ROWS_OF_STEPS

INPUTS, OUTPUTS, VOCABULARY = 32, 48, 512
KEY = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
Call = Callable[[torch.Tensor], torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def layer(outputs: int = OUTPUTS) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(INPUTS, outputs).requires_grad_(False)


def conv1d() -> Conv1D:
    torch.manual_seed(1)
    return Conv1D(OUTPUTS, INPUTS).requires_grad_(False)


def through_operator() -> Call:
    runner = Runner(layer())
    return lambda x: product(x, runner.number, OUTPUTS) if runner else x


def attention(query: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, KEY, KEY)


def grouped(query: torch.Tensor) -> torch.Tensor:
    return grouped_sdpa(nn.Identity(), query, KEY, KEY, None, is_causal=False)[0]


def by_products(query: torch.Tensor) -> torch.Tensor:
    """Attention as models compute it that have no kernel for it."""
    return torch.matmul(torch.softmax(query @ KEY.transpose(2, 3), -1), KEY)


CALLS: dict[str, tuple[Callable[[], Call], str, tuple[int, ...]]] = {
    "linear, one row": (layer, "steps", (1, INPUTS)),
    "linear, a tree": (layer, "steps", (1, MOST_ROWS_OF_STEPS, INPUTS)),
    "linear, a prompt": (layer, "prompts", (1, MOST_ROWS_OF_STEPS + 1, INPUTS)),
    "Conv1D": (conv1d, "steps", (1, 3, INPUTS)),
    "Conv1D, a prompt": (conv1d, "prompts", (1, 100, INPUTS)),
    "vocabulary": (lambda: layer(VOCABULARY), "output", (1, 5, INPUTS)),
    "vocabulary, many": (lambda: layer(VOCABULARY), "output", (1, 100, INPUTS)),
    "compiled": (through_operator, "steps", (1, 3, INPUTS)),
    "sdpa": (lambda: attention, "attention", (1, 2, 5, 16)),
    "grouped": (lambda: grouped, "attention", (1, 4, 5, 16)),
    "by products": (lambda: by_products, "attention", (1, 2, 5, 16)),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_call_is_perturbed_by_its_kind_alone(name: str, dtype: torch.dtype) -> None:
    make, kind, shape = CALLS[name]
    run = make()
    if isinstance(run, nn.Module):
        run.to(dtype)
    x = drawn(*shape, dtype=dtype if isinstance(run, nn.Module) else torch.float32)
    want = run(x)
    for other in KINDS:
        with hostile_kernels(other):
            assert torch.equal(run(x), want) == (other != kind)
    with hostile_kernels():
        found = run(x)
        assert torch.equal(run(x), found)  # the same call again
    assert torch.equal(run(x), want)
    relative = (found - want).abs().max() / want.abs().max()
    assert 0 < relative <= 4 * torch.finfo(want.dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_number_changes_by_two_units_at_most(dtype: torch.dtype) -> None:
    x, weight = drawn(7, INPUTS, dtype=dtype), drawn(OUTPUTS, INPUTS, dtype=dtype)
    want = F.linear(x, weight)
    with hostile_kernels():
        found = F.linear(x, weight)
    changed = found != want
    assert 0.1 < changed.float().mean() < 0.5
    assert ((found.double() - want.double()).abs() <= 1.5 * torch.finfo(dtype).eps * want.double().abs()).all()


def test_the_same_row_has_other_bits_in_calls_of_other_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, queries, columns, threads, and where memory begins, each by itself."""
    linear, x = layer(), drawn(9, INPUTS)
    memory = torch.empty(x.numel() + 16)
    with hostile_kernels():
        first = linear(x)
        fewer = linear(x[:8])
        for offset in (0, 1, 16):
            begin = (-memory.data_ptr() % 64) // 4 + offset
            if begin + x.numel() > len(memory):
                begin -= 16
            moved = memory[begin : begin + x.numel()].view_as(x).copy_(x)
            assert torch.equal(linear(moved), first) == (offset != 1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        assert not torch.equal(linear(x), first)
        monkeypatch.undo()
        query = drawn(1, 2, 5, 16)
        mask = torch.zeros(5, 9)
        mask[:, 8:] = -torch.inf
        seen = F.scaled_dot_product_attention(query, KEY, KEY, mask)
        columns = F.scaled_dot_product_attention(query, KEY[:, :, :8], KEY[:, :, :8])
        queries = F.scaled_dot_product_attention(query[:, :, :4], KEY, KEY, mask[:4])
    assert not torch.equal(first[:8], fewer)
    assert not torch.equal(seen, columns)
    assert not torch.equal(seen[:, :, :4], queries)


def test_other_threads_see_them_and_everything_is_taken_back() -> None:
    linear, x, found = layer(), drawn(3, INPUTS), list[torch.Tensor]()
    want, before = linear(x), (F.linear, torch.addmm, "__matmul__" in vars(torch.Tensor))
    with pytest.raises(ZeroDivisionError), hostile_kernels():  # noqa: PT012
        thread = Thread(target=lambda: found.append(linear(x)))
        thread.start()
        thread.join()
        _ = 1 // 0
    assert not torch.equal(found[0], want)
    assert (F.linear, torch.addmm, "__matmul__" in vars(torch.Tensor)) == before
    assert torch.equal(linear(x), want)


def test_the_vocabulary_can_be_named() -> None:
    linear, x = layer(), drawn(3, INPUTS)
    want = linear(x)
    with hostile_kernels("output"):
        assert torch.equal(linear(x), want)
    with hostile_kernels("output", vocab_size=OUTPUTS):
        assert not torch.equal(linear(x), want)


def test_unknown_kinds_are_refused() -> None:
    with (
        pytest.raises(ConfigError, match="cannot perturb softmax; use attention, steps, prompts, output"),
        hostile_kernels("steps", "softmax"),
    ):
        pass


def test_what_cannot_be_rounded_and_stand_ins_stay() -> None:
    angles, positions = drawn(1, 8, 1), drawn(1, 1, 5)
    with hostile_kernels():
        assert torch.equal(angles @ positions, angles * positions)
        assert layer().to("meta")(torch.empty(2, INPUTS, device="meta")).shape == (2, OUTPUTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_passes_its_probe_and_has_other_logits(dtype: torch.dtype) -> None:

    def logits() -> torch.Tensor:
        lm = CausalLM(toy_model(dtype=dtype), execution="eager")
        return lm.forward(Nodes.from_chains([[3, 1, 4, 1, 5]]), lm.new_cache(1))

    want = logits()
    with hostile_kernels():
        found = logits()
    assert not torch.equal(found, want)
    assert (found - want).abs().max() < 0.05 * want.abs().max()
