"""Memory in huge pages: every tensor its own bytes, given back with the last of them, and there without huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from foredraft.model.execution.rounding import quantize_weights
from foredraft.model.lm import CausalLM
from foredraft.native import memory as pages
from foredraft.testing import toy_model

MAPS = Path("/proc/self/maps")
HAS_PAGES = hasattr(mmap, "MADV_HUGEPAGE")
SHAPES = [(3,), (100, 70), (2, 5, 333), (1, 1), (700, 1024), (1024, 513), (0, 4), (90, 90)]


def anew() -> ModuleType:
    """The module as another process has it: with no region that small tensors share."""
    spec = find_spec(pages.__name__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    return module


def is_mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    spans = (line.split(maxsplit=1)[0].split("-") for line in MAPS.read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in spans)


def filled(pages: ModuleType = pages) -> list[torch.Tensor]:
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


def rounded(model: PreTrainedModel) -> None:
    quantize_weights(model, "int8", dtype=torch.float32, release_originals=True)


def packed(model: PreTrainedModel) -> None:
    CausalLM(model, execution="packed", release_originals=True)


def test_tensors_do_not_overlap() -> None:
    tensors = filled()
    check(tensors)
    tensors[2].fill_(2.0)
    del tensors[-1]
    check([*tensors, pages.empty(SHAPES[-1], torch.bfloat16).fill_(len(tensors))])


@pytest.mark.skipif(not HAS_PAGES, reason="no huge pages on this system")
def test_large_tensors_begin_with_a_huge_page_and_small_ones_share_theirs() -> None:
    pages = anew()
    assert pages.empty((pages.HUGE,), torch.uint8).data_ptr() % pages.HUGE == 0
    one, two = (pages.empty((1000,), torch.uint8) for _ in range(2))
    assert one.data_ptr() % pages.HUGE == 0
    assert two.data_ptr() - one.data_ptr() == 1024


@pytest.mark.skipif(not HAS_PAGES, reason="no huge pages on this system")
def test_memory_is_given_back_with_the_last_tensor() -> None:
    pages = anew()
    one, two = (pages.empty((1000,), torch.uint8) for _ in range(2))
    address = two.data_ptr()
    del one
    assert is_mapped(address)
    part = two[5:9]
    del two
    assert is_mapped(address)
    del part
    assert not is_mapped(address)
    assert pages.empty((7,), torch.uint8).fill_(1).sum() == 7


@pytest.mark.skipif(not HAS_PAGES, reason="no huge pages on this system")
def test_a_new_region_follows_a_full_one() -> None:
    pages = anew()
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
    check(filled(anew()))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not tell what is in memory")
def test_pages_of_a_file_are_left_and_those_of_arrays_are_kept(tmp_path: Path) -> None:
    """Both lie in memory that torch did not allocate; zeros in an array would be a lost weight of its owner."""
    size = 64 * mmap.PAGESIZE
    (tmp_path / "weights").write_bytes(b"\x07" * size)
    of_file = torch.from_file(str(tmp_path / "weights"), shared=False, size=size, dtype=torch.uint8)
    anonymous = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anonymous[:] = b"\x07" * size
    array = np.full(size, 7, np.uint8)
    given = [of_file, torch.frombuffer(anonymous, dtype=torch.uint8), torch.from_numpy(array)]
    assert all((tensor == 7).all() for tensor in given)
    before = resident(of_file)
    pages.PageReleaser(given).whole(given)
    assert resident(of_file) <= before - size // 1024 + 2 * mmap.PAGESIZE // 1024
    assert (array == 7).all()
    assert anonymous[:] == b"\x07" * size
    assert (of_file == 7).all()  # it is read from the file again


def resident(tensor: torch.Tensor) -> int:
    """KiB in memory of the mapping that a tensor lies in."""
    address, lines = tensor.data_ptr(), iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        span = line.split()[0].split("-")
        if len(span) == 2 and int(span[0], 16) <= address < int(span[1], 16):
            return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    raise AssertionError(f"no mapping holds {address:x}")


def of_arrays() -> tuple[PreTrainedModel, list[np.ndarray]]:
    """A model whose weights lie in memory that torch did not allocate."""
    model = toy_model(512, dtype=torch.float32, hidden_size=64, intermediate_size=96)
    arrays = [weight.detach().numpy().copy() for weight in model.parameters()]
    for weight, array in zip(model.parameters(), arrays, strict=True):
        weight.data = torch.from_numpy(array)
    return model, arrays


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not list what is mapped")
@pytest.mark.parametrize("take", [pytest.param(rounded, id="rounded"), pytest.param(packed, id="packed")])
def test_mappings_are_read_once_for_a_model(
    take: Callable[[PreTrainedModel], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each product, a large list was read twice: half of what it took to load a small model."""
    reads, read = [], Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *given, **options: reads.append(path) or read(path, *given, **options)
    )
    take(of_arrays()[0])
    assert reads.count(MAPS) == 1


@pytest.mark.parametrize("take", [pytest.param(rounded, id="rounded"), pytest.param(packed, id="packed")])
def test_arrays_that_weights_were_made_of_stay_as_they_are(take: Callable[[PreTrainedModel], object]) -> None:
    model, arrays = of_arrays()
    kept = [array.copy() for array in arrays]
    take(model)
    assert not any(model.model.layers[0].mlp.up_proj.weight.stride())  # released
    assert all(np.array_equal(array, want) for array, want in zip(arrays, kept, strict=True))
