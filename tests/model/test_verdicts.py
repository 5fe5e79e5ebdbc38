"""Results of the test at load time that are kept: found again by the same model, and by no other."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from foredraft.errors import ProbeError
from foredraft.loading import identity
from foredraft.loading.models import adapter_of, load_model
from foredraft.model.lm import CausalLM
from foredraft.model.masks import Masks
from foredraft.model.nodes import Nodes
from foredraft.native.library import library
from foredraft.testing import hostile_kernels, toy_model
from mutations import shows_siblings

OPTIONS: dict[str, Any] = {"dtype": "float32", "with_tokenizer": False}


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, in which files count that were written just now."""
    library()  # from the cache of all tests
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "RECENT_SECONDS", 0.0)
    return tmp_path / "cache" / "verdicts"


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    toy_model(dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def start(folder: Path, execution: str = "packed", kv_cache_dtype: str = "auto", **options: Any) -> CausalLM:
    return adapter_of(load_model(folder, **{**OPTIONS, **options}), execution, kv_cache_dtype)


def is_kept(lm: CausalLM) -> bool:
    assert lm.probe is not None
    return lm.probe.is_kept


def logits(lm: CausalLM) -> torch.Tensor:
    return lm.forward(Nodes.from_chains([[5, 6, 7, 8], [9, 10]]), lm.new_cache(2, capacity=16))


@pytest.mark.parametrize("execution", ["packed", "eager"])
def test_the_second_start_takes_the_result_of_the_first(folder: Path, execution: str) -> None:
    first, second = start(folder, execution), start(folder, execution)
    assert not is_kept(first)
    assert is_kept(second)
    assert second.supports_trees
    assert second.probe is not None
    assert first.probe is not None
    assert second.probe.checks == first.probe.checks
    assert (second.execution.program is None) == (first.execution.program is None)
    assert torch.equal(logits(second), logits(first))


# -- what the result depends on --------------------------------------------------------------------------------------


def patched(holder: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], AbstractContextManager[None]]:
    def apply(patch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        patch.setattr(holder, name, value)
        return nullcontext()

    return apply


def setting(name: str, value: str) -> Callable[[pytest.MonkeyPatch], AbstractContextManager[None]]:
    def apply(patch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        patch.setenv(name, value)
        return nullcontext()

    return apply


ROTATE = modeling_llama.rotate_half


def rotated(x: torch.Tensor) -> torch.Tensor:
    return ROTATE(x)


OTHER_MACHINES = {
    "an instruction set of torch": setting("ATEN_CPU_CAPABILITY", "default"),
    "an instruction set of oneDNN": setting("ONEDNN_MAX_CPU_ISA", "ALL"),
    "an instruction set of MKL": setting("MKL_ENABLE_INSTRUCTIONS", "SSE4_2"),
    "hostile kernels": lambda _: hostile_kernels(),
    "a function of the model's code": patched(modeling_llama, "rotate_half", rotated),
    "a method of the model's code": patched(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(x)),
    "code of this package": patched(Masks, "in_window", lambda *_: torch.tensor(True)),
    "precision of products": patched(torch, "get_float32_matmul_precision", lambda: "medium"),
}


@pytest.mark.parametrize("change", OTHER_MACHINES)
def test_another_machine_or_other_code_tests_again(change: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(folder)
    with monkeypatch.context() as patch, OTHER_MACHINES[change](patch):
        if change.startswith("a method"):
            with pytest.raises((ProbeError, RuntimeError)):
                start(folder)
        else:
            assert not is_kept(start(folder))
    assert is_kept(start(folder))


@pytest.mark.usefixtures("threads_of_torch")
def test_another_number_of_threads_tests_again(folder: Path) -> None:
    start(folder)
    torch.set_num_threads(2)
    assert not is_kept(start(folder))


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"execution": "eager"}, {"kv_cache_dtype": "bfloat16"}],
    ids=str,
)
def test_other_options_test_again(options: dict[str, Any], folder: Path) -> None:
    start(folder)
    assert not is_kept(start(folder, **options))
    assert is_kept(start(folder, **options))


def test_another_structure_tests_again(folder: Path, tmp_path: Path) -> None:
    """In a file of the same size, written at the same time."""
    start(folder)
    text = (folder / "config.json").read_text()
    changed = text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 2e-06')
    assert len(changed) == len(text) != 0
    assert changed != text
    rewrite(folder / "config.json", changed.encode())
    assert not is_kept(start(folder))


def rewrite(file: Path, content: bytes) -> None:
    """Replace the content of a file, and set back its time of modification."""
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns


def test_weights_with_other_values_are_tested_again(folder: Path, tmp_path: Path) -> None:
    start(folder)
    weights = folder / "model.safetensors"
    toy_model(seed=5, dtype=torch.float32).save_pretrained(tmp_path / "other")
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    assert len(other) == weights.stat().st_size
    rewrite(weights, other)
    assert not is_kept(start(folder))
    damaged = toy_model(dtype=torch.float32)
    with torch.no_grad():
        damaged.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)
    damaged.save_pretrained(tmp_path / "damaged")
    rewrite(weights, (tmp_path / "damaged" / "model.safetensors").read_bytes())
    with pytest.raises(ProbeError, match="NaN"):
        start(folder)


# -- what is not kept ------------------------------------------------------------------------------------------------


def test_a_model_that_somebody_else_has_built_is_always_tested(folder: Path) -> None:
    for _ in range(2):
        model = LlamaForCausalLM.from_pretrained(folder).eval()
        assert not is_kept(adapter_of(load_model(model), "packed"))


def test_a_model_with_code_from_its_checkpoint_is_always_tested(folder: Path) -> None:
    for _ in range(2):
        assert not is_kept(start(folder, trust_remote_code=True))


def test_a_result_with_a_reservation_is_not_kept(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its warning is repeated."""
    shows_siblings(monkeypatch)
    for _ in range(2):
        lm = start(folder)
        assert not lm.supports_trees
        assert not is_kept(lm)
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"sha256": "0", "content": {}}', b"half"])
def test_a_damaged_file_is_not_believed(damage: bytes, folder: Path, cache: Path) -> None:
    start(folder)
    (file,) = cache.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == b"half" else damage)
    assert not is_kept(start(folder))
    assert is_kept(start(folder))


def test_a_file_that_says_more_than_it_was_written_with_is_not_believed(folder: Path, cache: Path) -> None:
    start(folder)
    (file,) = cache.iterdir()
    file.write_text(file.read_text().replace('"error": ', '"error": 1'))
    assert not is_kept(start(folder))


def test_without_a_cache_that_can_be_written_models_are_tested(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "file"))
    assert not any(is_kept(start(folder)) for _ in range(2))


# -- identity of files -----------------------------------------------------------------------------------------------


def test_files_that_changed_just_now_have_no_identity(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(100_000))
    assert identity.identity_of([file]) is None
    assert identity.identity_of([]) is None
    assert identity.identity_of([tmp_path / "missing"]) is None


def test_every_write_gives_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "RECENT_SECONDS", 0.0)
    file = tmp_path / "weights"
    file.write_bytes(bytes(100_000))
    before = identity.identity_of([file])
    assert before is not None
    assert identity.identity_of([file]) == before
    rewrite(file, bytes(99_999) + b"1")
    assert identity.identity_of([file]) != before


def test_a_folder_with_an_adapter_of_peft_does_not_stand_for_its_model(folder: Path) -> None:
    from foredraft.loading.sources import resolve

    assert len(identity.files_of(resolve(folder))) >= 2
    (folder / "adapter_config.json").write_text("{}")
    assert identity.files_of(resolve(folder)) == []
