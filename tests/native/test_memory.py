"""Memory in huge pages: every tensor its own bytes, given back with the last of them, and there without huge pages."""

from __future__ import annotations

import gc
import mmap
from itertools import pairwise

import pytest
import torch

from foretoken.native import memory as pages

HAS_PAGES = hasattr(mmap, "MADV_HUGEPAGE")
SHAPES = [(3,), (100, 70), (2, 5, 333), (1, 1), (700, 1024), (1024, 513), (0, 4), (90, 90)]


def filled() -> list[torch.Tensor]:
    return [
        pages.empty(shape, dtype).fill_(number)
        for number, (shape, dtype) in enumerate((s, d) for s in SHAPES for d in (torch.float32, torch.bfloat16))
    ]


def check(tensors: list[torch.Tensor]) -> None:
    for number, tensor in enumerate(tensors):
        assert tuple(tensor.shape) == SHAPES[number // 2]
        assert tensor.dtype == (torch.float32, torch.bfloat16)[number % 2]
        assert tensor.is_contiguous()
        assert (tensor == number).all()
        assert tensor.data_ptr() % pages.LINE == 0


def test_tensors_do_not_overlap() -> None:
    tensors = filled()
    check(tensors)
    tensors[2].fill_(2.0)
    del tensors[-1]
    check([*tensors, pages.empty(SHAPES[-1], torch.bfloat16).fill_(len(tensors))])


@pytest.mark.skipif(not HAS_PAGES, reason="no huge pages on this system")
def test_large_tensors_begin_with_a_huge_page_and_small_ones_share_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_shared", pages._Shared())
    assert pages.empty((pages.HUGE,), torch.uint8).data_ptr() % pages.HUGE == 0
    one, two = (pages.empty((1000,), torch.uint8) for _ in range(2))
    assert one.data_ptr() % pages.HUGE == 0
    assert two.data_ptr() - one.data_ptr() == 1024


@pytest.mark.skipif(not HAS_PAGES, reason="no huge pages on this system")
def test_memory_is_given_back_with_the_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_shared", pages._Shared())
    one, two = (pages.empty((1000,), torch.uint8) for _ in range(2))
    memory = pages._shared._memory
    del one
    gc.collect()
    assert memory() is not None
    part = two[5:9]
    del two
    gc.collect()
    assert memory() is not None
    del part
    gc.collect()
    assert memory() is None
    assert pages.empty((7,), torch.uint8).fill_(1).sum() == 7


@pytest.mark.skipif(not HAS_PAGES, reason="no huge pages on this system")
def test_a_new_region_follows_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_shared", pages._Shared())
    tensors = [pages.empty((pages.HUGE - 64,), torch.uint8) for _ in range(pages.REGION // pages.HUGE + 2)]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + len(tensor)) for tensor in tensors)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("missing", ["option", "memory", "kernel"])
def test_there_is_memory_without_huge_pages(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(22, "Invalid argument")

    class Plain(mmap.mmap):
        madvise = refuse

    if missing == "option":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    elif HAS_PAGES:
        monkeypatch.setattr(mmap, "mmap", refuse if missing == "memory" else Plain)
    monkeypatch.setattr(pages, "_shared", pages._Shared())
    check(filled())
