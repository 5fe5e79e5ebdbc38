"""The Python front door: prompts in every form, results in vLLM's shape, and an LLM that outlives every mishap."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import foredraft
from foredraft import LLM, SamplingParams, StructuredOutputs, speculate
from foredraft.cli.writers import summary
from foredraft.config.acceptance import MATCH, TYPICAL
from foredraft.config.engine import Guarantee
from foredraft.drafters import make_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.engine.stats import StepClock, StepSeconds
from foredraft.errors import ConfigError, ContextLengthError, EngineBusyError, PromptError
from foredraft.loading.info import dtype_note, load_line, output_words
from foredraft.prompts.prompts import spellings
from foredraft.testing import toy_model
from tiny import tiny

STORY = "Once upon a time there was a"
QUESTION = "How many apples does Tom have? Tom has"
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SAMPLED = SamplingParams(temperature=1, max_tokens=16, seed=7)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return tiny()


@pytest.fixture(scope="module")
def llm(plain: LLM) -> LLM:
    return plain.with_speculative_config("draft_model")


def texts(outputs: list[Any]) -> list[str]:
    return [sample.text for output in outputs for sample in output.outputs]


def ids(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


# -- names -----------------------------------------------------------------------------------------------------------


def test_public_names_are_sorted_and_exist() -> None:
    assert foredraft.__all__ == sorted(foredraft.__all__, key=lambda name: (not name.isupper(), name))
    for name in foredraft.__all__:
        assert getattr(foredraft, name).__name__ == name
    assert dir(foredraft) == sorted(foredraft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        foredraft.Nonsense  # noqa: B018


# -- results ---------------------------------------------------------------------------------------------------------


def test_results_have_vllms_shape(llm: LLM) -> None:
    (output,) = llm.generate(STORY, SamplingParams(temperature=1, max_tokens=9, seed=3, logprobs=2))
    (sample,) = output.outputs
    assert output.prompt == STORY
    assert list(output.prompt_token_ids) == llm.tokenizer(STORY)["input_ids"]
    assert output.finished
    assert output.lossless
    assert len(sample.token_ids) == 9
    assert (sample.finish_reason, sample.stop_reason, sample.seed) == ("length", None, 3)
    assert sample.text == llm.tokenizer.decode(sample.token_ids)
    assert len(sample.logprobs) == 9
    for token, table in zip(sample.token_ids, sample.logprobs, strict=True):
        assert 2 <= len(table) <= 3
        assert next(iter(table)) == token
        assert table[token].decoded_token == llm.tokenizer.decode([token])
        assert {entry.rank for entry in table.values()} >= {1, 2}
    own = [table[token].logprob for token, table in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert sample.cumulative_logprob == pytest.approx(sum(own))


def test_metrics_are_vllms_and_add_up(llm: LLM) -> None:
    (output,) = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    metrics = output.metrics.speculative_decoding
    assert list(metrics) == [
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "num_spec_steps",
        "num_spec_tokens",
        "num_steps",
        "num_proposed_tokens",
        "num_cut_tokens",
        "num_undrafted_steps",
        "tokens_per_step",
        "lossless",
    ]
    cut, undrafted = metrics["num_cut_tokens"], metrics["num_undrafted_steps"]
    assert metrics["num_proposed_tokens"] == metrics["num_draft_tokens"] + sum(cut.values())
    assert metrics["num_steps"] == metrics["num_spec_steps"] + sum(undrafted.values())
    histogram = metrics["acceptance_histogram"]
    assert all(isinstance(key, str) and count > 0 for key, count in histogram.items())
    assert sum(int(key) * count for key, count in histogram.items()) == metrics["num_accepted_draft_tokens"]
    assert sum(histogram.values()) == metrics["num_spec_steps"]
    assert metrics["num_spec_tokens"] == 5
    assert metrics["tokens_per_step"] == pytest.approx(30 / metrics["num_steps"])
    assert metrics["mean_acceptance_length"] > 1
    assert output.metrics.decode_seconds > 0
    assert output.metrics.tokens_per_second == pytest.approx(30 / output.metrics.decode_seconds)


def test_token_ids_end_with_the_eos_and_the_text_does_not_show_it(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "What is your favorite movie?"}], SamplingParams(temperature=0))
    (sample,) = output.outputs
    assert sample.token_ids[-1] == 3
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    assert "<|end|>" not in sample.text
    assert output.prompt.startswith("<|user|>What is")


def test_samples_of_one_prompt_differ_and_repeat_with_the_seed(llm: LLM, plain: LLM) -> None:
    params = SamplingParams(temperature=1, max_tokens=12, n=6, seed=11)
    (first,) = llm.generate(STORY, params)
    assert [sample.index for sample in first.outputs] == list(range(6))
    assert len({sample.token_ids for sample in first.outputs}) > 1
    assert ids([first]) == ids(plain.generate([QUESTION, STORY], params)[1:])


def test_a_drawn_seed_is_reported_and_gives_the_same_again(llm: LLM) -> None:
    first = llm.generate([STORY, STORY], SamplingParams(max_tokens=12))
    seeds = [output.outputs[0].seed for output in first]
    assert seeds[0] != seeds[1]
    again = llm.generate([STORY, STORY], [SamplingParams(max_tokens=12, seed=seed) for seed in seeds])
    assert ids(again) == ids(first)


def test_the_seed_of_an_llm_repeats_its_requests() -> None:
    first, second = (LLM(toy_model(), seed=5) for _ in range(2))
    outputs = [llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=8)) for llm in (first, second)]
    assert ids(outputs[0]) == ids(outputs[1])
    assert outputs[0][0].outputs[0].seed != outputs[0][1].outputs[0].seed


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_come_in_every_form(plain: LLM) -> None:
    token_ids = plain.tokenizer(STORY)["input_ids"]
    forms: list[Any] = [
        STORY,
        {"prompt": STORY},
        {"prompt_token_ids": token_ids},
        token_ids,
        torch.tensor(token_ids),
        [STORY],
        [token_ids],
        [{"prompt_token_ids": torch.tensor(token_ids)}],
        iter(token_ids),
        [iter(token_ids)],
        {"prompt_token_ids": iter(token_ids)},
        (text for text in [STORY]),
    ]
    expected = plain.generate(STORY, GREEDY)[0].outputs[0].token_ids
    for form in forms:
        (output,) = plain.generate(form, GREEDY)
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == tuple(token_ids)
    assert plain.generate([], GREEDY) == []


class Indexed:
    """A sequence of the old protocol, such as a torch Dataset: items by their place, and no iterator."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __getitem__(self, place: int) -> Any:
        return self._items[place]


ONE_PASS: dict[str, Callable[[list[Any]], Any]] = {
    "generator": lambda items: (item for item in items),
    "dict view": lambda items: dict(enumerate(items)).values(),
    "indexed": Indexed,
}
"""Everything that a list of prompts, parameters or conversations may be; some can be read only once."""


@pytest.mark.parametrize("form", ONE_PASS, ids=str)
def test_whatever_can_be_iterated_over_gives_all_its_items(plain: LLM, form: str) -> None:
    """The first prompt of a generator, map or iterator was dropped, as were those of messages and output_ids."""
    make, prompts = ONE_PASS[form], ["The king", "The farmer", "Once upon"]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (2, 3, 4)]
    wanted = ids(plain.generate(prompts, params))
    outputs = plain.generate(make(prompts), make(params))
    assert [output.prompt for output in outputs] == prompts
    assert ids(outputs) == wanted
    with plain.stream(make(prompts), make([{"temperature": 0, "max_tokens": count} for count in (2, 3, 4)])) as stream:
        assert len(list(stream)) >= 3
        assert ids(stream.outputs()) == wanted
    tokens = [plain.tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert ids(plain.generate(make([make(one) for one in tokens]), params)) == wanted

    talks = [[{"role": "user", "content": text}] for text in prompts]
    replies = ids(plain.chat(talks, params))
    assert ids(plain.chat(make([make(talk) for talk in talks]), make(params))) == replies
    assert ids(plain.chat(make(talks[0]), params[0])) == replies[:1]
    assert plain.chat_prompt(make(talks[0])) == plain.chat_prompt(talks[0])

    said = wanted[2][:2]
    for output_ids in (make(list(said)), make([make(list(said))])):
        begun = {"prompt": prompts[2], "output_ids": output_ids}
        assert ids(plain.generate(begun, params[2])) == wanted[2:]


@pytest.mark.parametrize("form", ONE_PASS, ids=str)
def test_every_list_of_sampling_parameters_may_be_iterated_over_once(form: str) -> None:
    make = ONE_PASS[form]
    lists: dict[str, list[Any]] = {
        "stop": ["a", "b"],
        "bad_words": ["c"],
        "stop_token_ids": [5, 6],
        "allowed_token_ids": [5, 6],
        "logprob_token_ids": [7],
        "prediction": [8, 9],
        "logits_processors": [abs],
    }
    given = SamplingParams(
        **{name: make(items) for name, items in lists.items()}, bad_words_ids=make([make([5]), make([6, 7])])
    )
    assert given == SamplingParams(**lists, bad_words_ids=[[5], [6, 7]])
    assert StructuredOutputs(choice=make(["a", "b"])) == StructuredOutputs(choice=["a", "b"])


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("", PromptError, "prompt 0 is empty"),
        pytest.param(iter([STORY, iter([])]), PromptError, "prompt 1 is empty", id="iterators"),
        pytest.param([STORY, iter([5, 1.5])], PromptError, "prompt 1 contains 1.5", id="an iterator of ids"),
        ({"prompt": STORY, "output_ids": 5}, PromptError, "prompt 0 has the output_ids 5"),
        ({"prompt": STORY, "output_ids": [[5], 6]}, PromptError, "prompt 0 is int"),
        ({1: STORY, "x": 2}, PromptError, "prompt 0 has the keys"),
        (b"bytes", PromptError, "the prompt is b'bytes'"),
        ([STORY, []], PromptError, "prompt 1 is empty"),
        ([STORY, [4, 4096]], PromptError, "prompt 1: token id 4096 lies outside the vocabulary of the model, 0..4095"),
        ([[5, -1]], PromptError, "token id -1"),
        ([[5, 1.5]], PromptError, "contains 1.5"),
        ([True, 5], PromptError, "contains True"),
        ({"prompt_token_ids": [5, False]}, PromptError, "contains False"),
        (torch.tensor([True, False]), PromptError, "contains tensor(True)"),
        (np.array([[True, False]]), PromptError, "contains np.True_"),
        ([[5], STORY, {"text": STORY}], PromptError, "prompt 2 has the keys"),
        (12, PromptError, "the prompt is 12"),
        ([STORY, [7] * 2048], ContextLengthError, "prompt 1: the prompt has 2048 tokens and the context 2048"),
    ],
    ids=repr,
)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompt: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        llm.generate(prompt, GREEDY)
    assert llm.num_unfinished == 0


def test_parameters_are_one_or_one_for_each(llm: LLM) -> None:
    short, long = (SamplingParams(temperature=0, max_tokens=count) for count in (3, 6))
    assert [len(tokens) for tokens in ids(llm.generate([STORY, STORY], [short, long]))] == [3, 6]
    assert len(ids(llm.generate(STORY))[0]) <= 16
    with pytest.raises(ConfigError, match="1 sampling parameters for 2 prompts"):
        llm.generate([STORY, STORY], [short])
    with pytest.raises(ConfigError, match="sampling_params is 5; give SamplingParams"):
        llm.generate(STORY, 5)
    with pytest.raises(ConfigError, match="sampling_params contains int"):
        llm.generate([STORY, STORY], iter([short, 5]))
    with pytest.raises(PromptError, match="the messages are int"):
        llm.chat(5)


def test_without_a_tokenizer_ids_go_in_and_come_out() -> None:
    llm = LLM(toy_model(), "ngram")
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5))
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].text == ""
    with pytest.raises(PromptError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(ConfigError, match=r"^stop is text.*stop_token_ids"):
        llm.generate([[1]], SamplingParams(stop="x"))
    with pytest.raises(ConfigError, match="bad_words_ids"):
        llm.generate([[1]], SamplingParams(bad_words=["x"]))
    with pytest.raises(ConfigError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_text_is_one_message_of_a_user(plain: LLM) -> None:
    """It was five conversations of one letter each, none of which a template takes."""
    params = SamplingParams(temperature=0, max_tokens=3)
    (expected,) = plain.chat([{"role": "user", "content": "hello"}], params)
    assert [one.prompt_token_ids for one in plain.chat("hello", params)] == [expected.prompt_token_ids]
    assert [one.prompt_token_ids for one in plain.chat(["hello", "hello"], params)] == [expected.prompt_token_ids] * 2
    options = {"add_generation_prompt": False}
    as_in_vllm = plain.chat_prompt("hello", chat_template_kwargs=options)
    assert as_in_vllm == plain.chat_prompt("hello", **options) != plain.chat_prompt("hello")
    with pytest.raises(ConfigError, match="not also given directly"):
        plain.chat("hello", chat_template_kwargs=options, add_generation_prompt=True)


# -- endings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["none", "draft_model"])
def test_stop_strings_cut_the_text_and_keep_the_tokens(plain: LLM, config: str) -> None:
    llm = plain.with_speculative_config(config)
    full = llm.generate(STORY, GREEDY)[0].outputs[0]
    for start in range(1, len(full.text) - 3, max(1, len(full.text) // 6)):
        stop = full.text[start : start + 3]
        expected = full.text[: full.text.index(stop)]
        params = SamplingParams(temperature=0, max_tokens=16, stop=[stop, stop + "never"])
        sample = llm.generate(STORY, params)[0].outputs[0]
        assert (sample.text, sample.finish_reason, sample.stop_reason) == (expected, "stop", stop)
        assert sample.token_ids == full.token_ids[: len(sample.token_ids)]
        assert stop in llm.tokenizer.decode(sample.token_ids)


def test_stop_strings_are_looked_for_in_the_text_that_the_user_gets(llm: LLM) -> None:
    """The checker once left special tokens out of its text, so that a stop string of theirs was never found."""
    prompt = llm.chat_prompt([{"role": "user", "content": "What is your favorite movie?"}])
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, skip_special_tokens=False, stop="<|end|>")
    (sample,) = llm.generate(prompt, params)[0].outputs
    assert (sample.finish_reason, sample.stop_reason) == ("stop", "<|end|>")
    assert sample.token_ids[-1] == 3
    assert sample.text
    assert "<|" not in sample.text


def test_bad_words_do_not_occur(llm: LLM) -> None:
    text = llm.generate(STORY, GREEDY)[0].outputs[0].text
    word = text.split()[2]
    params = SamplingParams(temperature=0, max_tokens=16, bad_words=[word])
    sample = llm.generate(STORY, params)[0].outputs[0]
    assert llm.tokenizer is not None
    for banned in spellings(word, llm.tokenizer):
        width = len(banned)
        grams = [sample.token_ids[i : i + width] for i in range(len(sample.token_ids))]
        assert banned not in grams


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stream_adds_up_to_the_result(llm: LLM, params: SamplingParams) -> None:
    prompts = [STORY, QUESTION]
    text, tokens = ["", ""], [(), ()]
    last: list[Any] = [None, None]
    with llm.stream(prompts, params) as stream:
        for delta in stream:
            assert "".join(piece for piece, _ in delta.segments) == delta.text
            assert {source for _, source in delta.segments} <= {"target", "draft_model"}
            text[delta.prompt_index] += delta.text
            tokens[delta.prompt_index] += delta.token_ids
            last[delta.prompt_index] = delta.finish_reason
    outputs = llm.generate(prompts, params)
    assert text == texts(outputs)
    assert tokens == ids(outputs)
    assert last == [output.outputs[0].finish_reason for output in outputs]


def test_a_stream_says_who_proposed_what(plain: LLM) -> None:
    (known,) = plain.generate(STORY, GREEDY)
    with plain.stream(STORY, replace(GREEDY, prediction=known.outputs[0].text)) as stream:
        segments = [segment for delta in stream for segment in delta.segments]
    assert "".join(text for text, _ in segments) == known.outputs[0].text
    assert {source for _, source in segments} == {"prediction", "target"}


def test_characters_of_several_tokens_arrive_whole(llm: LLM) -> None:
    """A byte-level tokenizer splits an emoji: no delta may hold a replacement character."""
    forced = llm.tokenizer("😀😀")["input_ids"]
    assert len(forced) > 2

    def follow(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - len(llm.tokenizer(STORY)["input_ids"])
        out = torch.full_like(scores, float("-inf"))
        out[:, forced[place % len(forced)]] = 0
        return out

    params = SamplingParams(temperature=0, max_tokens=len(forced), logits_processors=[follow])
    with llm.stream(STORY, params) as stream:
        pieces = [delta.text for delta in stream]
    assert "".join(pieces) == "😀😀"
    assert not any("�" in piece for piece in pieces)


def test_calls_made_while_a_stream_is_open_share_the_engine(llm: LLM) -> None:
    expected = ids(llm.generate([STORY, QUESTION], SAMPLED))
    with llm.stream(STORY, SAMPLED) as stream:
        tokens = next(stream).token_ids
        inner = llm.generate(QUESTION, SAMPLED)
        for delta in stream:
            tokens += delta.token_ids
    assert [tokens, *ids(inner)] == expected


# -- mishaps ---------------------------------------------------------------------------------------------------------


def test_two_threads_get_right_results(llm: LLM) -> None:
    prompts = {0: [STORY, "A lion"], 1: [QUESTION, "The", "What"]}
    expected = {key: ids(llm.generate(value, SAMPLED)) for key, value in prompts.items()}
    got: dict[int, list[Any]] = {0: [], 1: []}

    def work(key: int) -> None:
        for _ in range(3):
            got[key].append(ids(llm.generate(prompts[key], SAMPLED)))

    threads = [threading.Thread(target=work, args=(key,)) for key in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == {key: [value] * 3 for key, value in expected.items()}


def test_calling_back_from_a_processor_is_refused(llm: LLM) -> None:
    def call_back(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        llm.generate(STORY, GREEDY)
        return scores

    with pytest.raises(EngineBusyError):
        llm.generate(STORY, SamplingParams(temperature=0, logits_processors=[call_back]))
    assert llm.generate(STORY, GREEDY)[0].finished


# -- set-up ----------------------------------------------------------------------------------------------------------


def test_a_drafter_is_needed_for_draft_model() -> None:
    with pytest.raises(ConfigError, match="needs a draft model"):
        LLM(toy_model(), "draft_model")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: the model runs in one process on one device"),
        (
            {"gpu_memory_utilization": 0.9},
            "gpu_memory_utilization=0.9: .*max_num_seqs, max_model_len and max_kv_bytes limit",
        ),
        ({"quantization": "awq"}, "quantization is 'awq'.*pass the model"),
        ({"enforce_eager": True}, "enforce_eager=True: .*execution='eager'"),
        *(
            ({name: 256}, f"{name}=256: .*prefill_chunk_size")
            for name in ("max_num_batched_tokens", "long_prefill_token_threshold", "chunked_prefill_size")
        ),
        ({"swap_space": 4}, "swap_space=4: .*max_num_seqs"),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens=4: .*speculative_config="),
        ({"max_num_seq": 4}, "LLM takes no 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"dtype": "float32", "torch_dtype": "float64"}, "two names of one key"),
    ],
    ids=str,
)
def test_arguments_that_cannot_apply_say_why(given: dict[str, Any], message: str) -> None:
    """They ended in a bare TypeError, or would have been obeyed in name only."""
    with pytest.raises(ConfigError, match=message):
        LLM(toy_model(), **given)


def test_arguments_that_change_nothing_are_taken() -> None:
    model = toy_model()
    LLM(model, tensor_parallel_size=1, quantization=None, enforce_eager=False, swap_space=0)
    LLM(model, torch_dtype=model.dtype)


@pytest.mark.parametrize(
    ("config", "ending"),
    [
        (None, "none"),
        ("draft_model", "draft_model · output: same tokens as plain decoding up to rounding"),
        ("ngram>draft_model", "ngram > draft_model · output: same tokens as plain decoding up to rounding"),
        ({"method": "auto"}, "suffix + draft_model + eagle3 · output: same tokens as plain decoding up to rounding"),
        (
            {"method": "ngram", "rejection_sample_method": "block"},
            "ngram · output: same distribution as plain decoding",
        ),
    ],
    ids=str,
)
def test_one_line_says_what_was_loaded_and_how_it_decodes(
    caplog: pytest.LogCaptureFixture, config: Any, ending: str
) -> None:
    """An LLM once decoded plainly, and in another dtype than the checkpoint's, without a word about it."""
    with caplog.at_level("INFO", "foredraft"):
        LLM("zoo:tiny", config, dtype="float32", execution="eager")
    assert caplog.messages == ["loading zoo:tiny ...", f"zoo:tiny · float32 · drafting: {ending}"]
    caplog.clear()
    with caplog.at_level("DEBUG", "foredraft"):
        LLM("zoo:tiny", config, dtype="float32", execution="eager")
    start = "zoo:tiny: 5.5 M parameters, float32 (as requested; the checkpoint is bfloat16), eager, "
    assert caplog.messages[-1].startswith(start), "details are logged at DEBUG"


def test_the_load_line_says_that_bits_are_kept_where_they_are() -> None:
    info = LLM("zoo:tiny", execution="eager").model_info
    smollm2 = replace(info, name="zoo:smollm2", dtype="bfloat16", quantization="int8", kv_cache_dtype="int8")
    output = output_words(MATCH, Guarantee("bit-identical"))
    assert load_line(smollm2, ["suffix", "eagle3"], output) == (
        "SmolLM2-135M-Instruct · bfloat16, int8 weights, keys and values in int8 · drafting: suffix + eagle3 · output: "
        "bit-identical to plain decoding"
    )
    assert output_words(TYPICAL, Guarantee("bit-identical")) == "lossy (typical acceptance)"
    assert load_line(
        replace(info, name="/models/Qwen/", device="cuda:0", dtype="float16", kv_cache_dtype="float16")
    ) == ("Qwen · float16 on cuda:0 · drafting: none")


def test_results_name_the_promise_that_holds() -> None:
    llm = LLM(toy_model(), "ngram", execution="eager")
    metrics = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))[0].metrics
    assert metrics.guarantee == llm.guarantee
    assert (llm.guarantee.kind, llm.guarantee.reason) == ("up to rounding", "it runs eagerly")
    by_distribution = llm.with_speculative_config({"method": "ngram", "rejection_sample_method": "block"})
    assert by_distribution.generate([[1, 2, 3]], SamplingParams(max_tokens=4, seed=1))[0].metrics.guarantee is None


@pytest.mark.parametrize(
    ("used", "stored", "is_chosen", "note"),
    [
        ("float32", "float32", False, ""),
        ("float32", None, False, ""),
        ("float32", "float16", True, "as requested; the checkpoint is float16"),
        ("float32", "float16", False, "the checkpoint is float16, which is computed in float32 on CPUs"),
        ("float32", "bfloat16", False, "the checkpoint is bfloat16, and this CPU has no bfloat16 arithmetic"),
        ("bfloat16", "float32", False, "the checkpoint is float32; dtype='float32' keeps it"),
    ],
)
def test_a_changed_dtype_says_why(used: str, stored: str | None, is_chosen: bool, note: str) -> None:
    assert dtype_note(used, stored, is_chosen=is_chosen) == note


# -- governed ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes a millisecond, and a tenth of that is the drafter's."""
    monkeypatch.setattr(StepClock, "enter", lambda *_: StepSeconds(0.0001, 0.0009))


@pytest.mark.usefixtures("_governed", "_fixed_clock")
def test_what_was_learned_is_there_in_the_next_call() -> None:
    """Of an LLM, and of the hook into generate."""
    model, ids = toy_model(64), torch.tensor([[1, 2, 3] * 6])
    llm, hook = LLM(model, "ngram"), speculate("ngram")
    params = SamplingParams(temperature=0, max_tokens=16)
    want = model.generate(ids, max_new_tokens=16, do_sample=False)
    for calls in (1, 2):
        llm.generate({"prompt_token_ids": ids[0].tolist()}, params)
        governor = llm.drafting.governor(llm.target, make_drafter(llm.speculative_config, DrafterContext(llm.target)))
        assert governor is not None
        assert governor.totals.num_tokens == 16 * calls
        assert torch.equal(model.generate(ids, max_new_tokens=16, do_sample=False, custom_generate=hook), want)
        adapter, drafting = hook._prepared(model)
        assert drafting.governor(adapter.target, drafting.new_drafter()).totals.num_tokens == 16 * calls


@pytest.mark.usefixtures("_governed", "_fixed_clock")
def test_where_nothing_was_drafted_no_speed_is_claimed() -> None:
    """generate ended with "about 0.69 times the speed of plain decoding, not drafting" over two undrafted steps."""
    llm = LLM(toy_model(64), "ngram")
    biased = SamplingParams(temperature=0, max_tokens=2, logit_bias={3: 99.0})
    (output,) = llm.generate([list(range(5, 60))], biased)
    assert output.metrics.speculative_decoding["num_spec_steps"] == 0
    assert output.metrics.governor["estimated_speedup"] is None
    said = summary([output])
    assert "nothing was drafted" in said
    assert "x plain" not in said
    assert "accepted" not in said
    (output,) = llm.generate([[1, 2, 3] * 6], replace(biased, max_tokens=40))
    assert output.metrics.speculative_decoding["num_spec_steps"] > 0
    said = summary([output])
    assert "x plain (" in said
    assert "% of drafts accepted)" in said


@pytest.mark.usefixtures("_governed", "_fixed_clock")
def test_an_llm_is_governed_unless_it_is_told_a_length() -> None:
    base = LLM(toy_model(64))
    prompt, params = {"prompt_token_ids": [1, 2, 3] * 6}, SamplingParams(temperature=0, max_tokens=24)
    configs = (
        "ngram",
        {"method": "ngram", "length_policy": "fixed"},
        {"method": "ngram", "rejection_sample_method": "standard"},
        "none",
    )
    outputs = [base.with_speculative_config(config).generate(prompt, params)[0] for config in configs]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    first, *others = [output.metrics.governor for output in outputs]
    assert first["decision"].startswith(("drafting", "not drafting"))
    assert first["estimated_speedup"] > 0
    assert others == [None] * 3
