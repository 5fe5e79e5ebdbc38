"""Products of the library's own: right, the same bits among any number of rows, and taken where they are faster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foretoken.model.execution import choices, native
from foretoken.model.execution.few_nodes import MOST_IN_TREES, FewNodes
from foretoken.model.execution.packing import OneDNNMatrix, PackedProduct, can_pack

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
) -> tuple[native.NativeMatrix, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    return native.NativeMatrix(weight, bias, kernels), weight, bias


class TestNativeMatrix:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (77, 32), (16, 128), (5, 96), (33, 160)])
    def test_is_the_product(self, kernels: native.Library, dtype: torch.dtype, outputs: int, inputs: int) -> None:
        for has_bias in (False, True):
            packed, weight, bias = matrix(kernels, outputs, inputs, dtype, has_bias)
            x = torch.randn(3, 13, inputs).to(packed.compute_dtype)
            exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
            result = packed(x)
            assert result.dtype == packed.compute_dtype
            sums = 2.0**-24 * (inputs + 2) * (x.double().abs() @ weight.double().abs().t() + 4)
            rounded = 2.0**-8 * exact.abs() if result.dtype == HALF else 0
            assert ((result.double() - exact).abs() <= sums + rounded).all()
            assert torch.equal(packed.dense(), weight)

    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("shape", [(80, 96), (77, 608)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_a_row_has_the_same_bits_among_any_number_of_rows(
        self, kernels: native.Library, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool
    ) -> None:
        packed, weight, bias = matrix(kernels, *shape, dtype, has_bias)
        x = torch.randn(530, shape[1]).to(packed.compute_dtype)
        whole = packed(x)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert (whole.double() - exact).norm() <= (2.0**-8 if whole.dtype == HALF else 2.0**-18) * exact.norm()
        for count in (1, 2, 5, 8, 12, 13, 16, 17, 31, 32, 33, 48, 64, 255, 256, 257, 529):
            assert torch.equal(packed(x[:count]), whole[:count]), count
            assert torch.equal(packed(x[-count:]), whole[-count:]), count

    @pytest.mark.parametrize("num_rows", [20, 131])
    @pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
    def test_has_the_same_bits_on_any_number_of_threads(
        self, kernels: native.Library, dtype: torch.dtype, num_rows: int
    ) -> None:
        packed, _, _ = matrix(kernels, 200, 64, dtype)
        x = torch.randn(num_rows, 64).to(packed.compute_dtype)
        before, results = torch.get_num_threads(), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(packed(x))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    def test_takes_inputs_of_any_layout_and_none_at_all(self, kernels: native.Library) -> None:
        packed, _, _ = matrix(kernels, 40, 64, torch.float32)
        x = torch.randn(64, 7).t()
        assert torch.equal(packed(x), packed(x.contiguous()))
        assert packed(x[:0]).shape == (0, 40)

    def test_infinities_and_nans_stay_in_their_row(self, kernels: native.Library) -> None:
        packed, _, _ = matrix(kernels, 64, 64, HALF)
        x = torch.randn(18, 64).to(packed.compute_dtype)
        clean = packed(x)
        x[3, 5], x[17, 0] = torch.nan, torch.inf
        result = packed(x)
        others = [row for row in range(18) if row not in (3, 17)]
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
        few = FewNodes(kernels, self.counts, self.columns, MOST_IN_TREES)
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
]


class TestFewNodes:
    @pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
    @pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step[0]))
    def test_is_attention(
        self,
        kernels: native.Library,
        dtype: torch.dtype,
        step: tuple[list[int], list[int], tuple[int, int], int],
    ) -> None:
        rows = Step(*step, dtype)
        result = rows.run(kernels).double()
        for row, node, number in rows.nodes():
            exact = rows.exact(row, node, number)
            assert ((result[number] - exact).abs() <= ROUNDING[dtype] * (exact.abs() + 0.5)).all(), (row, node)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step[0]))
    def test_a_node_has_the_same_bits_alone_at_other_places_and_on_more_threads(
        self,
        kernels: native.Library,
        dtype: torch.dtype,
        step: tuple[list[int], list[int], tuple[int, int], int],
    ) -> None:
        """As a node of a draft among siblings, and later, when its ancestors have moved to the front of their row."""
        rows = Step(*step, dtype, loose=MOST_IN_TREES)
        result = rows.run(kernels)
        before = torch.get_num_threads()
        for row, node, number in rows.nodes():
            columns = rows.visible[row, node, : rows.columns[row]].nonzero()[:, 0]
            keys, values = (buffer[row : row + 1][:, :, columns] for buffer in (rows.keys, rows.values))
            query = rows.query[:, :, number : number + 1]
            try:
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    alone = FewNodes(kernels, [1], [len(columns)])(query, keys, values, None, None)
                    assert alone is not None
                    assert torch.equal(alone[0], result[number]), (row, node, threads)
            finally:
                torch.set_num_threads(before)

    @pytest.mark.parametrize("window", [None, 150], ids=["whole", "sliding"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_the_largest_tree_has_the_bits_of_plain_decoding(
        self, kernels: native.Library, dtype: torch.dtype, window: int | None
    ) -> None:
        """Behind rows of any length, where whole blocks of columns begin and end; each node is its own plain step."""
        for head in (7, 33, 95, 96, 129, 700):
            rows = Step([MOST_IN_TREES], [head + MOST_IN_TREES], (3, 1), 64, dtype, loose=MOST_IN_TREES)
            rows.visible[0, :, head:].logical_and_(torch.ones(MOST_IN_TREES, MOST_IN_TREES, dtype=torch.bool).tril())
            rows.visible[0, range(MOST_IN_TREES), range(head, head + MOST_IN_TREES)] = True
            for node in range(MOST_IN_TREES):
                depth = int(rows.visible[0, node, head:].sum())
                if window is not None:
                    rows.visible[0, node, : max(0, head + depth - window)] = False
            result = rows.run(kernels)
            for node in range(MOST_IN_TREES):
                seen = rows.visible[0, node].clone()
                first = int(seen.nonzero()[0])
                seen[:first] = True  # a row keeps what its window has left behind
                keys, values = rows.keys[:, :, : len(seen)][:, :, seen], rows.values[:, :, : len(seen)][:, :, seen]
                length = keys.shape[2]
                mask = torch.zeros(1, 1, 1, length, dtype=dtype)
                mask[..., :first] = torch.finfo(dtype).min
                plain = FewNodes(kernels, [1], [length])(rows.query[:, :, node : node + 1], keys, values, mask, None)
                assert plain is not None
                assert torch.equal(plain[0], result[node]), (head, node)

    def test_leaves_to_torch_what_it_is_not_for(self, kernels: native.Library) -> None:
        many = Step([33], [80], (2, 2), 32, torch.float32)
        assert FewNodes(kernels, [33], [80])(many.query, many.keys, many.values, None, None) is None
        assert FewNodes(kernels, [33], [80], 64)(many.query, many.keys, many.values, None, None) is not None
        odd = Step([2], [40], (2, 2), 24 if kernels.lanes == 16 else 20, torch.float32)
        assert FewNodes(kernels, [2], [40])(odd.query, odd.keys, odd.values, None, None) is None
        few = Step([2], [40], (2, 2), 32, torch.float32)
        run = FewNodes(kernels, [2], [40])
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


class TestInstructionSet:
    def test_keeps_to_what_torch_and_onednn_are_held_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
        found = {}
        for most in ("", "AVX512_CORE_AMX", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"):
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
            found[most] = native.instruction_set()
        assert list(found.values()) == ["AMX", "AMX", "AVX512_BF16", "AVX512", "AVX2"]
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert native.instruction_set() is None


class TestLibrary:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
        monkeypatch.setattr(native, "_libraries", {})

    def test_without_a_compiler_there_is_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
        assert native.library("AVX2") is None
        assert not list(tmp_path.rglob("*.so"))

    def test_a_compiler_that_fails_leaves_nothing_behind(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", "false")
        assert native.library("AVX2") is None
        assert not list(tmp_path.rglob("*.so"))

    def test_a_file_that_was_cut_off_is_built_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Loading it would kill the process."""
        if native.library("AVX2") is None:
            pytest.skip("no C++ compiler builds the kernels here")
        (file,) = tmp_path.rglob("*.so")
        other = tmp_path / "other"
        shutil.copytree(tmp_path / "native", other / "native")
        cut = other / "native" / file.name
        cut.write_bytes(file.read_bytes()[:1000])
        monkeypatch.setenv("FORETOKEN_CACHE", str(other))
        native._libraries.clear()
        assert native.library("AVX2") is not None
        assert cut.stat().st_size > 1000
        monkeypatch.setenv("CXX", "false")
        cut.write_bytes(b"no library")
        native._libraries.clear()
        assert native.library("AVX2") is None

    def test_is_built_in_a_folder_of_its_own_where_the_cache_cannot_be_written(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("")
        monkeypatch.setenv("FORETOKEN_CACHE", str(blocked))
        if native.instruction_set() is None:
            pytest.skip("no kernel is written for this machine")
        assert native.library("AVX2") is not None


@pytest.mark.skipif(native.library() is None, reason="no kernels here")
class TestChoices:
    @pytest.fixture(autouse=True)
    def empty(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        native.library()
        monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
        choices._Choices.of.cache_clear()

    def test_are_made_once_and_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []

        def measured(inputs: int, *_: object) -> bool:
            asked.append(inputs)
            return inputs > 1000

        monkeypatch.setattr(choices, "_is_faster", measured)
        for _ in range(2):
            assert choices.faster(1024, 512, HALF, lambda w: OneDNNMatrix(w, None)) is native.library()
            assert choices.faster(512, 1024, HALF, lambda w: OneDNNMatrix(w, None)) is None
            choices._Choices.of.cache_clear()
        assert asked == [1024, 512]
        (file,) = (tmp_path / "native").glob("choices-*.json")
        file.write_text("{")
        choices._Choices.of.cache_clear()
        assert choices.faster(1024, 512, HALF, lambda w: OneDNNMatrix(w, None)) is native.library()
        assert json.loads(file.read_text()) == {"1024x512 bfloat16": True}

    def test_small_and_odd_matrices_are_not_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choices, "_is_faster", lambda *_: pytest.fail("measured"))
        assert choices.faster(64, 64, HALF, lambda w: OneDNNMatrix(w, None)) is None
        assert choices.faster(2048, 2048, torch.float64, lambda w: OneDNNMatrix(w, None)) is None
        if (kernels := native.library()) is not None and kernels.has_pairs:
            assert choices.faster(2047, 2048, HALF, lambda w: OneDNNMatrix(w, None)) is None

    def test_follow_the_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel is taken if steps are faster, unless prompts are much slower."""
        for of_steps, of_prompts, expected in ((0.9, 1.2, True), (0.99, 0.5, False), (0.5, 2.0, False)):

            def times(ours: object, theirs: object, x: torch.Tensor) -> tuple[float, float]:
                return (of_prompts if len(x) == choices.ROWS_OF_PROMPTS else of_steps), 1.0  # noqa: B023

            monkeypatch.setattr(choices, "_times", times)
            kernels = native.library()
            assert kernels is not None
            assert choices._is_faster(64, 64, HALF, kernels, lambda w: OneDNNMatrix(w, None)) is expected


@pytest.mark.skipif(native.library() is None or not can_pack(), reason="no kernels here")
def test_a_product_of_several_layers_runs_and_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_is_faster", lambda *_: True)
    monkeypatch.setattr(choices, "MIN_ELEMENTS", 0)
    monkeypatch.setattr(choices._Choices, "add", lambda self, name, choice: self.known.update({name: choice}))
    choices._Choices.of.cache_clear()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layers = [torch.nn.Linear(64, size).to(dtype) for size in (48, 16)]
        product = PackedProduct(layers)
        assert isinstance(product.matrix, native.NativeMatrix)
        x = torch.randn(5, 64).to(dtype)
        expected = torch.cat([layer(x) for layer in layers], -1)
        assert torch.allclose(product(x).float(), expected.float(), atol=0.02 if dtype != torch.float32 else 1e-5)
        assert torch.equal(product.dense(1), layers[1].weight)
        assert product.num_bytes == 64 * 64 * dtype.itemsize
    choices._Choices.of.cache_clear()


@pytest.mark.parametrize("most", ["AVX2", "AVX512_CORE"])
def test_a_lesser_cpu_decodes_the_same_text(most: str, tmp_path: Path) -> None:
    """In a process that is held to fewer instructions, with the kernels of these."""
    code = (
        "import torch; from foretoken.model.execution import choices, native; choices._is_faster = lambda *_: True\n"
        "choices.MIN_ELEMENTS = 0\n"
        "from foretoken import LLM, SamplingParams; from foretoken.model.execution.native import NativeMatrix\n"
        "llm = LLM('zoo:tiny', dtype='bfloat16', execution='packed')\n"
        "plain = LLM('zoo:tiny', dtype='bfloat16', execution='eager')\n"
        "used = [p for p in llm.target.execution._products if isinstance(p.matrix, NativeMatrix)]\n"
        "assert used and all(p.matrix.compute_dtype == torch.float32 for p in used), len(used)\n"
        "p = SamplingParams(max_tokens=12, temperature=0)\n"
        "a, b = (m.generate('A dog and', p)[0].outputs[0].token_ids for m in (llm, plain))\n"
        "assert a[:4] == b[:4], (a, b)"
    )
    if native.library("AVX2") is None:
        pytest.skip("no C++ compiler builds the kernels here")
    if native.instruction_set() in (None, "AVX2" if most != "AVX2" else None):
        pytest.skip(f"this machine has {native.instruction_set()}")
    capability = "avx2" if most == "AVX2" else "avx512"
    environment = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": most,
        "ATEN_CPU_CAPABILITY": capability,
        "FORETOKEN_CACHE": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
