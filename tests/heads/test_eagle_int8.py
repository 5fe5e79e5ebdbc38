"""Heads of EAGLE in eight bits: near what the module computes, the same draft in one call, and texts that stay."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from covering import pairwise
from foredraft.drafters.heads import eagle
from foredraft.drafters.heads.eagle import EagleDrafter
from foredraft.drafters.heads.loading import pack
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.engine import Engine
from foredraft.heads import int8
from foredraft.heads.eagle import EagleHead, EagleShape
from foredraft.heads.layers import AttentionContext, LayerShape
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.lengths import LengthPolicy
from foredraft.model.execution.packing import unpacked_weight
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.native import library as kernels_of
from foredraft.native.codes import Codes
from foredraft.native.packed_matmul import CodesMatrix
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, check_no_state, toy_model

HALF = torch.bfloat16
TEXTS = [*PROMPTS[:3], PROMPTS[4]]
"""Without the one whose logits tie exactly in bfloat16, where a tree may take the other token."""

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {"generation": 3},
    "speculators": {"generation": 3, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "eagle": {"generation": 1},
    "later eagle": {"generation": 1, "has_fc_bias": True, "embed_norm": True, "input_norm": True, "output_norm": True},
}


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    kernels = kernels_of.library()
    if kernels is None:
        pytest.skip("no kernels here")


@cache
def target(dtype: torch.dtype = HALF) -> CausalLM:
    """All products by the library's own kernels, so that nodes of trees have the bits of plain decoding."""
    return CausalLM(toy_model(320, dtype=dtype, num_hidden_layers=4, **SIZES), execution="packed")


def head(name: str = "eagle3", *, is_packed: bool = True, dtype: torch.dtype = HALF, **layer: Any) -> EagleHead:
    """A random one over 200 of 320 tokens where it has an output layer of its own."""
    given = VARIANTS[name]
    sizes = LayerShape(64, 128, 2, 1, 32, **layer)
    shape = EagleShape(layer=sizes, target_size=64, streams=(1, 2, 3) if given["generation"] == 3 else (4,),
                       num_layers_of_target=4, **given)  # fmt: skip
    made = EagleHead(shape, DraftVocabulary.of(range(50, 250), 320) if given["generation"] == 3 else None)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 if parameter.dim() == 2 else 1.0 + noise * 0.1)
    made = made.to(dtype).eval().requires_grad_(False)
    if is_packed:
        pack(made)
    return made


def runs(instruction: str) -> bool:
    """Whether this CPU is of an instruction set, or of a wider one."""
    order, own = list(kernels_of.OPTIONS), kernels_of.instruction_set()
    return own is not None and order.index(instruction) >= order.index(own)


def drafter(made: EagleHead, depth: int = 3, **growth: Any) -> EagleDrafter:
    given = {"num_branches": 3, "reranks": True, "max_nodes": 9, **growth}
    return EagleDrafter(made, target(made.dtype), target_vocab_size=320, policy=LengthPolicy(depth), **given)


def decoded(
    made: EagleDrafter | EmptyDrafter, params: Any, prompts: Any = TEXTS, dtype: torch.dtype = HALF
) -> list[list[int]]:
    engine = Engine(target(dtype), made)
    rows = [engine.add_request(prompt, replace(params, max_tokens=12, n=1))[0] for prompt in prompts]
    list(engine.run())
    return [row.output_ids for row in rows]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 32, 64), (5, 70, 192), (13, 33, 128)])
def test_a_product_of_bytes_is_the_product_within_the_rounding_of_bytes(rows: int, outputs: int, inputs: int) -> None:
    kernels = kernels_of.library()
    assert kernels is not None
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    x[0, 0] = 1e4  # one large activation costs the others of its span, and of no other
    bias = torch.randn(outputs, generator=generator)
    found = CodesMatrix(Codes.rounded(weight, 8), bias, kernels, activation_bytes=1)(x)
    exact = x.double() @ weight.double().t() + bias
    spans = x.view(rows, -1, 64).abs().amax(-1, keepdim=True) / 254
    error = (weight.abs() @ (spans * torch.ones(64)).view(rows, -1).t()).t()
    error += (weight.abs().amax(1) / 254) * (x.abs().sum(1, keepdim=True))
    assert ((found - exact).abs() <= 1.05 * error + 1e-4).all()
    assert not torch.equal(found, exact.float())


@pytest.mark.sample(4)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_level_is_near_what_the_module_computes(name: str, dtype: torch.dtype) -> None:
    """Seven entries of a text, then four nodes of a tree behind it: outputs within 3 % of the module's in float32."""
    made, reference = head(name, dtype=dtype), head(name, is_packed=False).float()
    rows = drafter(made)
    assert rows.native is not None
    own = rows.native
    table = target(dtype).shadow.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(1)
    streams = torch.randn(7, len(made.shape.streams) * 64, generator=generator).to(dtype)
    keys, values = (torch.zeros(1, 1, 16, 32, dtype=HALF) for _ in range(2))
    tokens = [3, 60, 99, 310, 7, 8, 120]
    outputs = own.feed(Nodes.from_chains([tokens]), [0], keys, values, streams, is_true=True)
    ancestors = torch.eye(4, dtype=torch.bool)
    ancestors[2:, 0] = True  # two nodes after the text, and two after the first of them
    tree = Nodes(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]]), (4,), ancestors[None])
    fed = own.feed(tree, [7], keys, values, outputs[[6, 6, 5, 5]], is_true=False)

    class Given:
        """A cache that hands out all columns so far."""

        keys = values = torch.zeros(1, 1, 0, 32)

        def update(self, key_states: Any, value_states: Any, layer_idx: int) -> Any:
            self.keys, self.values = torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)
            return self.keys, self.values

    cache_of = Given()
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    placed = AttentionContext(*reference.place(torch.arange(7)[None]), mask, cache_of)
    embedded = table[torch.tensor([tokens])].float()
    exact = reference(embedded, reference.features(streams.float()[None]), placed)
    seen = torch.cat([torch.ones(4, 7, dtype=torch.bool), ancestors], 1)
    placed = AttentionContext(*reference.place(torch.tensor([[7, 7, 8, 8]])), seen[None, None], cache_of)
    exact_fed = reference(table[torch.tensor([[5, 6, 7, 8]])].float(), outputs[None, [6, 6, 5, 5]], placed)
    for found, wanted in ((outputs, exact[0]), (fed, exact_fed[0])):
        assert float((found - wanted).norm() / wanted.norm()) < 0.03
    torch.testing.assert_close(keys[0, 0, :11].float(), cache_of.keys[0, 0], rtol=0.1, atol=0.1)
    layer = rows.output_layer
    wanted = torch.nn.functional.linear(reference.before_output(outputs), unpacked_weight(layer).float())
    assert float((own.logits(outputs) - wanted).norm() / wanted.norm()) < 0.03


SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "top-k": {"temperature": 1.4, "seed": 4, "top_k": 7},
    "top-p": {"temperature": 1.3, "seed": 8, "top_p": 0.95},
    "all": {"temperature": 1.0, "seed": 5, "top_p": 0.7, "min_p": 0.02, "top_k": 60},
}


GROWTHS: dict[str, dict[str, Any]] = {"beam": {}, "wide": {"num_branches": 5, "beam_width": 2, "max_nodes": 30}}


@pytest.mark.sample(5)
@pytest.mark.parametrize(*pairwise(name=["eagle3", "eagle"], growth=GROWTHS, sampling=SAMPLINGS))
def test_a_draft_in_one_call_is_the_draft_level_by_level(
    name: str, growth: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(GREEDY, max_tokens=24, **SAMPLINGS[sampling])
    made = head(name)
    engine = Engine(target(), watched := drafter(made, 4, **GROWTHS[growth]))
    grown, grow = [], watched.grow_at_once
    monkeypatch.setattr(watched, "grow_at_once", lambda draft, *given: grown.append(draft) or grow(draft, *given))
    row = engine.add_request(PROMPTS[0], params)[0]
    list(engine.run())
    assert len(grown) >= 10
    drafts = iter(list(grown))
    engine = Engine(target(), other := drafter(made, 4, **GROWTHS[growth]))
    monkeypatch.setattr("foredraft.drafters.heads.eagle.MOST_CAP", 0)  # then drafts grow level by level
    propose, seen = other.propose, []
    monkeypatch.setattr(other, "propose", lambda *given: seen.extend(propose(*given)) or seen[-1:])
    again = engine.add_request(PROMPTS[0], params)[0]
    list(engine.run())
    assert again.output_ids == row.output_ids
    for found in (tree for tree in seen if len(tree) > 1):
        wanted = next(drafts)
        assert (list(found.tokens), list(found.parents)) == (wanted.tokens, wanted.parents)
        assert found.scores == pytest.approx([math.exp(score) for score in wanted.scores], abs=1e-4)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    *pairwise(is_small=[True, False], name=["eagle3", "eagle"], params=[GREEDY, SAMPLED], dtype=[HALF, torch.float32])
)
def test_texts_stay_what_they_are(
    is_small: bool, name: str, params: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ragged rows together, fed level by level where the head is large, and each alone."""
    monkeypatch.setattr("foredraft.drafters.heads.eagle.SMALL_BYTES", math.inf if is_small else 0)
    plain = decoded(EmptyDrafter(), params, dtype=dtype)
    made = drafter(head(name, dtype=dtype))
    assert made.native is not None
    together, grow = [], made.growth.grow
    monkeypatch.setattr(made.growth, "grow", lambda drafts, *given: together.append(drafts) or grow(drafts, *given))
    assert decoded(made, params, dtype=dtype) == plain
    assert bool(together) == (not is_small)
    assert [decoded(made, params, [prompt], dtype)[0] for prompt in TEXTS] == plain
    check_no_state(made)


@torch.no_grad()
def test_a_prompt_of_more_nodes_than_a_call_takes_is_read_in_several() -> None:
    """Of 150 tokens in float32, where no module helps out: entries are near what the module makes of them."""
    prompt = [3 + 7 * i % 300 for i in range(150)]

    def keys(is_packed: bool) -> torch.Tensor:
        made = drafter(head(dtype=torch.float32, is_packed=is_packed))
        assert (made.native is not None) == is_packed
        engine = Engine(target(torch.float32), made)
        engine.add_request(prompt, replace(GREEDY, max_tokens=4))
        for _ in range(2):
            engine.step()
        return made.cache.layers[0].keys[0, :, : len(prompt) - 1].float()

    exact = keys(False)
    assert float((keys(True) - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("instruction", ["AVX2", "AVX512"])
def test_products_of_bytes_have_the_same_sums_on_every_cpu(instruction: str) -> None:
    """Whole numbers are added up; what is in float32 differs by the order of lanes alone."""
    own, other = kernels_of.library(), kernels_of.library(instruction) if runs(instruction) else None
    if own is None or other is None:
        pytest.skip(f"this CPU does not run {instruction}")
    generator = torch.Generator().manual_seed(3)
    codes = Codes.rounded(torch.randn(70, 192, generator=generator), 8)
    matrix, others = (CodesMatrix(codes, None, kernels, activation_bytes=1) for kernels in (own, other))
    x = torch.randn(9, 192, generator=generator)
    torch.testing.assert_close(others(x), matrix(x), rtol=1e-5, atol=1e-5)


def test_entries_that_are_made_late_have_the_bits_of_those_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without a draft owe their entries; the next draft makes all of them in one call."""

    def keys(most_owed: int) -> torch.Tensor:
        monkeypatch.setattr(eagle, "MOST_OWED", most_owed)
        made = drafter(head(), 0)
        engine = Engine(target(), made)
        row = engine.add_request(TEXTS[0], replace(GREEDY, max_tokens=40))[0]
        while row.num_output_tokens < 12:
            engine.step()
        assert bool(row.state[made].owed) == (most_owed > 1)
        made.settle([row])
        assert made.cache.lengths[row.slot] == len(row.token_ids) - 1
        return made.cache.layers[0].keys[0, :, : len(row.token_ids) - 1].clone()

    assert torch.equal(keys(32), keys(1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "gelu"}, "silu"),
        ({"has_head_norms": True}, "norms by head"),
    ],
)
def test_other_heads_run_as_modules(change: dict[str, Any], reason: str) -> None:
    made = head(**change)
    assert drafter(made).native is None
    said = int8.why_not(made, target().shadow.get_input_embeddings().weight, kernels_of.library())
    assert said is not None
    assert reason in said


def test_heads_whose_weights_may_change_run_as_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drafter(head(is_packed=False)).native is None
    assert drafter(copy.deepcopy(head(is_packed=False))).native is None
    monkeypatch.setattr(eagle.kernels_of, "library", lambda: None)
    assert drafter(head()).native is None
