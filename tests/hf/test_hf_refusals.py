"""What the hook refuses, by name and before the model runs; and bad input."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from foredraft import speculate
from foredraft.errors import (
    ConfigError,
    ContextLengthError,
    NumericsError,
    PromptError,
    UnsupportedModelError,
    UnsupportedStateError,
)
from foredraft.hf.refusals import GenerateArguments, check_inputs
from foredraft.model.support import cache_argument
from foredraft.testing import toy_model

IDS = torch.tensor([[10, 11, 12]])
MASK = torch.ones_like(IDS)
CACHE = cache_argument(toy_model())
"""What this release of transformers calls a cache."""


def filled_cache() -> DynamicCache:
    return toy_model()(IDS[:, :-1], use_cache=True)[CACHE]


def run(**options: Any) -> Any:
    model = options.pop("model", None) or toy_model()
    given = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 4, "do_sample": False, **options}
    given = {name: value for name, value in given.items() if value is not None}
    hook = given.pop("hook", None) or speculate("ngram")
    return model.generate(**given, custom_generate=hook)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams=1"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=1"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "penalty_alpha"),
        ({"dola_layers": "low"}, "dola_layers"),
        ({"prompt_lookup_num_tokens": 3}, r"speculate\(method='ngram'\)"),
        ({"assistant_model": toy_model()}, r"speculate\(method='draft_model', model=assistant\)"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({CACHE: filled_cache()}, "give the whole text as input_ids"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 32, dtype=torch.float64)}, "give input_ids"),
        ({"position_ids": torch.tensor([[5, 6, 7]])}, "leave position_ids out"),
        ({"position_ids": torch.tensor([[[0, 1, 2]]])}, "position_ids"),
    ],
)
def test_refused_by_name_with_a_remedy(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(**options)


def test_inputs_beside_the_text_are_refused_without_generate_around_the_hook_too() -> None:
    """It sees only the cache itself then."""
    for name, value, said in (
        ("past_key_values", filled_cache(), "past_key_values"),
        ("cache", filled_cache(), "past_key_values"),
        ("token_type_ids", IDS, "return_token_type_ids=False"),
        ("pixel_values", IDS, "pixel_values"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_inputs({name: value}, GenerateArguments())
    check_inputs({"past_key_values": DynamicCache(), "pixel_values": None, "use_cache": True}, GenerateArguments())


def test_an_empty_cache_is_none() -> None:
    """Conversations begin with one. It stays empty, so that the next turn may give it again with the whole text."""
    model, cache, ids = toy_model(), DynamicCache(), IDS
    for _ in range(2):
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        ids = run(model=model, input_ids=ids, attention_mask=torch.ones_like(ids), **{CACHE: cache})
        assert torch.equal(ids, want)
        assert cache.get_seq_length() == 0


def test_encoder_decoder_models_are_refused() -> None:
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, eos_token_id=1
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        run(model=T5ForConditionalGeneration(config).eval())


def test_virtual_tokens_are_refused() -> None:
    """PEFT puts them before the text by a method of its own on the model, and puts the model's own back after."""
    model = toy_model()
    own = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(UnsupportedModelError, match="prompt tuning"):
        run(model=model)
    model.prepare_inputs_for_generation = own
    assert run(model=model).shape == (1, 7)


@pytest.mark.parametrize("name", ["adapter_names", "alora_offsets"])
def test_adapters_by_row_or_place_are_refused(name: str) -> None:
    """PEFT hands them to its layers by hooks, which count the rows and tokens of a plain call."""
    model = toy_model()
    inject = functools.partial(lambda module, args, kwargs, **more: (args, kwargs), **{name: ["one"]})
    handle = model.lm_head.register_forward_pre_hook(inject, with_kwargs=True)
    with pytest.raises(
        UnsupportedModelError,
        match=f"{name} .* changes the order of rows and tokens .*, or call generate without custom_generate",
    ):
        run(model=model)
    handle.remove()
    assert run(model=model).shape == (1, 7)


def test_models_that_cannot_be_rolled_back_are_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()
    with pytest.raises(UnsupportedStateError):
        run(model=model, attention_mask=None)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([10, 11, 3], [1, 1, 0], r"row 1 .*padding_side = 'left'"),
        ([3, 3, 3], [0, 0, 0], "row 1 contains no tokens"),
        ([10, 99, 12], [1, 1, 1], "99"),
    ],
)
def test_rows_that_are_no_prompts_are_refused(ids: list[int], mask: list[int], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        run(input_ids=torch.tensor([[10, 11, 12], ids]), attention_mask=torch.tensor([[1, 1, 1], mask]))


def test_tokens_masked_inside_a_text_are_refused_where_attention_has_windows() -> None:
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        eos_token_id=None,
    )
    with pytest.raises(ConfigError, match="row 0 masks tokens inside its text"):
        run(model=MistralForCausalLM(config).eval(), attention_mask=torch.tensor([[1, 0, 1]]))


CONTEXT = 256


def long_prompt(length: int) -> torch.Tensor:
    return torch.randint(9, 64, (1, length), generator=torch.Generator().manual_seed(0))


def test_a_row_that_fills_its_context_ends_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Plain generate goes on, beyond what the model was trained for. The first version lost all that was said."""
    ids = long_prompt(250)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    output = run(**options, max_new_tokens=20)
    assert "row 0 has filled the 256 tokens of the model's context and ends there" in caplog.text
    assert output.shape == (1, CONTEXT)
    caplog.clear()
    assert torch.equal(run(**options, max_new_tokens=6), output)
    assert not caplog.text
    assert torch.equal(toy_model().generate(**options, max_new_tokens=6, do_sample=False), output)
    with pytest.raises(ContextLengthError, match="256 tokens and the context 256"):
        run(input_ids=long_prompt(256), attention_mask=torch.ones(1, 256))


@pytest.mark.parametrize(("has_scores", "eos_token_id"), [(False, None), (True, 63)])
def test_rows_with_room_go_on_beside_one_that_is_full(
    has_scores: bool, eos_token_id: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The full one is padded; its scores over the padding are zero, since no position is left for them."""
    full, short = long_prompt(250), long_prompt(9)
    ids = torch.cat([full, F.pad(short, (241, 0), value=3)])
    mask = (torch.arange(250) >= torch.tensor([[0], [241]])).long()
    model = toy_model()
    given = {"pad_token_id": 3, "eos_token_id": eos_token_id}
    more = {"return_dict_in_generate": True, "output_scores": True} if has_scores else {}
    output = run(model=model, input_ids=ids, attention_mask=mask, max_new_tokens=20, **given, **more)
    sequences = output.sequences if has_scores else output
    alone = model.generate(short, attention_mask=torch.ones_like(short), max_new_tokens=20, do_sample=False, **given)
    assert sequences.shape == (2, 270)
    assert sequences[1, 250:].tolist() == alone[0, 9:].tolist()
    assert sequences[0, :CONTEXT].tolist() == run(input_ids=full, attention_mask=None, max_new_tokens=6)[0].tolist()
    assert sequences[0, CONTEXT:].tolist() == [3] * 14
    assert caplog.text.count("ends there") == 1
    if has_scores:
        assert len(output.scores) == 20
        assert not any(bool(scores[0].any()) for scores in output.scores[6:])
        assert all(bool(scores.any(dim=1).all()) for scores in output.scores[:6])


def test_without_padding_all_rows_end_with_the_full_one() -> None:
    ids = torch.cat([long_prompt(250), F.pad(long_prompt(9), (241, 0), value=3)])
    mask = (torch.arange(250) >= torch.tensor([[0], [241]])).long()
    output = run(input_ids=ids, attention_mask=mask, max_new_tokens=20)
    assert output.shape == (2, CONTEXT)


def test_a_processor_that_returns_nan_is_named() -> None:
    with pytest.raises(NumericsError, match="logits processor"):
        run(logits_processor=[lambda ids, scores: scores * torch.nan])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "ngram", "stop_strings": "x"}, "tokenizer"),
        ({"method": "ngrm"}, "did you mean 'ngram'"),
        ({"method": "ngram", "num_speculative_token": 3}, "num_speculative_tokens"),
        ({"method": {"method": "ngram"}, "num_speculative_tokens": 3}, "and also"),
    ],
)
def test_speculate_refuses_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        speculate(**options)


def test_two_streamers_are_one_too_many() -> None:
    class Silent:
        def put(self, value: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            pass

    with pytest.raises(ConfigError, match="got a streamer"):
        run(streamer=Silent(), hook=speculate("ngram", streamer=Silent()))


def test_an_unknown_execution_is_refused_before_any_model_is_there() -> None:
    with pytest.raises(ConfigError, match=r"execution='compild' is unknown.*compiled"):
        speculate("ngram", execution="compild")
