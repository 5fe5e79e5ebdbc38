"""Attention of prompts by kernels of our own: right, and the same bits however a prompt is cut."""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from typing import TypeAlias

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.native import library as native
from foredraft.native.attention import PrefillAttention
from foredraft.native.build import cpp_compiler

HALF = torch.bfloat16
ROUNDING = {HALF: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
KINDS = [(dtype, name) for dtype in ROUNDING for name in native.OPTIONS]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: " ".join(map(str, kind)))
def kind(request: pytest.FixtureRequest) -> tuple[torch.dtype, native.Library]:
    """A dtype and the kernels for it, of every instruction set up to this machine's."""
    dtype, name = request.param
    sets, widest = list(native.OPTIONS), native.instruction_set()
    if widest is None or (name is not None and sets.index(name) < sets.index(widest)):
        pytest.skip(f"this machine has {widest}")
    library = native.library(name)
    if library is None:
        pytest.skip("no kernels here")
    return dtype, library


@pytest.fixture
def dtype(kind: tuple[torch.dtype, native.Library]) -> torch.dtype:
    return kind[0]


@pytest.fixture
def kernels(kind: tuple[torch.dtype, native.Library]) -> native.Library:
    return kind[1]


class Prompt:
    """Chains behind rows of a cache that holds NaN where nothing was written."""

    def __init__(
        self,
        dtype: torch.dtype,
        counts: list[int],
        before: list[int],
        heads: tuple[int, int],
        size: int,
        value_size: int,
    ) -> None:
        generator = torch.Generator().manual_seed(sum(counts) + size)
        self.counts, self.before = counts, before
        shape = len(counts), heads[1], max(map(sum, zip(before, counts, strict=True))) + 40
        self.keys = torch.randn(*shape, size, generator=generator).to(dtype)
        self.values = torch.randn(*shape, value_size, generator=generator).to(dtype)
        for row, end in enumerate(map(sum, zip(before, counts, strict=True))):
            self.keys[row, :, end:] = self.values[row, :, end:] = torch.nan
        self.query = torch.randn(1, sum(counts), heads[0], size, generator=generator).to(dtype).transpose(1, 2)

    def run(self, kernels: native.Library, window: int | None = None) -> torch.Tensor:
        many = PrefillAttention(kernels, self.counts, self.before, {"kind": window})
        output = many(self.query, self.keys, self.values, "kind", None)
        assert output is not None
        return output

    def part(self, row: int, first: int, last: int) -> Prompt:
        """Some nodes of a row alone."""
        part = copy(self)
        part.counts, part.before = [last - first], [self.before[row] + first]
        place = sum(self.counts[:row])
        part.query = self.query[:, :, place + first : place + last]
        part.keys, part.values = self.keys[row : row + 1], self.values[row : row + 1]
        return part

    def exact(self, window: int | None) -> torch.Tensor:
        """(S, H_q, D_v) in float64."""
        found, place = [], 0
        group = self.query.shape[1] // self.keys.shape[1]
        for row, (count, before) in enumerate(zip(self.counts, self.before, strict=True)):
            keys, values = (
                kept[row, :, : before + count].double().repeat_interleave(group, 0) for kept in (self.keys, self.values)
            )
            query = self.query[0, :, place : place + count].double()
            distance = before + torch.arange(count)[:, None] - torch.arange(before + count)
            hidden = (distance < 0) | (distance >= (window or 10**9))
            scores = (query @ keys.transpose(1, 2) * query.shape[2] ** -0.5).masked_fill(hidden, -torch.inf)
            found.append((torch.softmax(scores, -1) @ values).transpose(0, 1))
            place += count
        return torch.cat(found)


Form: TypeAlias = tuple[list[int], list[int], tuple[int, int], int, int]
PROMPTS: list[Form] = [
    ([40], [0], (3, 1), 64, 64),
    ([33, 1, 70], [300, 129, 5], (8, 2), 64, 64),
    ([130], [517], (2, 2), 96, 32),
    ([64], [128], (4, 1), 128, 128),
    ([35, 20], [70, 3], (4, 2), 8, 8),
    ([50], [100], (2, 1), 20, 12),
    ([33], [60], (3, 1), 80, 96),
]


class TestPrefillAttention:
    @pytest.mark.sample(131)
    @pytest.mark.usefixtures("threads_of_torch")
    @pytest.mark.parametrize("window", [None, 50, 300])
    @pytest.mark.parametrize("form", PROMPTS, ids=lambda form: str(form[0]))
    def test_is_attention_with_the_same_bits_in_other_chunks_and_on_more_threads(
        self, kernels: native.Library, dtype: torch.dtype, form: Form, window: int | None
    ) -> None:
        prompt = Prompt(dtype, *form)
        exact, whole, place = prompt.exact(window), prompt.run(kernels, window), 0
        assert ((whole.double() - exact).abs() <= ROUNDING[dtype] * (exact.abs() + 1)).all()
        for threads, (row, count) in enumerate(enumerate(prompt.counts), start=1):
            torch.set_num_threads(threads)
            cuts = sorted({0, count // 3, count // 2 + 1, count})
            for first, last in pairwise(cuts):
                alone = prompt.part(row, first, last).run(kernels, window)
                assert torch.equal(alone, whole[place + first : place + last]), (row, first)
            place += count

    def test_large_scores_and_a_nan_stay_with_their_node(self, kernels: native.Library, dtype: torch.dtype) -> None:
        prompt = Prompt(dtype, [50], [200], (3, 1), 64, 64)
        prompt.query *= 60  # weights are ones and zeros then
        clean = prompt.run(kernels)
        tolerance = max(2 * ROUNDING[dtype], 2.0**-12)  # scores of some hundreds are rounded themselves
        assert ((clean.double() - prompt.exact(None)).abs() <= tolerance * (clean.double().abs() + 1)).all()
        prompt.query[0, :, 7] = torch.nan
        result = prompt.run(kernels)
        others = [node for node in range(50) if node != 7]
        assert result[7].isnan().all()
        assert torch.equal(result[others], clean[others])

    @pytest.mark.parametrize("size", [64, 20])
    def test_what_is_not_seen_may_be_infinite(self, kernels: native.Library, dtype: torch.dtype, size: int) -> None:
        prompt = Prompt(dtype, [50], [200], (3, 1), size, size)
        clean = prompt.run(kernels)
        for value in (torch.inf, torch.nan):
            prompt.values[0, 0, 200 + 21, 3] = value
            result = prompt.run(kernels)
            assert torch.equal(result[:21], clean[:21])
            assert not result[21:, :, 3].isfinite().any()

    def test_leaves_to_torch_what_it_is_not_for(self, kernels: native.Library, dtype: torch.dtype) -> None:
        prompt = Prompt(dtype, [40], [9], (2, 2), 64, 64)
        many = PrefillAttention(kernels, [40], [9], {"kind": None})
        query, keys, values = prompt.query, prompt.keys, prompt.values
        assert many(query, keys, values, "kind", None) is not None
        assert many(query.double(), keys.double(), values.double(), "kind", None) is None
        assert many(query, keys.double(), values, "kind", None) is None
        assert many(query, keys.transpose(2, 3).contiguous().transpose(2, 3), values, "kind", None) is None
        assert many(query, keys, values, "kind", -1.0) is None


@pytest.mark.sample(3)
def test_a_prompt_leaves_the_same_bits_in_the_cache_however_it_is_cut(
    kernels: native.Library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In compiled layers, and between modules in half precision."""
    if kernels.instruction_set != native.instruction_set():
        pytest.skip("models run by the widest set")
    config = MistralConfig(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=70,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config).to(dtype).eval()
    prompts = torch.randint(100, (2, 150), generator=torch.Generator().manual_seed(1)).tolist()
    runs, run = [], PrefillAttention.__call__
    monkeypatch.setattr(PrefillAttention, "__call__", lambda *args: (runs.append(output := run(*args)), output)[1])
    is_compiled = dtype == torch.float32 and cpp_compiler() is not None
    target = CausalLM(model, execution="compiled" if is_compiled else "packed", probe=False)
    found = []
    for sizes in ((150,), (70, 80), (83, 67)):
        cache, place = target.new_cache(2, 200), 0
        for size in sizes:
            nodes = Nodes.from_chains([prompt[place : place + size] for prompt in prompts])
            target.forward(nodes, cache, keep=slice(0, 0))
            cache.commit([range(size)] * 2)
            place += size
        found.append([torch.stack([layer.keys, layer.values])[..., :150, :] for layer in cache.layers])
    assert len(runs) == 2 * 5
    assert all(output is not None for output in runs)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    reference = model(torch.tensor(prompts), use_cache=True).past_key_values
    for layer, (ours, theirs) in enumerate(zip(found[0], reference.layers, strict=True)):
        for got, want in zip(ours, (theirs.keys, theirs.values), strict=True):
            got, want = got[:, :, -69:].double(), want[:, :, -69:].double()
            assert (got - want).norm() <= 0.02 * want.norm(), layer
