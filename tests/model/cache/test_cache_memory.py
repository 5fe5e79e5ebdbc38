"""The memory of a cache follows its rows: it grows in one direction, is cut in the other, and is given back."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from foredraft.model.cache.ragged import KVCache
from foredraft.model.cache.storage import RaggedLayer
from foredraft.model.lm import Nodes
from toys import VOCAB_SIZE, target


def filled(num_rows: int, lengths: list[int], capacity: int = 16) -> KVCache:
    """A cache of the toy target, with rows of these lengths."""
    cache = target().new_cache(num_rows, capacity=capacity)
    for row, length in enumerate(lengths):
        extend(cache, row, length)
    return cache


def extend(cache: KVCache, row: int, count: int) -> None:
    tokens = [(row + 3 * place) % VOCAB_SIZE for place in range(count)]
    target().forward(Nodes.from_chains([tokens]), cache, first_row=row)
    cache.commit([range(count)], row)


def logits(cache: KVCache) -> torch.Tensor:
    """Of one more token in every row."""
    return target().forward(Nodes.from_chains([[7]] * cache.num_rows), cache)


def shape(cache: KVCache) -> tuple[int, int]:
    return cache.num_slots, cache.capacity


def test_released_memory_is_free_and_the_cache_begins_anew() -> None:
    """No view of a buffer is left, neither in layers nor in what moves columns of trees."""
    cache = filled(3, [40, 9, 20])
    cache.commit([(0,), (0, 2), (0,)])  # moves a column, so that views of the buffers are kept
    buffers = [weakref.ref(buffer) for buffer in cache._buffers()]
    assert not cache.release()  # of rows that run
    cache.clear()
    assert cache.release()
    assert (cache.num_bytes, shape(cache)) == (0, (1, 16))
    assert all(one() is None for one in buffers)
    assert not cache.release()
    cache.add_rows(2)
    extend(cache, 0, 30)
    extend(cache, 1, 5)
    torch.testing.assert_close(logits(cache), logits(filled(2, [30, 5])), atol=0, rtol=0)


def test_a_cache_shrinks_to_what_rows_have_needed_since_the_last_call() -> None:
    cache = filled(4, [500, 9, 20, 30])
    assert shape(cache) == (4, 512)
    cache.swap(0, 3)
    cache.remove(3)
    assert not cache.shrink()  # the long row ran a moment ago
    extend(cache, 1, 40)
    want = logits(cache)
    assert cache.shrink()
    assert shape(cache) == (4, 64)
    torch.testing.assert_close(logits(cache), want, atol=0, rtol=0)
    assert not cache.shrink()


def test_rows_that_come_and_go_between_two_calls_move_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row that comes again and again keeps its columns."""
    cache = filled(4, [500, 9, 20, 30])
    allocated = list[Any]()
    allocate = RaggedLayer._allocate
    monkeypatch.setattr(RaggedLayer, "_allocate", staticmethod(lambda *args: allocated.append(args) or allocate(*args)))
    for _ in range(5):
        cache.remove(0)
        assert not cache.shrink()
        extend(cache, cache.add_rows(), 400)
        cache.swap(0, 3)
    assert not allocated


def test_one_direction_is_cut_while_the_other_one_grows() -> None:
    """After one long row come many short ones, and the other way round: the cache never holds long rows for all."""
    cache = filled(1, [2000])
    cache.remove(0)
    cache.add_rows(16)
    assert shape(cache) == (16, 16)
    for row in range(16):
        extend(cache, row, 10)
    want = cache.export(1, 10)
    for _ in range(14):
        cache.remove(2)
    extend(cache, 0, 500)
    assert shape(cache) == (2, 512)
    torch.testing.assert_close(cache.export(1, 10), want, atol=0, rtol=0)


def test_little_is_not_cut_so_that_sizes_do_not_swing() -> None:
    cache = filled(1, [500])
    cache.remove(0)
    extend(cache, cache.add_rows(), 200)
    cache.add_rows()
    assert shape(cache) == (2, 512)


def test_a_limit_holds_for_what_a_cache_begins_with() -> None:
    cache = filled(1, [], capacity=256)
    cache.limit(100)
    extend(cache, 0, 20)
    cache.clear()
    cache.release()
    assert shape(cache) == (1, 100)
