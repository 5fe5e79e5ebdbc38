"""The hook among everything around it: streamers, threads, pipelines, and a model that stays as it was."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from test_hf_stops import Recorder, target
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

import foredraft
from foredraft import speculate, zoo
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.loading.adapters import shared_adapter
from foredraft.model.lm import CausalLM
from foredraft.testing import perturbed, toy_model


@cache
def pair() -> tuple[Any, Any, Any]:
    return zoo.load()


IDS = torch.tensor([[10, 11, 12], [20, 21, 22]])
OPTIONS: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False}


def generate(model: PreTrainedModel | None = None, **options: Any) -> Any:
    return (model or target()).generate(IDS, **{**OPTIONS, **options})


# -- streamers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["speculate", "generate"])
def test_a_streamer_gets_what_generate_gives_it(place: str) -> None:
    """`generate` does not hand its streamer on; it is found all the same."""
    theirs, ours = Recorder(), Recorder()
    generate(streamer=theirs)
    if place == "generate":
        generate(streamer=ours, custom_generate=speculate("ngram"))
    else:
        generate(custom_generate=speculate("ngram", streamer=ours))
    assert ours.values == theirs.values
    assert ours.values[-1] == "end"
    assert ours.values.count("end") == 1


def test_a_callable_may_be_wrapped() -> None:
    """The surrounding `generate` is found through other functions."""
    recorder, hook = Recorder(), speculate("ngram")

    def wrapped(model: Any, *args: Any, **kwargs: Any) -> Any:
        return (lambda: hook(model, *args, **kwargs))()

    assert torch.equal(generate(streamer=recorder, custom_generate=wrapped), generate())
    assert recorder.values[-1] == "end"


def test_text_comes_as_it_is_made() -> None:
    model, drafter, tokenizer = pair()
    inputs = tokenizer("Once upon a time there was", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    hook = speculate("draft_model", model=drafter, streamer=streamer)
    options = {**inputs, "max_new_tokens": 24, "do_sample": False}
    thread = threading.Thread(target=model.generate, kwargs={**options, "custom_generate": hook})
    thread.start()
    pieces = list(streamer)
    thread.join()
    text = tokenizer.decode(model.generate(**options)[0, inputs["input_ids"].shape[1] :])
    assert "".join(pieces) == text
    assert len(pieces) > 5


def test_a_streamer_for_one_row_refuses_two_as_always() -> None:
    _, _, tokenizer = pair()
    with pytest.raises(ValueError, match="batch size 1"):
        generate(custom_generate=speculate("ngram", streamer=TextStreamer(tokenizer)))


def test_a_streamer_is_ended_when_the_call_breaks_off() -> None:
    recorder = Recorder()

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 6:
            raise OSError("broken")
        return scores

    hook = speculate("ngram", streamer=recorder)
    with pytest.raises(OSError, match="broken"):
        generate(custom_generate=hook, logits_processor=[broken])
    assert recorder.values[-1] == "end"
    recorder.values.clear()
    assert torch.equal(generate(custom_generate=hook), generate())  # and the hook works on


# -- one callable, many uses ---------------------------------------------------------------------------------------


def test_one_callable_for_several_models_and_threads() -> None:
    models = [toy_model(seed=seed) for seed in range(2)]
    expected = [generate(model) for model in models]
    hook = speculate("ngram")
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        results[number] = generate(models[number % 2], custom_generate=hook)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(6))
    for number, result in results.items():
        assert torch.equal(result, expected[number % 2])
    assert hook.stats.num_emitted_tokens == 6 * 2 * 12


def test_adapters_are_made_beforehand_and_once_and_die_with_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing counts nothing and draws nothing, and leaves none to be made by a call."""
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return CausalLM(*args, **kwargs)

    for place in ("foredraft.loading.adapters", "foredraft.loading.models"):
        monkeypatch.setattr(f"{place}.CausalLM", make)
    model, drafter = toy_model(), toy_model(seed=1)
    state = torch.get_rng_state()
    hook = speculate("draft_model", model=drafter)
    assert hook.prepare(model) is hook
    assert torch.equal(torch.get_rng_state(), state)
    assert hook.stats.num_emitted_tokens == 0
    for _ in range(2):
        assert torch.equal(generate(model, custom_generate=hook), generate(model))
        generate(model, custom_generate=speculate("draft_model", model=drafter))
    assert len(made) == 2
    alive = [weakref.ref(model), weakref.ref(drafter)]
    del model, drafter, hook
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.parametrize("rounding", [{"quantization": "int4"}, {"kv_cache_dtype": "int8"}])
def test_what_is_rounded_is_decoded_beside_the_model_itself(rounding: dict[str, Any]) -> None:
    """The tokens of an `LLM` in as many bits; a call without them still has the model's own."""
    ids = torch.tensor([[5, 6, 7] * 8])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "use_cache": True}
    model, before = target(), target().generate(ids, **options)
    found = model.generate(ids, custom_generate=speculate("ngram", **rounding), **options)
    llm = foredraft.LLM(target(), "ngram", **rounding)
    params = foredraft.SamplingParams(temperature=0.0, max_tokens=12)
    (wanted,) = llm.generate([{"prompt_token_ids": ids[0].tolist()}], params, use_tqdm=False)
    assert found[0, ids.shape[1] :].tolist() == list(wanted.outputs[0].token_ids)
    assert torch.equal(model.generate(ids, custom_generate=speculate("ngram"), **options), before)
    wrong = [({"quantization": "int3"}, "int4"), ({"kv_cache_dtype": "int4"}, "int8")]
    for option, message in *wrong, ({"weights": "stored"}, "it applies to the target"):
        with pytest.raises(ConfigError, match=message):
            speculate("ngram", **option)


def test_preparing_refuses_what_a_call_would_refuse() -> None:
    model = toy_model()
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError):
        speculate("ngram").prepare(model)
    with pytest.raises(ConfigError, match="layer_skip"):
        speculate("layer_skip").prepare(toy_model())


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", ["in place", "replaced", "other dtype", "other attention", "loaded"])
def test_changes_of_the_model_are_seen(change: str) -> None:
    model, other = toy_model(dtype=torch.float32), toy_model(seed=1, dtype=torch.float32)
    hook = speculate("ngram")
    generate(model, custom_generate=hook)
    with torch.no_grad():
        if change == "in place":
            model.lm_head.weight.mul_(-1.0)
        elif change == "replaced":
            model.lm_head = copy.deepcopy(other.lm_head)
        elif change == "other dtype":
            model.double()
        elif change == "other attention":
            model.set_attn_implementation("eager")
        else:
            model.load_state_dict(other.state_dict())
    assert torch.equal(generate(model, custom_generate=hook), generate(model))


def test_changes_of_the_drafter_are_seen() -> None:
    """A draft model that learns drafts better; one that was left behind would not."""
    model, drafter = toy_model(), perturbed(target(), 2.0)
    hook = speculate("draft_model", model=drafter, length_policy="fixed")
    generate(model, custom_generate=hook)
    before = hook.stats.tokens_per_step
    drafter.load_state_dict(model.state_dict())
    drafter.lm_head = copy.deepcopy(model.lm_head)
    hook = speculate("draft_model", model=drafter, length_policy="fixed")
    generate(model, custom_generate=hook)
    assert before < 1.5 < 4 < hook.stats.tokens_per_step


# -- what stays as it was ------------------------------------------------------------------------------------------


def test_the_model_and_its_configs_stay_as_they_were() -> None:
    model = toy_model()
    model.train()
    before = copy.deepcopy(model.state_dict())
    configs = (model.config.to_dict(), model.generation_config.to_dict())
    given = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.7)
    as_given = given.to_dict()
    model.generate(IDS, attention_mask=torch.ones_like(IDS), generation_config=given, custom_generate=speculate("nasd"))
    assert (model.config.to_dict(), model.generation_config.to_dict()) == configs
    assert given.to_dict() == as_given
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_results_are_ordinary_tensors() -> None:
    """A sequence can be trained on: no tensor of inference mode leaves the engine."""
    model = toy_model()
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = generate(model, custom_generate=speculate("ngram"), eos_token_id=[49, 28], **options)
    tensors = [output.sequences, *output.scores, *output.logits]
    assert not any(tensor.is_inference() for tensor in tensors)
    model(output.sequences, labels=output.sequences).loss.backward()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_any_gradient_mode_will_do() -> None:
    expected = generate()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            assert torch.equal(generate(custom_generate=speculate("ngram")), expected)
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == state


def test_output_without_a_cache_is_the_plain_one() -> None:
    """`past_key_values` of the result is None: drafts are verified over a cache of foredraft's own."""
    options = {"return_dict_in_generate": True}
    ours, theirs = generate(custom_generate=speculate("ngram"), **options), generate(**options)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.scores is None
    assert ours.logits is None
    assert ours.past_key_values is None
    assert isinstance(theirs.past_key_values, DynamicCache)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_other_caches_give_the_same_text(options: dict[str, Any]) -> None:
    assert torch.equal(generate(custom_generate=speculate("ngram"), **options), generate())


# -- programs around it --------------------------------------------------------------------------------------------


def test_text_generation_pipelines() -> None:
    """Given at construction or per call, one text or a batch, with several samples."""
    model, drafter, tokenizer = pair()
    hook = speculate("draft_model", model=drafter, tokenizer=tokenizer)
    texts = ["The farmer had", "Once upon a time there was a little girl who"]
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)
    ours = pipeline("text-generation", model=model, tokenizer=tokenizer, custom_generate=hook)
    assert ours(texts, **options) == plain(texts, **options)
    assert plain(texts, batch_size=2, custom_generate=hook, **options) == plain(texts, batch_size=2, **options)
    torch.manual_seed(0)
    samples = ours(texts[0], max_new_tokens=8, do_sample=True, num_return_sequences=3)
    assert len({sample["generated_text"] for sample in samples}) == 3
    assert hook.stats.num_accepted_draft_tokens > 0


def test_a_callable_is_shown_by_what_it_was_made_of_and_copied_as_itself() -> None:
    hook = speculate("draft_model", model=toy_model(), num_speculative_tokens=3)
    assert repr(hook).startswith("speculate(method='draft_model', model=LlamaForCausalLM, num_speculative_tokens=3")
    assert copy.deepcopy({"custom_generate": hook})["custom_generate"] is hook


@pytest.mark.usefixtures("_governed")
def test_a_callable_shows_what_was_drafted_and_why() -> None:
    """It had counters and no reason: whoever saw few drafts could not learn why the governor made them."""
    hook = speculate("ngram")
    before = repr(hook)
    generate(toy_model(), custom_generate=hook)  # models of other tests keep drafters without a governor
    assert hook.governor is not None
    assert hook.governor["decision"].startswith(("drafting", "not drafting"))
    assert "estimated_speedup" in hook.governor
    config, drafts, decision = repr(hook).splitlines()
    assert config == before
    assert drafts.startswith("drafts: ")
    assert decision == f"latest decision: {hook.governor['decision']}"


def test_a_callable_without_a_governor_shows_only_its_config() -> None:
    hook = speculate("none")
    before = repr(hook)
    generate(custom_generate=hook)
    assert hook.governor is None
    assert repr(hook) == before


# -- a slow first call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_streamer", [False, True])
def test_a_slow_first_call_says_what_it_does_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_streamer: bool
) -> None:
    """Testing a model and packing its weights took seconds without a word."""
    is_said = _slow_until_said(monkeypatch)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    hook, model = speculate("ngram"), toy_model()
    options = {"streamer": Recorder()} if has_streamer else {}
    generate(model, custom_generate=hook, **options)
    assert is_said.is_set()
    start = "\n" if has_streamer else ""
    assert capsys.readouterr() == ("", f"{start}foredraft: preparing and testing the model ...\n")
    monkeypatch.setattr("foredraft.progress.threading.Timer", None)  # the second call starts none
    generate(model, custom_generate=hook)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("place", ["a file", "a handler", "turned off"])
def test_a_slow_first_call_is_silent_where_nobody_would_read_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    is_said = _slow_until_said(monkeypatch)
    monkeypatch.setattr("rich.console.Console.is_terminal", place != "a file")
    if place != "a file":
        caplog.set_level("INFO" if place == "a handler" else "ERROR", "foredraft")
    speculate("ngram").prepare(toy_model())
    assert is_said.is_set()
    assert capsys.readouterr() == ("", "")
    assert caplog.messages == (["preparing and testing the model ..."] if place == "a handler" else [])


def _slow_until_said(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make preparations wait until `stage` has returned."""
    is_said, real = threading.Event(), foredraft.progress.stage

    def stage(*args: Any, **options: Any) -> None:
        real(*args, **options)
        is_said.set()

    def slow(*args: Any) -> Any:
        is_said.wait(60)
        return shared_adapter(*args)

    monkeypatch.setattr("foredraft.progress.stage", stage)
    monkeypatch.setattr("foredraft.progress.SECONDS_UNSAID", 0.0)
    monkeypatch.setattr("foredraft.hf.hook.shared_adapter", slow)
    return is_said


# -- drafters that come with a model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(speculate, id="default"),
        pytest.param(lambda: speculate("eagle3"), id="its own head"),
        pytest.param(lambda: speculate("suffix+eagle3", model="zoo:tiny"), id="a head by the name of its model"),
        pytest.param(lambda: speculate({"method": "auto", "num_speculative_tokens": 3}), id="mapping"),
    ],
)
def test_a_model_of_the_zoo_has_its_drafters_inside_generate(given: Any) -> None:
    """The model was loaded by transformers, from the folder of the zoo."""
    model = pair()[0]
    assert zoo.name_of(model.name_or_path) == "zoo:tiny"
    drafting = given()
    assert torch.equal(generate(model, custom_generate=drafting), generate(model, custom_generate=speculate("none")))
    assert drafting.stats.num_draft_tokens
