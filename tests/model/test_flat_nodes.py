"""Rows of different width as one list: what is not attention runs over real nodes, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

from foredraft.accept import accept, choose_all
from foredraft.config.sampling import SamplingParams
from foredraft.engine.row import Row
from foredraft.engine.stopping import StopChecker
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import FlatNodes, NodeLogits, Nodes, Wanted
from foredraft.sampling.distribution import Sampler
from foredraft.testing import toy_model
from foredraft.tree import DraftTree

TREES = [
    DraftTree.from_paths(3, [[4, 5, 6], [4, 7], [8]]),
    DraftTree.root(9),
    DraftTree.from_paths(1, [[2, 3], [5, 6, 7]]),
    DraftTree.root(2),
]
PREFIXES = [[5, 6, 7, 8, 9], [1, 2], [3], [7, 7, 7, 7, 7, 7, 7]]


@pytest.fixture
def lm() -> CausalLM:
    return CausalLM(toy_model(64), execution="packed", probe=False)


def prefilled(lm: CausalLM) -> Any:
    cache = lm.new_cache(len(PREFIXES), capacity=16)
    lm.forward(Nodes.from_chains(PREFIXES), cache, keep=slice(0, 0))
    cache.commit([range(len(prefix)) for prefix in PREFIXES])
    return cache


def as_rectangle(lm: CausalLM) -> CausalLM:
    other = lm.variant("rectangle", lambda *_: None)
    other._takes_lists = False
    return other


@pytest.mark.parametrize("keep", [None, slice(0, 0), slice(1, None), slice(0, 2), slice(2, 3)])
def test_logits_features_and_cache_are_those_of_the_rectangle(lm: CausalLM, keep: slice | None) -> None:
    nodes, wanted = Nodes.from_trees(TREES), Wanted(last_hidden=True, layer_inputs=(1,))
    outputs, caches = [], []
    for each in (lm, as_rectangle(lm)):
        caches.append(prefilled(each))
        outputs.append(each.forward_with(wanted, nodes, caches[-1], keep=keep))
        caches[-1].commit([range(len(tree)) for tree in TREES])
    got, want = outputs
    assert got.logits.shape == want.logits.shape
    columns = range(nodes.width) if keep is None else range(nodes.width)[keep]
    for row, tree in enumerate(TREES):
        real = [place for place, column in enumerate(columns) if column < len(tree)]
        assert torch.allclose(got.logits[row, real], want.logits[row, real], atol=1e-12)
        for own, others in (
            (got.last_hidden, want.last_hidden),
            (got.layer_inputs[1], want.layer_inputs[1]),
        ):
            assert torch.allclose(own[row, : len(tree)], others[row, : len(tree)], atol=1e-12)
        length = len(PREFIXES[row]) + len(tree)
        for pair, other in zip(caches[0].export(row, length), caches[1].export(row, length), strict=True):
            assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(pair, other, strict=True))


@pytest.mark.parametrize("rule", ["match", "standard"])
@pytest.mark.parametrize("temperatures", [(0.0,) * 4, (0.8,) * 4, (0.0, 0.8, 0.0, 0.8), (0.8, 0.0, 0.0, 0.0)])
def test_choices_and_verdicts_do_not_depend_on_the_form_of_logits(rule: str, temperatures: tuple[float, ...]) -> None:
    """Three forms: a list, a rectangle, and one with a row too many; a row alone has the verdict of the batch."""
    rows = []
    for i, (temperature, prefix) in enumerate(zip(temperatures, PREFIXES, strict=True)):
        params = SamplingParams(temperature=temperature, top_p=0.9)
        sampler = Sampler(params, vocab_size=64, prompt_ids=prefix)
        sampler.seed = i
        checker = StopChecker(params, (), len(prefix), 99)
        rows.append(Row(i, str(i), 0, [*prefix, TREES[i].tokens[0]], len(prefix), params, i, sampler, 99, checker))
    counts, width = list(map(len, TREES)), max(map(len, TREES))
    values = torch.randn(sum(counts), 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    flat = FlatNodes(counts, width, values.device)
    rectangle = flat.spread(values)
    forms = NodeLogits(values, counts), rectangle, torch.cat([rectangle, rectangle[:1]])
    choices = [choose_all(rows, TREES, form) for form in forms]
    verdicts = [accept(rule, rows, TREES, form) for form in forms]
    assert choices[0] == choices[1] == choices[2]
    alone = [
        accept(rule, [row], [tree], forms[0].of([i])) for i, (row, tree) in enumerate(zip(rows, TREES, strict=True))
    ]
    assert verdicts[0] == verdicts[1] == verdicts[2] == [verdict for (verdict,) in alone]
    if rule == "match":
        assert [verdict.next_token for verdict in verdicts[0]] == [
            chosen[verdict.path[-1]] for chosen, verdict in zip(choices[0], verdicts[0], strict=True)
        ]


@pytest.fixture
def rows_of_linears(lm: CausalLM) -> Iterator[list[int]]:
    """How many rows the down projections are given, call by call."""
    rows: list[int] = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:-1].numel()))
        for name, module in lm.shadow.named_modules()
        if name.endswith("down_proj")
    ]
    yield rows
    for handle in handles:
        handle.remove()


def test_linear_layers_run_over_real_nodes(lm: CausalLM, rows_of_linears: list[int]) -> None:
    cache = prefilled(lm)
    rows_of_linears.clear()
    lm.forward(Nodes.from_trees(TREES), cache)
    assert rows_of_linears == [sum(map(len, TREES))] * lm.num_layers
    rows_of_linears.clear()
    lm.forward(Nodes.from_trees([DraftTree.root(1)] * 4), cache)  # no padding, no list
    assert rows_of_linears == [4] * lm.num_layers


@pytest.mark.parametrize("changes_mask", [False, True])
def test_a_model_that_keeps_arguments_from_its_attention(
    lm: CausalLM, rows_of_linears: list[int], monkeypatch: pytest.MonkeyPatch, changes_mask: bool
) -> None:
    """The mask tells of the list; where the model changes that, too, nodes run as rows."""
    forward = LlamaAttention.forward
    want = lm.forward(Nodes.from_trees(TREES), prefilled(lm))

    def selfish(self: Any, *args: Any, attention_mask: torch.Tensor, flat_nodes: Any = None, **kwargs: Any) -> Any:
        mask = attention_mask.clone() if changes_mask else attention_mask
        return forward(self, *args, attention_mask=mask, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", selfish)
    cache, count = prefilled(lm), lm.num_forwards
    rows_of_linears.clear()
    for _ in range(2):
        got = lm.forward(Nodes.from_trees(TREES), cache)
        assert all(
            torch.allclose(got[row, : len(tree)], want[row, : len(tree)], atol=1e-12) for row, tree in enumerate(TREES)
        )
    assert lm.num_forwards - count == 2
    as_rows, as_list = len(TREES) * max(map(len, TREES)), sum(map(len, TREES))
    assert set(rows_of_linears) == {as_rows if changes_mask else as_list}


def test_a_single_row_whose_mask_was_changed_runs_as_a_row(lm: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stand-in would be broadcast over all columns."""
    forward = LlamaAttention.forward
    want = lm.forward(Nodes.from_trees(TREES[:1]), prefilled(lm))

    def selfish(self: Any, *args: Any, attention_mask: torch.Tensor, flat_nodes: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, attention_mask=attention_mask.clone(), **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", selfish)
    monkeypatch.setattr(lm, "_lists_all", True)
    got = lm.forward(Nodes.from_trees(TREES[:1]), prefilled(lm))
    assert torch.allclose(got, want, atol=1e-12)
