"""A request goes on from what was said of it elsewhere, to the text that the first would have come to, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from foredraft import RequestOutput, SamplingParams
from foredraft.errors import ConfigError, PromptError
from tiny import tiny

PROMPT = "Once upon a time there was a"
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, logprobs=1)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": replace(
        SAMPLED,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        no_repeat_ngram_size=3,
        min_tokens=5,
    ),
    "stopped": replace(SAMPLED, stop=["ing", " to the"], bad_words=["girl"], seed=3, max_tokens=24),
}
METHODS: dict[str, Any] = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model", "model": "zoo:tiny"},
    "token_recycling": "token_recycling",
    "lookahead": "lookahead",
    "suffix": "suffix",
}


@cache
def whole(kind: str) -> RequestOutput:
    (output,) = tiny().generate([PROMPT], params_of(kind))
    return output


def params_of(kind: str) -> SamplingParams:
    return PARAMS[kind] if kind in PARAMS else replace(GREEDY, prediction=whole("greedy").outputs[0].text)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=pytest.mark.full if (row + column) % 5 and method != "ngram" else ())
        for row, method in enumerate(METHODS)
        for column, kind in enumerate([*PARAMS, "predicted"])
    ],
)
def test_cut_anywhere_the_text_is_the_same(method: str, kind: str) -> None:
    """All cuts in one batch; what is streamed is what comes after them."""
    (want,) = whole(kind).outputs
    cuts = range(len(want.token_ids))
    made = tiny().with_speculative_config(METHODS[method])
    prompts = [{"prompt": PROMPT, "output_ids": list(want.token_ids[:cut])} for cut in cuts]
    deltas: dict[int, list[int]] = {cut: [] for cut in cuts}
    with made.stream(prompts, params_of(kind)) as stream:
        for delta in stream:
            deltas[delta.prompt_index] += delta.token_ids
        outputs = stream.outputs()
    for cut, output in zip(cuts, outputs, strict=True):
        (text,) = output.outputs
        assert (text.token_ids, text.text) == (want.token_ids, want.text), cut
        assert (text.finish_reason, text.stop_reason) == (want.finish_reason, want.stop_reason)
        assert deltas[cut] == list(want.token_ids[cut:])
        assert text.logprobs is not None
        if made.guarantee.keeps_bits:
            assert text.logprobs == want.logprobs[cut:]
    accepted = sum(output.metrics.speculative_decoding["num_accepted_draft_tokens"] for output in outputs)
    assert accepted > 0 or not (method == "draft_model" or kind == "predicted")


def test_samples_go_on_each_from_its_own() -> None:
    params = replace(SAMPLED, n=3)
    (want,) = tiny().generate([PROMPT], params)
    cut = [list(text.token_ids[:length]) for text, length in zip(want.outputs, (0, 4, 9), strict=True)]
    (output,) = tiny().generate([{"prompt": PROMPT, "output_ids": cut}], params)
    assert [text.token_ids for text in output.outputs] == [text.token_ids for text in want.outputs]


def test_a_grammar_sees_what_was_said() -> None:
    pytest.importorskip("llguidance", reason="the extra [structured] is not installed")
    params = replace(SAMPLED, max_tokens=40, structured_outputs={"regex": r"(the|a) [a-z]{3,9}( and [a-z]{3,9})?\."})
    (want,) = tiny().generate([PROMPT], params)
    tokens = list(want.outputs[0].token_ids)
    prompts = [{"prompt": PROMPT, "output_ids": tokens[:cut]} for cut in range(len(tokens))]
    for output in tiny().generate(prompts, params):
        assert output.outputs[0].token_ids == tokens
    with pytest.raises(ConfigError, match="does not match its grammar"):
        tiny().generate([{"prompt": PROMPT, "output_ids": [50, 51]}], params)


def test_what_has_ended_already_ends_at_once() -> None:
    (want,) = whole("greedy").outputs
    (output,) = tiny().generate([{"prompt": PROMPT, "output_ids": list(want.token_ids)}], GREEDY)
    assert output.outputs[0].token_ids == want.token_ids
    assert output.outputs[0].finish_reason == want.finish_reason == "length"
    with pytest.raises(ConfigError, match="15 tokens, but the output ends with the first 14"):
        tiny().generate([{"prompt": PROMPT, "output_ids": [*want.token_ids, 5]}], GREEDY)
    assert tiny().num_unfinished == 0


def test_what_cannot_be_gone_on_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="output_ids has 1 lists for n=2"):
        tiny().generate([{"prompt": PROMPT, "output_ids": [5]}], replace(SAMPLED, n=2))
    with pytest.raises(PromptError, match="outside the vocabulary"):
        tiny().generate([{"prompt": PROMPT, "output_ids": [4096]}], GREEDY)
