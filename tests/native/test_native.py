"""Products of the library's own: right, the same bits among any number of rows, and taken where they are faster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.model.execution.packing import PackedProduct
from foredraft.model.execution.tracing import build_of
from foredraft.native import library as native
from foredraft.native.abi import MOST_NODES
from foredraft.native.attention import DecodeAttention
from foredraft.native.packed_matmul import NativeMatrix
from fresh import forget_kernels

HALF = torch.bfloat16
SETS = list(native.OPTIONS)


@pytest.fixture(scope="module", params=SETS)
def kernels(request: pytest.FixtureRequest) -> native.Library:
    """For every instruction set up to this machine's."""
    widest = native.instruction_set()
    if widest is None or SETS.index(request.param) < SETS.index(widest):
        pytest.skip(f"this machine has {widest}")
    library = native.library(request.param)
    if library is None:
        pytest.skip("no C++ compiler builds the kernels here")
    return library


def matrix(
    kernels: native.Library, outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool = False
) -> tuple[NativeMatrix, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    return NativeMatrix(weight, bias, kernels), weight, bias


class TestNativeMatrix:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (77, 32), (16, 128), (5, 96), (101, 37), (1, 1)])
    def test_is_the_product(self, kernels: native.Library, dtype: torch.dtype, outputs: int, inputs: int) -> None:
        for has_bias in (False, True):
            packed, weight, bias = matrix(kernels, outputs, inputs, dtype, has_bias)
            x = torch.randn(3, 14, inputs).to(packed.compute_dtype)
            exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
            result = packed(x)
            assert result.dtype == packed.compute_dtype
            sums = 2.0**-24 * (inputs + 2) * (x.double().abs() @ weight.double().abs().t() + 4)
            rounded = 2.0**-8 * exact.abs() if result.dtype == HALF else 0
            assert ((result.double() - exact).abs() <= sums + rounded).all()
            assert torch.equal(packed.dense(), weight)

    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("shape", [(80, 96), (77, 608), (101, 37)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_a_row_has_the_same_bits_among_any_number_of_rows(
        self, kernels: native.Library, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
    ) -> None:
        packed, weight, bias = matrix(kernels, *shape, dtype, has_bias)
        x = torch.randn(530, shape[1]).to(packed.compute_dtype)
        whole = packed(x)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert (whole.double() - exact).norm() <= (2.0**-8 if whole.dtype == HALF else 2.0**-18) * exact.norm()
        for count in (*range(1, 10), 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 70, 256, 529):
            assert torch.equal(packed(x[:count]), whole[:count]), count
            assert torch.equal(packed(x[-count:]), whole[-count:]), count

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("shape", [(101, 37), (96, 64)], ids=str)
    def test_float32_from_a_checkpoint_in_halves_is_kept_in_these_and_has_its_bits(
        self, kernels: native.Library, half: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Numbers of both signs and of every size, below the normal ones of float16 too."""
        generator = torch.Generator().manual_seed(1)
        sizes = torch.exp2(torch.randint(-24, 15, shape, generator=generator).float())
        weight = (torch.randn(shape, generator=generator) * sizes).clamp(-6e4, 6e4).to(half).float()
        weight[0, 0] = -0.0
        packed = NativeMatrix([weight[:32], weight[32:]], None, kernels)
        assert packed.packed.dtype == half
        assert torch.equal(packed.dense().float(), weight)
        every = torch.arange(len(weight))
        assert torch.equal(packed.rows(every, torch.float32).view(torch.int32), weight.view(torch.int32))
        monkeypatch.setattr("foredraft.native.packed_matmul.kept_dtype", lambda parts: torch.float32)
        wide = NativeMatrix(weight, None, kernels)
        assert wide.packed.dtype == torch.float32
        assert 2 * packed.num_bytes == wide.num_bytes
        for count in (1, 5, 20, 131):
            x = torch.randn(count, shape[1], generator=generator)
            assert torch.equal(packed(x), wide(x))

    def test_one_number_that_no_half_holds_keeps_float32(self, kernels: native.Library) -> None:
        weight = torch.ones(40, 64)
        weight[39, 63] = 1 + 2.0**-12
        packed = NativeMatrix(weight, None, kernels)
        assert packed.packed.dtype == torch.float32
        assert torch.equal(packed.dense(), weight)
        for other in (torch.nan, torch.inf):
            weight[39, 63] = other
            torch.testing.assert_close(NativeMatrix(weight, None, kernels).dense().float(), weight, equal_nan=True)

    @pytest.mark.usefixtures("threads_of_torch")
    @pytest.mark.parametrize("num_rows", [1, 20, 131])
    @pytest.mark.parametrize("inputs", [64, 37])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_has_the_same_bits_on_any_number_of_threads_and_at_any_address(
        self, kernels: native.Library, dtype: torch.dtype, inputs: int, num_rows: int
    ) -> None:
        packed, _, _ = matrix(kernels, 200, inputs, dtype)
        x = torch.randn(num_rows, inputs).to(packed.compute_dtype)
        expected = packed(x)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(packed(x), expected), count
            for places in (1, 3, 8):
                elsewhere = torch.empty(x.numel() + places, dtype=x.dtype)[places:].view(x.shape).copy_(x)
                assert torch.equal(packed(elsewhere), expected), (count, places)

    def test_takes_inputs_of_any_layout_and_none_at_all(self, kernels: native.Library) -> None:
        packed, _, _ = matrix(kernels, 40, 64, torch.float32)
        x = torch.randn(64, 7).t()
        assert torch.equal(packed(x), packed(x.contiguous()))
        assert packed(x[:0]).shape == (0, 40)

    @pytest.mark.parametrize("num_rows", [18, 120])
    @pytest.mark.parametrize("inputs", [64, 37])
    @pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
    def test_infinities_and_nans_stay_in_their_row(
        self, kernels: native.Library, dtype: torch.dtype, inputs: int, num_rows: int
    ) -> None:
        packed, _, _ = matrix(kernels, 64, inputs, dtype)
        x = torch.randn(num_rows, inputs).to(packed.compute_dtype)
        clean = packed(x)
        x[3, 5], x[17, 0] = torch.nan, torch.inf
        result = packed(x)
        others = [row for row in range(num_rows) if row not in (3, 17)]
        assert torch.equal(result[others], clean[others])
        assert result[3].isnan().all()
        assert not result[17].isfinite().any()


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


class Step:
    """Rows of a step at random: queries, a cache, and which columns every node sees.

    Args:
      loose: last columns of a row among which some are hidden; None for all.
    """

    def __init__(
        self,
        counts: list[int],
        columns: list[int],
        heads: tuple[int, int],
        size: int,
        dtype: torch.dtype,
        loose: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(len(counts) + size)
        self.counts, self.columns = counts, columns
        num_rows, total, longest = len(counts), sum(counts), max(columns)
        buffer = torch.randn(2, num_rows + 1, heads[1], longest + 30, size, generator=generator).to(dtype)
        self.keys, self.values = buffer[0, :num_rows], buffer[1, :num_rows]
        self.query = torch.randn(1, total, heads[0], size, generator=generator).to(dtype).transpose(1, 2)
        self.visible = torch.rand(num_rows, max(counts), longest, generator=generator) < 0.7
        self.visible[..., 0] = True
        for row, length in enumerate(columns):
            self.visible[row, :, : 0 if loose is None else length - loose] = True

    @property
    def mask(self) -> torch.Tensor:
        mask = torch.zeros(self.visible[:, None].shape, dtype=self.query.dtype)
        return mask.masked_fill_(~self.visible[:, None], torch.finfo(mask.dtype).min)

    def run(self, kernels: native.Library) -> torch.Tensor:
        few = DecodeAttention(kernels, self.counts, self.columns)
        output = few(self.query, self.keys, self.values, self.mask, None)
        assert output is not None
        return output

    def nodes(self) -> list[tuple[int, int, int]]:
        """Row, node of the row, and number in the list."""
        pairs = [(row, node) for row, count in enumerate(self.counts) for node in range(count)]
        return [(row, node, number) for number, (row, node) in enumerate(pairs)]

    def exact(self, row: int, node: int, number: int) -> torch.Tensor:
        """(H_q, D) in float64."""
        query = self.query[0, :, number].double()
        group = len(query) // self.keys.shape[1]
        columns = self.visible[row, node, : self.columns[row]].nonzero()[:, 0]
        keys = self.keys[row][:, columns].double().repeat_interleave(group, 0)
        values = self.values[row][:, columns].double().repeat_interleave(group, 0)
        weights = torch.softmax((keys @ query[:, :, None])[..., 0] * query.shape[1] ** -0.5, -1)
        return (weights[:, None] @ values)[:, 0]


STEPS = [
    ([1], [300], (4, 4), 32),
    ([1, 4, 2], [200, 37, 5], (6, 2), 64),
    ([16], [130], (3, 1), 48),
    ([3, 3, 3], [65, 64, 31], (4, 4), 32),
    ([5], [1100], (9, 3), 16),
    ([2, 0, 6], [100, 90, 280], (6, 2), 64),
    ([3, 64], [90, 333], (4, 2), 8),
    ([2, 1], [17, 133], (2, 1), 12),
    ([4], [70], (2, 2), 20),
    ([3], [600], (4, 2), 80),
]


class TestDecodeAttention:
    @pytest.mark.sample(82)
    @pytest.mark.usefixtures("threads_of_torch")
    @pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
    @pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step[0]))
    def test_is_attention_with_the_same_bits_alone_at_other_places_and_on_more_threads(
        self,
        kernels: native.Library,
        dtype: torch.dtype,
        step: tuple[list[int], list[int], tuple[int, int], int],
    ) -> None:
        """As a node of a draft among siblings, and later, when its ancestors have moved to the front of their row."""
        hidden_anywhere = Step(*step, dtype)
        anywhere = hidden_anywhere.run(kernels).double()
        rows = Step(*step, dtype, loose=MOST_NODES)
        result = rows.run(kernels)
        for row, node, number in rows.nodes():
            for given, found in ((rows, result.double()), (hidden_anywhere, anywhere)):
                exact = given.exact(row, node, number)
                assert ((found[number] - exact).abs() <= ROUNDING[dtype] * (exact.abs() + 0.5)).all(), (row, node)
            columns = rows.visible[row, node, : rows.columns[row]].nonzero()[:, 0]
            keys, values = (buffer[row : row + 1][:, :, columns] for buffer in (rows.keys, rows.values))
            query = rows.query[:, :, number : number + 1]
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                alone = DecodeAttention(kernels, [1], [len(columns)])(query, keys, values, None, None)
                assert torch.equal(alone[0], result[number]), (row, node, threads)

    @pytest.mark.parametrize("window", [None, 150], ids=["whole", "sliding"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_the_largest_tree_has_the_bits_of_plain_decoding(
        self, kernels: native.Library, dtype: torch.dtype, window: int | None
    ) -> None:
        """Behind rows of any length, where whole blocks of columns begin and end; each node is its own plain step."""
        for head in (7, 33, 95, 96, 129, 700):
            rows = Step([MOST_NODES], [head + MOST_NODES], (3, 1), 64, dtype, loose=MOST_NODES)
            rows.visible[0, :, head:].logical_and_(torch.ones(MOST_NODES, MOST_NODES, dtype=torch.bool).tril())
            rows.visible[0, range(MOST_NODES), range(head, head + MOST_NODES)] = True
            for node in range(MOST_NODES):
                depth = int(rows.visible[0, node, head:].sum())
                if window is not None:
                    rows.visible[0, node, : max(0, head + depth - window)] = False
            result = rows.run(kernels)
            for node in range(MOST_NODES):
                seen = rows.visible[0, node].clone()
                first = int(seen.nonzero()[0])
                seen[:first] = True  # a row keeps what its window has left behind
                keys, values = rows.keys[:, :, : len(seen)][:, :, seen], rows.values[:, :, : len(seen)][:, :, seen]
                length = keys.shape[2]
                mask = torch.zeros(1, 1, 1, length, dtype=dtype)
                mask[..., :first] = torch.finfo(dtype).min
                plain = DecodeAttention(kernels, [1], [length])(
                    rows.query[:, :, node : node + 1], keys, values, mask, None
                )
                assert torch.equal(plain[0], result[node]), (head, node)

    def test_leaves_to_torch_what_it_is_not_for(self, kernels: native.Library) -> None:
        most = Step([MOST_NODES], [80], (2, 2), 32, torch.float32)
        assert DecodeAttention(kernels, [MOST_NODES], [80])(most.query, most.keys, most.values, None, None) is not None
        many = Step([MOST_NODES + 1], [80], (2, 2), 32, torch.float32)
        assert DecodeAttention(kernels, [MOST_NODES + 1], [80])(many.query, many.keys, many.values, None, None) is None
        few = Step([2], [40], (2, 2), 32, torch.float32)
        run = DecodeAttention(kernels, [2], [40])
        assert run(few.query.double(), few.keys.double(), few.values.double(), None, None) is None
        assert run(few.query, few.keys.transpose(2, 3).contiguous().transpose(2, 3), few.values, None, None) is None
        assert run(few.query, few.keys, few.values, few.mask == 0, None) is None

    def test_a_nan_stays_in_its_row(self, kernels: native.Library) -> None:
        rows = Step([2, 3], [60, 70], (2, 1), 32, torch.float32)
        clean = rows.run(kernels)
        rows.query[0, :, 1] = torch.nan
        result = rows.run(kernels)
        assert result[1].isnan().all()
        assert torch.equal(result[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])

    @pytest.mark.usefixtures("threads_of_torch")
    @pytest.mark.parametrize("size", [64, 20])
    @pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
    @pytest.mark.parametrize("threads", [1, 2])
    def test_what_is_hidden_may_be_infinite(
        self, kernels: native.Library, dtype: torch.dtype, size: int, threads: int
    ) -> None:
        """As a sibling of a draft may be whose own decoding nobody asks for: 0 * inf is NaN."""
        rows = Step([3], [200], (4, 2), size, dtype)
        rows.visible[0, :, 190:195], rows.visible[0, 1, 190:195] = False, True
        torch.set_num_threads(threads)
        clean = rows.run(kernels)
        for hidden in (torch.inf, torch.nan):
            rows.values[0, 1, 192, 3] = hidden
            result = rows.run(kernels)
            assert torch.equal(result[[0, 2]], clean[[0, 2]])
            assert not result[1, 2:, 3].isfinite().any()

    def test_scratch_stays_within_bounds(self, kernels: native.Library) -> None:
        """However many nodes and columns there are; a node of a large step has the bits that it has alone."""
        rows = Step([64], [40_000], (32, 2), 16, torch.float32)
        few = DecodeAttention(kernels, [64], [40_000])
        known = few.call(rows.query, rows.keys, rows.values, rows.mask, None, 2)
        assert known[1] * 4 <= 2**27
        result = rows.run(kernels)
        for node in (0, 40, 63):
            query, mask = rows.query[:, :, node : node + 1], rows.mask[:, :, node : node + 1].contiguous()
            alone = DecodeAttention(kernels, [1], [40_000])(query, rows.keys, rows.values, mask, None)
            assert torch.equal(alone[0], result[node])


class TestInstructionSet:
    def test_keeps_to_what_torch_and_onednn_are_held_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
        expected = {
            "": "AMX",
            "AVX512_CORE_AMX": "AMX",
            "AVX10_1_512_AMX": "AMX",
            "AVX10_1_512": "AVX512_BF16",
            "AVX512_CORE_FP16": "AVX512_BF16",
            "AVX512_CORE_BF16": "AVX512_BF16",
            "AVX512_CORE": "AVX512",
            "AVX2_VNNI": "AVX2",
            "AVX2": "AVX2",
            "AVX": None,
            "SSE41": None,
        }
        for most, instructions in expected.items():
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
            assert native.instruction_set() == instructions, most
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert native.instruction_set() is None


class TestLibrary:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
        forget_kernels(monkeypatch)

    @pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
    def test_without_a_compiler_that_works_there_is_none(
        self, compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("CXX", compiler)
        assert native.library("AVX2") is None
        assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
def test_what_multiplies_in_another_dtype_is_another_build() -> None:
    """A call that was recorded with pairs of bfloat16 was replayed with float32 sums, which overran its buffers."""
    product = PackedProduct([torch.nn.Linear(64, 64, dtype=torch.bfloat16)])
    tracer: Any = SimpleNamespace(sizes=[64], runners=[product], parts={})
    builds = []
    for dtype in (torch.bfloat16, torch.float32):
        product.matrix.compute_dtype = dtype
        builds.append(build_of(torch.nn.Module(), tracer))
    assert builds[0] != builds[1]


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
def test_a_matrix_refuses_inputs_that_it_does_not_multiply() -> None:
    """It read and wrote four bytes for each of their two."""
    kernels = native.library()
    assert kernels is not None
    matrix = NativeMatrix(torch.ones(32, 32), None, kernels)
    with pytest.raises(TypeError, match=r"multiplies in torch\.float32 was given torch\.bfloat16"):
        matrix(torch.ones(1, 32, dtype=torch.bfloat16))


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
def test_a_product_of_several_layers_runs_and_splits() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layers = [torch.nn.Linear(64, size).to(dtype) for size in (48, 16)]
        product = PackedProduct(layers)
        assert isinstance(product.matrix, NativeMatrix)
        x = torch.randn(5, 64).to(dtype)
        expected = torch.cat([layer(x) for layer in layers], -1)
        assert torch.allclose(product(x).float(), expected.float(), atol=0.02 if dtype != torch.float32 else 1e-5)
        assert torch.equal(product.dense(1), layers[1].weight)
        assert product.num_bytes == 64 * 64 * dtype.itemsize
