"""The memory of a cache follows its rows: it grows in one direction, is cut in the other, and is given back."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import pytest
import torch

from foredraft.model.cache import storage
from foredraft.model.cache.ragged import KEPT_COLUMNS, KVCache
from foredraft.model.lm import Nodes
from harness import buffers_of
from toys import VOCAB_SIZE, target


@pytest.fixture
def _held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators, where every row takes as much memory as the longest."""
    monkeypatch.setattr(storage, "IS_LAZY", False)


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


def buffers(cache: KVCache) -> list[torch.Tensor]:
    return [buffer for layer in cache.layers for buffer in (layer.keys, layer.values)]


def shape(cache: KVCache) -> tuple[int, int]:
    return cache.num_slots, cache.capacity


def test_released_memory_is_free_and_the_cache_begins_anew() -> None:
    """No view of a buffer is left, neither in layers nor in what moves columns of trees."""
    cache = filled(3, [40, 9, 20])
    cache.commit([(0,), (0, 2), (0,)])  # moves a column, so that views of the buffers are kept
    held = [weakref.ref(buffer) for buffer in buffers(cache)]
    assert not cache.release()  # of rows that run
    cache.clear()
    assert cache.release()
    assert (cache.num_bytes, shape(cache)) == (0, (1, 16))
    assert all(one() is None for one in held)
    assert not cache.release()
    cache.add_rows(2)
    extend(cache, 0, 30)
    extend(cache, 1, 5)
    torch.testing.assert_close(logits(cache), logits(filled(2, [30, 5])), atol=0, rtol=0)


@pytest.mark.usefixtures("_held_whole")
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


@pytest.mark.usefixtures("_held_whole")
def test_rows_that_come_and_go_between_two_calls_move_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row that comes again and again keeps its columns."""
    cache = filled(4, [500, 9, 20, 30])
    held = buffers_of(cache)
    for _ in range(5):
        cache.remove(0)
        assert not cache.shrink()
        extend(cache, cache.add_rows(), 400)
        cache.swap(0, 3)
        assert all(now is before for now, before in zip(buffers_of(cache), held, strict=True))


@pytest.mark.usefixtures("_held_whole")
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


@pytest.mark.usefixtures("_held_whole")
def test_little_is_not_cut_so_that_sizes_do_not_swing() -> None:
    cache = filled(1, [500])
    cache.remove(0)
    extend(cache, cache.add_rows(), 200)
    cache.add_rows()
    assert shape(cache) == (2, 512)


@pytest.mark.usefixtures("_held_whole")
def test_a_limit_holds_for_what_a_cache_begins_with() -> None:
    cache = filled(1, [], capacity=256)
    cache.limit(100)
    extend(cache, 0, 20)
    cache.clear()
    cache.release()
    assert shape(cache) == (1, 100)


# -- memory page by page -------------------------------------------------------------------------------------------


def resident(buffer: torch.Tensor) -> int:
    """Pages of a buffer that have memory; reading it would give none."""
    library = ctypes.CDLL(None, use_errno=True)
    num_pages = -(-buffer.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * num_pages)()
    address = buffer.data_ptr()
    assert address % mmap.PAGESIZE == 0
    assert library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(buffer.nbytes), found) == 0
    return sum(each & 1 for each in found)


def written(lengths: list[int]) -> KVCache:
    """A cache of one layer, 4 heads of 64 numbers, with rows of these lengths."""
    cache = KVCache(1)
    for row, length in enumerate(lengths):
        cache.add_rows()
        states = torch.full((4, length, 64), row + 1.0)
        cache.load(row, ((states, states),), length)
    return cache


def most_pages(lengths: list[int]) -> int:
    """Of a buffer of `written`: 16 columns of a head are a page, and its first and last one are not full."""
    return sum(4 * (-(-length // 16) + 1) for length in lengths)


on_linux = pytest.mark.skipif(not storage.IS_LAZY, reason="elsewhere all of a cache is held")


@on_linux
def test_a_long_row_costs_its_own_length_alone() -> None:
    lengths = [8000, *[300] * 15]
    cache = written(lengths)
    for buffer in buffers(cache):
        assert len(buffer) == 16
        assert buffer.shape[2] >= 8000
        assert resident(buffer) <= most_pages(lengths) < buffer.nbytes // mmap.PAGESIZE / 8
    assert cache.num_bytes == sum(lengths) * cache.column_bytes == sum(lengths) * 2 * 4 * 64 * 4
    cache.remove(0)
    for buffer in buffers(cache):
        assert resident(buffer) <= most_pages([*[300] * 15, KEPT_COLUMNS])
        assert bool((buffer[0, :, :300] == 16.0).all())  # the last row has taken its place
        assert int((buffer[15] != 0.0).sum()) * 4 < 2 * mmap.PAGESIZE  # parts of pages of its neighbours
    assert cache.num_bytes == 15 * 300 * cache.column_bytes


@on_linux
def test_rows_that_move_take_their_memory_along() -> None:
    lengths = [4000, 10, 20, 500]
    cache = written(lengths)
    cache.swap(0, 3)
    copy = cache.fork(2)
    cache.move(1, 3)  # the long row has gone
    lengths = [500, 10, 20, 10, 20]
    assert cache.lengths == lengths
    for buffer in buffers(cache):
        assert [float(buffer[row, 0, 0, 0]) for row in (0, 1, 2, 3, copy)] == [4.0, 2.0, 3.0, 2.0, 3.0]
        assert resident(buffer) <= most_pages([length + KEPT_COLUMNS for length in lengths])
    cache.clear()
    assert cache.num_bytes == 0
    assert all(resident(buffer) == 0 for buffer in buffers(cache))


@on_linux
def test_growing_copies_what_rows_have_and_nothing_else() -> None:
    cache = written([200, 5])
    cache.reserve(5000, 40)
    for buffer in buffers(cache):
        assert buffer.shape[0] >= 40
        assert resident(buffer) <= most_pages([200, 5])
        assert bool((buffer[0, :, :200] == 1.0).all())
        assert bool((buffer[1, :, :5] == 2.0).all())


@on_linux
@pytest.mark.parametrize("size", [64, 12])  # 12 numbers of a column, of which no whole number fills a page
def test_erased_columns_are_zero_and_take_no_memory(size: int) -> None:
    cache = KVCache(1, capacity=1000)
    for row in range(3):
        cache.add_rows()
        states = torch.full((4, 1000, size), float("nan"))
        cache.load(row, ((states, states),), 1000)
    cache.erase(1, 300)
    for buffer in buffers(cache):
        assert bool((buffer[1, :, 300:] == 0.0).all())
        assert bool(buffer[1, :, :300].isnan().all())
        assert bool(buffer[[0, 2]].isnan().all())
    before = [resident(buffer) for buffer in buffers(cache)]
    cache.erase(0)
    for buffer, held in zip(buffers(cache), before, strict=True):
        assert resident(buffer) < held
        assert bool((buffer[0] == 0.0).all())
        assert bool(buffer[2].isnan().all())


@on_linux
def test_texts_do_not_depend_on_how_memory_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    lazily = filled(3, [40, 9, 300])
    lazily.swap(0, 2)
    lazily.remove(1)
    num_bytes = lazily.num_bytes
    monkeypatch.setattr(storage, "IS_LAZY", False)
    whole = filled(3, [40, 9, 300])
    whole.swap(0, 2)
    whole.remove(1)
    assert whole.num_bytes > num_bytes
    torch.testing.assert_close(logits(lazily), logits(whole), atol=0, rtol=0)


@on_linux
def test_where_the_system_takes_no_advice_columns_are_zero_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels without huge pages, and of memory that is locked."""

    class Stubborn(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Stubborn)
    cache = written([500, 20])
    cache.swap(0, 1)
    cache.remove(1)
    assert cache.lengths == [20]
    for buffer in buffers(cache):
        assert bool((buffer[0, :, :20] == 2.0).all())
    states = torch.full((4, 900, 64), float("nan"))
    cache.load(cache.add_rows(), ((states, states),), 900)
    cache.erase(1)
    assert all(bool((buffer[1] == 0.0).all()) for buffer in buffers(cache))
