"""Heads that run packed: what reads one tensor is one product, and gives what the layers give by themselves."""

from __future__ import annotations

import copy

import pytest
import torch

from foredraft.drafters.heads.loading import pack
from foredraft.heads.eagle import EagleHead, EagleShape
from foredraft.heads.layers import AttentionContext, LayerShape
from foredraft.model.execution.packing import PackedLinear
from foredraft.native.library import library


@pytest.mark.skipif(library() is None, reason="nothing is packed here")
@pytest.mark.parametrize(("generation", "streams"), [(1, (3,)), (3, (0, 1, 2))])
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_with_one_input_are_one_product(generation: int, streams: tuple[int, ...], has_bias: bool) -> None:
    """Query, key and value; gate and up; fc, o_proj and down_proj by themselves."""
    torch.manual_seed(0)
    layer = LayerShape(64, 128, 4, 2, 16, has_bias=has_bias)
    head = EagleHead(EagleShape(generation, layer, 64, streams, 3)).bfloat16().eval().requires_grad_(False)
    packed = copy.deepcopy(head)
    pack(packed)
    forwards = [vars(module).get("forward") for module in packed.modules()]
    products = [forward.product for forward in forwards if isinstance(forward, PackedLinear)]
    assert (len(products), len(set(map(id, products)))) == (8, 5)
    embedded, features = torch.randn(2, 1, 5, 64).bfloat16()
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    placed = AttentionContext(*head.place(torch.arange(5)[None]), mask)
    with torch.inference_mode():
        want, got = (one(embedded, features, placed) for one in (head, packed))
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
