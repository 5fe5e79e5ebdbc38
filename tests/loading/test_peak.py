"""What loading takes at its height, beside the weights that it leaves: counted in a process of its own."""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.loading.models import load_model
from foredraft.machine import return_free_memory
from foredraft.model.execution.packing import packed_products
from foredraft.native.library import library
from programs import forked

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is read from /proc"),
    pytest.mark.skipif(library() is None, reason="no kernels here"),
]

CONSTANT = 16 * 2**20
"""Bytes besides weights, whatever their number: rows that are in work, and pages that are read ahead."""


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def measured(folder: Path, small: Path, rounded: str) -> tuple[int, int, int]:
    """Bytes of the weights, and by how much memory is larger in the end and at its height."""
    load_model(small, quantization=rounded, with_tokenizer=False)  # everything that is made once
    gc.collect()
    return_free_memory()  # what the tests before this one have freed must not be taken again uncounted
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    loaded = load_model(folder, quantization=rounded, with_tokenizer=False)
    weights = sum(product.num_bytes for product in packed_products(loaded.model))
    return weights, memory("VmRSS") - before, memory("VmHWM") - before


def saved(folder: Path, *, width: int, layers: int) -> Path:
    """A checkpoint of random weights."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A large model and a small one."""
    folder = tmp_path_factory.mktemp("models")
    return saved(folder / "large", width=1024, layers=5), saved(folder / "small", width=64, layers=1)


@pytest.mark.parametrize("rounded", [pytest.param("int8", marks=pytest.mark.full), "int4"])
def test_rounding_takes_little_beside_the_weights_that_it_leaves(folders: tuple[Path, Path], rounded: str) -> None:
    """Of 190 MB in bfloat16, weights are read, rounded, packed and let go piece by piece."""
    ((weights, resident, peak),) = forked(partial(measured, *folders, rounded))
    assert weights > 5e7
    assert resident <= weights * 1.15 + CONSTANT
    assert peak <= weights * 1.15 + CONSTANT
