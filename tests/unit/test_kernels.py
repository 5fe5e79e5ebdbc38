"""At which shapes a row keeps its bits: what is measured, on kernels whose habits are known."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from architectures import ARCHITECTURES, target_model
from foretoken.model.execution import trials
from foretoken.model.execution.execution import apply_execution
from foretoken.model.execution.kernels import ROW_COUNTS, Bucket, KernelFacts
from foretoken.model.execution.linears import LimitedLinear, RowLimit, linears
from foretoken.model.execution.packing import PackedLinear, PackedProduct
from foretoken.model.execution.shadows import shadow
from foretoken.model.lm import CausalLM, Nodes
from foretoken.model.partial import first_layers
from foretoken.testing import toy_model
from harness import first_attention

Forward = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def _exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose bits depend on what a query sees and on nothing else, on any machine."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", exact_attention)
    monkeypatch.setattr(trials, "ATTENTION_LENGTHS", (5,))  # what differs differs everywhere
    monkeypatch.setattr(trials, "MIN_SAMPLES", 1)
    monkeypatch.setattr(trials, "LENGTHS", (5,))


def whole(x: torch.Tensor) -> torch.Tensor:
    """In units of 2**-16: sums of products of whole numbers are exact in float64, in any order and any parts."""
    return (x * 2**16).round()


def exact_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None = None
) -> torch.Tensor:
    scores = whole(query) @ whole(key).mT / 2**32 * (scale or 1)
    if mask is not None:
        scores = scores.masked_fill(~(mask if mask.dtype == torch.bool else mask == 0), -torch.inf)
    weights = whole((scores - scores.amax(-1, keepdim=True)).exp())
    return weights @ whole(value) / 2**16 / weights.sum(-1, keepdim=True)


def exactly(model: nn.Module) -> None:
    """Let every linear layer give the same bits whatever it is called with."""
    for layer in linears(model):
        weight = whole(layer.weight.detach()).T
        layer.forward = lambda x, weight=weight: whole(x) @ weight / 2**32


def exact_lm() -> CausalLM:
    lm = CausalLM(toy_model(), execution="packed", probe=False)  # for grouped attention: float64 is not packed
    exactly(lm.shadow)
    return lm


def rounding(forward: Forward, is_other: Callable[[int], bool]) -> Forward:
    """A linear layer that rounds otherwise in calls of some numbers of rows."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return forward(x) * (1 + 2.0**-10 * is_other(x.shape[:-1].numel()))

    return run


def lm_with(is_other: Callable[[int], bool]) -> CausalLM:
    """A toy whose output layer changes the bits of its rows in calls of these numbers of rows."""
    lm = exact_lm()
    head = lm.shadow.get_output_embeddings()
    head.forward = rounding(head.forward, is_other)
    return lm


def bucket_of(facts: KernelFacts) -> Bucket:
    assert facts.bucket is not None, facts.reason
    return facts.bucket


class TestBucket:
    def test_pads_nodes_for_its_own_sake_and_for_that_of_the_rows(self) -> None:
        assert Bucket(8).width(1, 3) == 3
        assert Bucket(8, min_nodes=4).width(1, 3) == 4
        assert Bucket(8, min_rows=3).width(1, 1) == 3
        assert Bucket(8, min_rows=3).width(2, 1) == 2
        assert Bucket(8, min_rows=3, group_size=2).width(3, 1) == 1

    def test_no_block_of_queries_is_left_with_one(self) -> None:
        """A block holds 32 queries; SmolLM2 in bfloat16 gave other bits at 11 nodes in groups of 3."""
        assert [Bucket(16, group_size=3).width(1, nodes) for nodes in (1, 10, 11, 12)] == [1, 10, 12, 12]
        assert [Bucket(16).width(1, nodes) for nodes in (1, 2, 16)] == [2, 2, 16]

    def test_a_view_is_a_whole_number_of_blocks(self) -> None:
        assert [Bucket(8).view_length(length) for length in (1, 64, 65)] == [64, 64, 128]
        assert Bucket(8, view_multiple=512).view_length(257) == 512

    def test_prompts_that_are_read_together_are_padded(self) -> None:
        bucket = Bucket(8, prefill_rows=(48, 96))
        assert [bucket.prefill_width(tokens) for tokens in (1, 8, 9, 96, 97)] == [8, 8, 16, 96, 97]
        assert [bucket.rows_per_call(width) for width in (8, 96, 97)] == [(48, 96), (48, 96), None]
        assert (Bucket(8).prefill_width(9), Bucket(8).rows_per_call(9)) == (9, None)


@pytest.mark.usefixtures("_exact_attention")
class TestMeasurement:
    def test_kernels_that_change_nothing_need_nothing(self) -> None:
        bucket = bucket_of(lm_with(lambda rows: False).kernel_facts(8))
        assert (bucket.max_nodes, bucket.min_rows, bucket.max_rows) == (8, 1, ROW_COUNTS[-1])

    @pytest.mark.parametrize(("border", "min_rows"), [(2, 2), (3, 3), (5, 5), (4, 5)])
    def test_few_rows_that_round_otherwise_are_padded(self, border: int, min_rows: int) -> None:
        bucket = bucket_of(lm_with(lambda rows: rows < border).kernel_facts(8))
        assert bucket.min_rows == min_rows

    @pytest.mark.parametrize(("border", "max_rows"), [(33, 32), (40, 33), (64, 48)])
    def test_many_rows_that_round_otherwise_are_split(self, border: int, max_rows: int) -> None:
        bucket = bucket_of(lm_with(lambda rows: rows >= border).kernel_facts(8))
        assert bucket.max_rows == max_rows

    def test_kernels_that_agree_on_no_range_are_told(self) -> None:
        facts = lm_with(lambda rows: rows % 2 == 1).kernel_facts(8)
        assert facts.bucket is None
        assert "rows only" in facts.reason
        assert facts.reason in facts.describe()

    def test_a_layer_that_rounds_by_the_place_of_a_row_is_told(self) -> None:
        lm = exact_lm()
        head = lm.shadow.get_output_embeddings()
        plain = head.forward

        def run(x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
            return plain(x) * (1 + 2.0**-20 * places)

        head.forward = run
        facts = lm.kernel_facts(8)
        assert facts.bucket is None
        assert "place" in facts.reason

    def test_attention_that_rounds_by_the_view_gets_larger_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sum over an odd number of blocks of 256 columns that differs from that over an even number."""
        self._disturb(monkeypatch, lambda queries, columns: columns % 512 == 256)
        assert bucket_of(exact_lm().kernel_facts(8)).view_multiple == 512

    @pytest.mark.parametrize(("border", "min_nodes"), [(2, 2), (3, 3), (4, 4)])
    def test_attention_that_rounds_by_the_queries_gets_more(
        self, monkeypatch: pytest.MonkeyPatch, border: int, min_nodes: int
    ) -> None:
        group_size = 2
        self._disturb(monkeypatch, lambda queries, columns: queries < border * group_size)
        assert bucket_of(exact_lm().kernel_facts(8)).min_nodes == min_nodes

    def test_longer_drafts_that_round_otherwise_end_the_bucket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._disturb(monkeypatch, lambda queries, columns: queries > 8 * 2)
        assert bucket_of(exact_lm().kernel_facts(16)).max_nodes == 8

    def test_attention_that_never_agrees_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._disturb(monkeypatch, lambda queries, columns: columns == 512)
        facts = exact_lm().kernel_facts(8)
        assert facts.bucket is None
        assert "beside it" in facts.reason

    def _disturb(self, monkeypatch: pytest.MonkeyPatch, is_other: Callable[[int, int], bool]) -> None:
        def run(query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            return exact_attention(query, key, *args, **kwargs) * (
                1 + 2.0**-20 * is_other(query.shape[2], key.shape[2])
            )

        monkeypatch.setattr(F, "scaled_dot_product_attention", run)

    @pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
    def test_experts_are_told(self, name: str) -> None:
        """How many rows an expert multiplies depends on the text."""
        lm = CausalLM(target_model(name, first_attention(name)), execution="eager", probe=False)
        assert "matrices of its own" in lm.kernel_facts(8).reason

    def test_is_made_once_and_counts_no_forwards(self) -> None:
        lm = lm_with(lambda rows: False)
        assert lm.kernel_facts(8) is lm.kernel_facts(8)
        assert lm.num_forwards == 0
        assert lm.kernel_facts(8).seconds > 0

    def test_a_variant_is_measured_by_itself(self) -> None:
        lm = lm_with(lambda rows: False)
        facts = lm.kernel_facts(8)
        assert lm.variant("same", lambda *_: None).kernel_facts(8) is not facts

    def test_contexts_shorter_than_the_trial_are_tried_as_they_are(self) -> None:
        assert CausalLM(toy_model(), execution="eager", probe=False).context_length == 256
        bucket_of(lm_with(lambda rows: False).kernel_facts(16))


class TestFirstLayers:
    @pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "gpt-neox", "opt", "falcon", "phi3"])
    def test_give_what_a_model_of_so_many_layers_gives(self, name: str) -> None:
        config = ARCHITECTURES[name].config()
        key = next(key for key in ("num_hidden_layers", "n_layer") if hasattr(config, key))
        setattr(config, key, 6)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = ["sliding_attention", "full_attention"] * 3
        config._attn_implementation = first_attention(name)
        torch.manual_seed(0)
        model = type(target_model(name, first_attention(name)))(config).double().eval()
        deep = CausalLM(model, execution="eager", probe=False)
        short = first_layers(deep, 4)
        assert (len(short.layers), len(deep.layers)) == (4, 6)
        nodes = Nodes.from_chains([[3, 4, 5]])
        config = copy.deepcopy(config)
        setattr(config, key, 4)
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:4]
        shallow = type(model)(config).double().eval()
        shallow.load_state_dict(model.state_dict(), strict=False)
        want = CausalLM(shallow, execution="eager", probe=False)
        got = short.forward(nodes, short.new_cache(1))
        assert torch.allclose(got, want.forward(nodes, want.new_cache(1)), atol=1e-12)

    def test_reach_to_the_first_layer_of_every_kind(self) -> None:
        config = ARCHITECTURES["gemma3"].config()
        config.num_hidden_layers, config.layer_types = 7, ["sliding_attention"] * 6 + ["full_attention"]
        config._attn_implementation = first_attention("gemma3")
        lm = CausalLM(type(target_model("gemma3", first_attention("gemma3")))(config).eval(), probe=False)
        assert len(first_layers(lm, 4).layers) == 7

    def test_are_the_model_itself_where_it_is_shallow(self) -> None:
        lm = CausalLM(toy_model(), execution="eager", probe=False)
        assert first_layers(lm, 4) is lm


class TestRowLimit:
    @pytest.mark.parametrize("shape", [(33,), (2, 17), (70,), (1, 32)])
    def test_a_layer_is_called_with_few_rows_in_even_parts(self, shape: tuple[int, ...]) -> None:
        sizes = []
        layer = nn.Linear(8, 5, dtype=torch.float64)
        plain = layer.forward

        def counted(x: torch.Tensor) -> torch.Tensor:
            sizes.append(x.shape[:-1].numel())
            return plain(x)

        layer.forward = counted
        limit = RowLimit()
        limited = LimitedLinear(layer, limit)
        x = torch.randn(*shape, 8, dtype=torch.float64)
        want = limited(x)
        assert sizes == [x.shape[:-1].numel()]
        limit.num_rows = (1, 32)
        assert torch.equal(limited(x), want)
        assert max(sizes[1:]) <= 32
        assert max(sizes[1:]) - min(sizes[1:]) <= 1

    def test_a_layer_is_never_called_with_fewer_rows(self) -> None:
        sizes = []
        layer = nn.Linear(8, 5, dtype=torch.float64)
        plain = layer.forward

        def counted(x: torch.Tensor) -> torch.Tensor:
            sizes.append(x.shape[:-1].numel())
            return plain(x)

        layer.forward = counted
        limit = RowLimit()
        limit.num_rows = (48, 96)
        x = torch.randn(3, 5, 8, dtype=torch.float64)
        assert torch.allclose(LimitedLinear(layer, limit)(x), plain(x))
        assert sizes == [48]

    def test_holds_inside_of_its_block_only(self) -> None:
        model = shadow(toy_model(dtype=torch.float32))
        execution = apply_execution(model, "packed", min_packed_elements=0)
        sizes: list[int] = []
        call = PackedProduct.__call__

        class Counted(PackedProduct):
            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                sizes.append(x.shape[:-1].numel())
                return call(self, x)

        for layer in linears(model):
            if isinstance(layer.forward, PackedLinear):
                layer.forward.product.__class__ = Counted
        ids = torch.arange(40).view(2, 20)
        with torch.inference_mode():
            with execution.calls_of((1, 16)):
                execution.run(input_ids=ids, use_cache=False)
            assert set(sizes or [14, 13]) == {13, 14}
            sizes.clear()
            execution.run(input_ids=ids, use_cache=False)
            assert set(sizes or [40]) == {40}

    def test_shadows_of_limited_layers_share_their_packed_weights(self) -> None:
        model = shadow(toy_model(dtype=torch.float32))
        execution = apply_execution(model, "packed", min_packed_elements=0)
        with execution.calls_of((1, 16)):
            pass
        copied = shadow(model)
        forwards = [layer.forward for layer in linears(model)]
        assert [layer.forward for layer in linears(copied)] == forwards
        assert all(isinstance(forward, LimitedLinear) for forward in forwards)
