"""Compiled choices: the tokens that numpy's passes choose, in rows of any kind, and without a compiler just these."""

from __future__ import annotations

import pytest
import torch

from foredraft.engine.features import largest_ids
from foredraft.native import sample_kernels as kernels
from foredraft.sampling import choice, noise
from foredraft.sampling.choice import GumbelTopK
from foredraft.sampling.filters import LogitsFilter

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_kernels = pytest.mark.skipif(kernels.kernels() is None, reason="no C++ compiler here")


def rows(dtype: torch.dtype, size: int = 4097) -> torch.Tensor:
    """Nine rows: three as they come, all below zero, zeros of both signs, NaN, -inf alone, +inf, one token possible."""
    table = torch.randn(9, size, generator=torch.Generator().manual_seed(0)) * 3
    table[3] = -table[3].abs() - 1
    table[4] = -table[4].abs() - 1
    table[4, 70], table[4, 500] = -0.0, 0.0
    table[5, 9] = torch.nan
    table[6:9] = -torch.inf
    table[7, 3] = torch.inf
    table[8, size - 1] = -3
    return table.to(dtype)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(kernels, "kernels", lambda: None)
    return monkeypatch


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_argmax_is_that_of_numpy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    table = rows(dtype)
    found = kernels.argmax(table)
    assert [kernels.argmax_at(table, row) for row in range(len(table))] == found.tolist()
    assert kernels.argmax(table[::2]).tolist() == found[::2].tolist()
    monkeypatch.setattr(kernels, "kernels", lambda: None)
    assert found.tolist() == choice.argmax(table).tolist()
    assert found.tolist()[4:] == [70, -1, -1, -1, table.shape[1] - 1]


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.33, 1.7])
@pytest.mark.parametrize("k", [1, 4])
def test_the_same_tokens_win_under_keyed_noise(dtype: torch.dtype, temperature: float, k: int) -> None:
    for scale in (0.1, 1.0, 4.0):  # from rows where anything may win to rows where one token nearly always does
        table = rows(dtype) * scale
        table[0, ::2] = -torch.inf
        keys = [noise.row_key(row, 100 + row) for row in range(len(table))]
        names = torch.arange(table.shape[1]) * 3 + 7
        for named in (None, names):
            found = kernels.gumbel_best(table, temperature, keys, k, named)
            columns = None if named is None else named.numpy()
            best, sums = GumbelTopK(LogitsFilter(temperature), table, keys, k, columns).run()
            assert found[0].tolist() == best.tolist()
            torch.testing.assert_close(found[1], torch.from_numpy(sums), rtol=1e-13, atol=1e-13)
        found = kernels.gumbel_best(table, temperature, keys, k)
        assert found[0][:, 0].tolist() == [
            kernels.gumbel_argmax_at(table, row, temperature, key) for row, key in enumerate(keys)
        ]
        everything = table[1].float().double() / temperature + choice.noise.gumbel_of_bits(
            noise.bits(torch.tensor(noise.as_int64([keys[1]])), torch.arange(table.shape[1]))
        )
        if dtype == torch.float32 and temperature == 1.0:
            assert everything.topk(k).indices.tolist() == found[0][1].tolist()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_come_in_order(dtype: torch.dtype) -> None:
    table = rows(dtype)[:5]
    found = kernels.best(table, 9)
    assert torch.equal(found, torch.sort(-table.float(), dim=-1, stable=True).indices[:, :9])
    assert torch.equal(largest_ids(table, 9), found)
    assert torch.equal(kernels.best(table, 9, [3, 0]), found[[3, 0]])


@needs_kernels
@pytest.mark.usefixtures("threads_of_torch")
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_rows_and_change_nothing(dtype: torch.dtype) -> None:
    table = rows(dtype)
    keys = [noise.row_key(row, row) for row in range(len(table))]
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        columns, sums = kernels.gumbel_best(table, 0.7, keys, 3)
        found.append([kernels.argmax(table), kernels.best(table[:5], 7, [4, 0, 1]), columns, sums])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_without_a_compiler_the_same_is_chosen(without: pytest.MonkeyPatch) -> None:
    table = rows(torch.float32)
    assert kernels.argmax(table) is None
    assert kernels.gumbel_best(table, 1.0, list(range(len(table))), 2) is None
    assert choice.argmax(table).tolist()[4:] == [70, -1, -1, -1, table.shape[1] - 1]
    assert largest_ids(table[:3], 4)[:, 0].tolist() == choice.argmax(table[:3]).tolist()


def test_short_rows_and_other_layouts_are_left_to_numpy() -> None:
    assert kernels.argmax(torch.zeros(2, kernels.LEAST_VOCABULARY - 1)) is None
    assert kernels.argmax(torch.zeros(kernels.LEAST_VOCABULARY, 2).T) is None
    assert kernels.argmax(torch.zeros(2, kernels.LEAST_VOCABULARY, dtype=torch.float64)) is None
    assert kernels.best(torch.zeros(2, kernels.LEAST_VOCABULARY), kernels.MOST_BEST + 1) is None
    assert choice.argmax(torch.zeros(2, 3)).tolist() == [0, 0]
