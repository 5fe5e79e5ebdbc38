"""What loading leaves in memory: weights once, packed, and nothing of the file that they came from."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.model.execution.sharing import move_out
from foredraft.model.reduced import converted_bytes, reduced, runs_own_attention
from foredraft.native.library import library
from foredraft.native.packed_matmul import PackedMatrix

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is read from /proc")


PROMPT = [5, 6, 7, 5, 6, 7, 5]


def saved(folder: Path, *, is_tied: bool) -> Path:
    """A checkpoint of random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=96, tie_word_embeddings=is_tied, **sizes)).save_pretrained(folder)
    return folder


def greedy(folder: Path, count: int) -> list[int]:
    model, tokens = LlamaForCausalLM.from_pretrained(folder), list(PROMPT)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def is_mapped(file: Path) -> bool:
    return str(file) in Path("/proc/self/maps").read_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("execution", "is_tied"),
    [("packed", True), ("packed", False), pytest.param("compiled", True, marks=pytest.mark.full)],
)
def test_the_file_is_unmapped_once_weights_are_packed(tmp_path: Path, execution: str, is_tied: bool) -> None:
    folder = saved(tmp_path, is_tied=is_tied)
    llm = LLM(folder, "ngram", execution=execution, tokenizer=None)
    assert not is_mapped(folder / "model.safetensors")
    (output,) = llm.generate(
        {"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    )
    assert output.outputs[0].token_ids == greedy(folder, 12)


def test_what_runs_from_the_file_stays_mapped(tmp_path: Path) -> None:
    folder = saved(tmp_path, is_tied=False)
    llm = LLM(folder, execution="eager", tokenizer=None)
    assert is_mapped(folder / "model.safetensors")
    assert llm.target.num_layers == 2


def test_nothing_is_copied_where_most_of_a_model_stays(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(saved(tmp_path, is_tied=False))
    before = [parameter.data_ptr() for parameter in model.parameters()]
    move_out(model, [model.lm_head.weight])
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    move_out(model, [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)])
    after = [parameter.data_ptr() for parameter in model.parameters()]
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 6  # embeddings and norms


@pytest.mark.skipif(library() is None, reason="no kernels here")
def test_weights_that_packing_has_released_are_not_made_again_to_be_probed(tmp_path: Path) -> None:
    """A reduced model holds one number for all of a weight, in the dtype that it is asked in, and norms."""
    llm = LLM(saved(tmp_path, is_tied=False), quantization="int8", tokenizer=None)
    lm, seen = llm.target, dict[str, int]()
    small = reduced(lm.shadow, lm.layers, (0, 1), torch.float64, None)

    def see(module: torch.nn.Module, *_: object) -> None:
        for name, weight in module.named_parameters():
            assert weight.dtype == torch.float64
            seen[name] = weight.untyped_storage().nbytes()

    small.model.layers[0].input_layernorm.register_forward_hook(lambda *_: see(small.model.layers[0]))
    with torch.inference_mode(), pytest.raises(TypeError, match="a packed layer of"):
        small(torch.tensor([PROMPT]), use_cache=False)
    assert seen["self_attn.q_proj.weight"] == 8
    assert seen["input_layernorm.weight"] == 64 * 8
    assert converted_bytes(lm.layers[0], torch.float64) == 2 * 64 * 8


@pytest.mark.skipif(library() is None, reason="no kernels here")
def test_which_attention_runs_is_seen_without_a_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = LLM(saved(tmp_path, is_tied=True), tokenizer=None).target
    lm.execution.program = None  # modules run
    monkeypatch.setattr(PackedMatrix, "__call__", None)
    assert runs_own_attention(lm) == ""


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_collected_after_loading_as_before(tmp_path: Path, is_enabled: bool) -> None:
    """Also where loading fails."""
    folder = saved(tmp_path, is_tied=False)
    (gc.enable if is_enabled else gc.disable)()
    try:
        LLM(folder, tokenizer=None)
        assert gc.isenabled() == is_enabled
        with pytest.raises(ConfigError):
            LLM(folder, quantization="int3")
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
