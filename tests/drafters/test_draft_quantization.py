"""Drafters whose weights are rounded: their weights are integers, and the output is that of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from foredraft import LLM, SamplingParams, SpeculativeConfig, zoo
from foredraft.cli.options import DraftingOptions
from foredraft.errors import ConfigError
from foredraft.model.execution.packing import PackedProduct, packed_products
from foredraft.native.library import library
from gguf_files import write_llama

TINY = "zoo:tiny"
PROMPTS = ["Once upon a time", "The cat sat on the"]
BITS = {"int8": {8}, "int4": {4, 8}}
"""Bits of the weights by name; output layers have 8."""

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels here")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(TINY, None, dtype="float32")


def tokens_of(llm: LLM, temperature: float = 0.0) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def bits_of(products: list[PackedProduct]) -> set[int | None]:
    """Bits of the integers of each product; None for floats."""
    codes = [product.codes(0) for product in products]
    return {None if each is None else each.bits for each in codes}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("quantization", BITS)
def test_a_rounded_draft_model_changes_no_token(llm: LLM, quantization: str, temperature: float) -> None:
    config = {"method": "draft_model", "quantization": quantization, "num_speculative_tokens": 3}
    rounded = llm.with_speculative_config(config)
    model = rounded.drafting.model
    assert model is not None
    assert model.quantization == rounded.drafting.info.quantization == quantization  # type: ignore[union-attr]
    assert bits_of(list(model.execution.products)) == BITS[quantization]
    assert tokens_of(rounded, temperature) == tokens_of(llm, temperature)


def test_a_draft_model_that_is_in_use_is_not_taken_for_a_rounded_one(llm: LLM) -> None:
    plain = llm.with_speculative_config("draft_model")
    rounded = llm.with_speculative_config({"method": "draft_model", "quantization": "int4"})
    assert bits_of(list(plain.drafting.model.execution.products)) == {None}  # type: ignore[union-attr]
    assert bits_of(list(rounded.drafting.model.execution.products)) == BITS["int4"]  # type: ignore[union-attr]


def test_a_loaded_draft_model_is_rounded_for_drafts_alone(llm: LLM) -> None:
    _, draft, _ = zoo.load(TINY)
    before = {name: weight.clone() for name, weight in draft.named_parameters()}
    rounded = llm.with_speculative_config({"method": "draft_model", "model": draft, "quantization": "int8"})
    assert bits_of(list(rounded.drafting.model.execution.products)) == {8}  # type: ignore[union-attr]
    assert tokens_of(rounded) == tokens_of(llm)
    assert all(weight.equal(before[name]) for name, weight in draft.named_parameters())


@pytest.mark.parametrize("method", ["eagle", "eagle2", "eagle3", "medusa", "hydra", "hydra++"])
@pytest.mark.parametrize("quantization", BITS)
def test_a_rounded_head_changes_no_token(llm: LLM, method: str, quantization: str) -> None:
    rounded = llm.with_speculative_config({"method": method, "quantization": quantization})
    drafter: Any = rounded.drafting.new_drafter()
    head: nn.Module = drafter.head if hasattr(drafter, "head") else drafter.heads
    found = bits_of(packed_products(head))
    assert found
    assert found <= BITS[quantization]
    assert min(found) == min(BITS[quantization])  # type: ignore[type-var]
    assert tokens_of(rounded) == tokens_of(llm)


def test_a_head_of_4_bits_is_smaller_in_the_native_kernels(llm: LLM) -> None:
    sizes = []
    for quantization in ("int8", "int4"):
        drafter: Any = llm.with_speculative_config({"method": "eagle3", "quantization": quantization}).drafting
        sizes.append(drafter.new_drafter().native.num_bytes)
    assert sizes[1] < 0.8 * sizes[0]


def test_parts_of_a_combination_are_rounded(llm: LLM) -> None:
    rounded = llm.with_speculative_config({"method": "suffix+draft_model", "quantization": "int8"})
    assert bits_of(list(rounded.drafting.model.execution.products)) == {8}  # type: ignore[union-attr]
    assert SpeculativeConfig(quantization="int4").method == "auto"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngram", "quantization": "int8"}, "key 'quantization' has no meaning for method 'ngram'"),
        ({"method": "sparse_kv", "quantization": "int8"}, "sparse_kv drafts without a model or head of its own"),
        ({"method": "suffix+ngram", "quantization": "int8"}, r"suffix\+ngram drafts without a model or head"),
        ({"method": "draft_model", "quantization": "fp8"}, "quantization is 'fp8'; choose one of int8, int4"),
    ],
)
def test_what_has_no_weights_to_round_is_refused(llm: LLM, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.with_speculative_config(config)


def test_a_drafter_in_a_gguf_file_is_not_rounded_again(llm: LLM, tmp_path: Path) -> None:
    file = write_llama(tmp_path / "draft.gguf").path
    with pytest.raises(ConfigError, match="are integers already, which are used as they are in the file"):
        llm.with_speculative_config({"method": "draft_model", "model": str(file), "quantization": "int8"})


def test_heads_that_run_in_torch_or_are_loaded_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="heads of a model that runs eagerly run in torch"):
        LLM(TINY, {"method": "eagle3", "quantization": "int8"}, execution="eager")
    loaded: Any = llm.with_speculative_config("medusa").drafting.new_drafter()
    with pytest.raises(ConfigError, match="the head is loaded already, and its weights belong to you"):
        llm.with_speculative_config({"method": "medusa", "model": loaded.heads, "quantization": "int8"})


def test_the_command_line_has_an_option_for_it() -> None:
    options = DraftingOptions(method="draft_model", draft_quantization="int4")
    assert options.config().quantization == "int4"
