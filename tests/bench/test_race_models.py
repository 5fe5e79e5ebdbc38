"""What a race hands to other engines: checkpoints, their conversion, and prompts."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import race as racing
import torch
from gguf import GGMLQuantizationType as Kind
from pairs import load_pair
from race import export, prompts_of
from workers.foredraft_worker import cast
from workers.protocol import eos_token_ids, has_draft, stored_file
from workers.to_gguf import convert, mixed_type

from foredraft import zoo
from foredraft.bench.workload import AGAIN
from foredraft.errors import ConfigError
from foredraft.loading.info import eos_token_ids as eos_of
from foredraft.loading.models import load_model
from gguf_files import write_llama

TARGET = zoo.path("zoo:tiny", "target")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    return tmp_path / "peers" / "models"


# -- checkpoints -------------------------------------------------------------------------------------------------


def test_a_pair_is_written_once_with_the_weights_of_the_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(racing, "say", said.append)
    found = export("zoo:tiny", None, "none")
    assert found.folder.parent == cache
    assert found.has_draft
    assert has_draft(found.folder)
    assert found.dtype == str(load_pair("zoo:tiny", None, "auto").target.dtype).removeprefix("torch.")
    for part in ("target", "draft"):
        written = load_model(str(found.folder / part), dtype="float32").model.state_dict()
        original = load_model("zoo:tiny", part=part, dtype="float32").model.state_dict()
        assert written.keys() == original.keys()
        assert all(torch.equal(written[name], original[name]) for name in original)
    assert export("zoo:tiny", None, "none") == found
    assert len(said) == 1
    assert racing.folder_name("zoo:tiny", None, "100m") != found.folder.name


def test_a_gguf_file_is_linked_with_what_others_read_beside_it(cache: Path, tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target.gguf", Kind.Q8_0, speaks=True).path
    draft = write_llama(tmp_path / "draft.gguf", Kind.Q4_0, speaks=True).path
    found = export(str(target), str(draft), "none")
    assert (found.is_gguf, found.has_draft, has_draft(found.folder)) == (True, True, True)
    assert (stored_file(found.folder, "target"), stored_file(found.folder, "draft")) == (target, draft)
    assert hashlib.sha256(target.read_bytes()).hexdigest() in found.models
    assert eos_token_ids(found.folder) == set(eos_of(load_model(str(target)).model))
    wanted = argparse.Namespace(prompts_file=None, kinds=None, context=None, max_new_tokens=8)
    prompt = next(prompts_of(found.folder / "target", wanted, lambda ids: ()))
    assert prompt.token_ids == next(prompts_of(TARGET, wanted, lambda ids: ())).token_ids
    assert export(str(target), str(draft), "none") == found
    for model, drafter, scale in ((target, "zoo:tiny", "none"), ("zoo:tiny", target, "none"), (target, None, "100m")):
        with pytest.raises(ConfigError, match="a GGUF file races as it is"):
            export(str(model), None if drafter is None else str(drafter), scale)


def test_casting_keeps_the_frequencies_of_rotations() -> None:
    model = load_pair("zoo:tiny", None, "float32").target
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cast(model, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


# -- GGUF --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "error"), [("f32", 1e-4), ("q8_0", 0.5)])
def test_a_converted_checkpoint_computes_what_it_did(tmp_path: Path, kind: str, error: float) -> None:
    """Read back by this library's own reader. A wrong order of rotated channels moves logits by several units."""
    load_model("zoo:tiny", dtype="float32").model.save_pretrained(tmp_path / "target")
    shutil.copy(TARGET / "tokenizer.json", tmp_path / "target")
    out = tmp_path / "model.gguf"
    convert(tmp_path / "target", out, kind)
    ids = torch.arange(40)[None] * 37 % 4096
    with torch.inference_mode():
        found, expected = (load_model(name, dtype="float32").model(ids).logits for name in (str(out), "zoo:tiny"))
    assert (found - expected).abs().max() < error
    assert expected.abs().max() > 5


def test_matrices_are_mixed_as_llama_cpp_mixes_them() -> None:
    """Q4_K_M of 30 layers with 576 inputs, 1536 in the middle, as of SmolLM2: what no K type fits is rounded less."""
    kinds = {
        (part, layer): mixed_type(f"blk.{layer}.{part}.weight", 1536 if part == "ffn_down" else 576, 30, True).name
        for part in ("attn_q", "attn_v", "ffn_up", "ffn_down")
        for layer in range(30)
    }
    fine = [*range(3), *range(5, 26, 3), *range(26, 30)]
    assert [layer for layer in range(30) if kinds["ffn_down", layer] == "Q6_K"] == fine
    assert [layer for layer in range(30) if kinds["attn_v", layer] == "Q8_0"] == fine
    assert {kinds["ffn_down", 3], kinds["attn_v", 3]} == {"Q4_K", "Q5_0"}
    assert {kinds[part, layer] for part in ("attn_q", "ffn_up") for layer in range(30)} == {"Q5_0"}
    assert mixed_type("token_embd.weight", 576, 30, True).name == "Q8_0"
    assert mixed_type("token_embd.weight", 2048, 22, True).name == "Q6_K"
    assert mixed_type("token_embd.weight", 2048, 22, False).name == "Q4_K"
    assert mixed_type("output.weight", 2048, 22, False).name == "Q6_K"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"model_type": "gpt2"}, "a gpt2 model; only Llama"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "Unigram; only byte-level BPE"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(TARGET, folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    with pytest.raises(RuntimeError, match=message):
        convert(folder, tmp_path / "model.gguf", "f32")


# -- prompts -----------------------------------------------------------------------------------------------------


def test_prompts_come_of_the_kinds_in_turn_and_may_be_asked_again() -> None:
    asked: list[tuple[int, ...]] = []

    def answer(ids: tuple[int, ...]) -> tuple[int, ...]:
        asked.append(ids)
        return (7, 7, 7)

    def wanted(**more: object) -> argparse.Namespace:
        given = {"prompts_file": None, "kinds": None, "context": None, "max_new_tokens": 8, **more}
        return argparse.Namespace(**given)

    every = prompts_of(TARGET, wanted(), answer)
    kinds = [next(every).category for _ in range(9)]
    assert len(set(kinds)) == 9
    assert not asked  # an answer is computed when its prompt is reached
    again = next(prompts_of(TARGET, wanted(kinds=[AGAIN]), answer))
    assert again.token_ids[: len(asked[0]) + 3] == (*asked[0], 7, 7, 7)
    assert again.token_ids[-len(asked[0]) :] == asked[0]
    assert {one.category for one in prompts_of(TARGET, wanted(kinds=["copy", "maths"]), answer)} == {"copy", "maths"}
    assert {len(one.token_ids) for one in prompts_of(TARGET, wanted(context=700), answer)} == {700}
    room = json.loads((TARGET / "config.json").read_text())["max_position_embeddings"]
    assert list(prompts_of(TARGET, wanted(max_new_tokens=room), answer)) == []
    with pytest.raises(ConfigError, match="no prompt is of the kind 'poetry'; choose among"):
        next(prompts_of(TARGET, wanted(kinds=["poetry"]), answer))
