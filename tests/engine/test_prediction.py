"""Predicted outputs change the number of steps and nothing else, whatever drafts beside them, right or wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.engine.frontend import RequestOutput
from foredraft.engine.row import Prediction
from foredraft.errors import ConfigError
from foredraft.testing import toy_model
from foredraft.tree import DraftTree
from harness import random_ids

VOCAB_SIZE = 64
PROMPTS = [random_ids(length, length, VOCAB_SIZE) for length in (9, 1, 30, 5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
PARAMS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.9, top_p=0.95, seed=7),
    "penalised": replace(GREEDY, temperature=0.7, seed=7, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=4),
    "several": replace(GREEDY, temperature=1.0, seed=11, n=3),
}
METHODS = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "layer_skip": {"method": "layer_skip", "exit_layer": 1},
    "lookahead": "lookahead",
    "union": "token_recycling+ngram",
}


@cache
def base() -> LLM:
    return LLM(toy_model(VOCAB_SIZE, dtype=torch.float64), max_num_seqs=6)


@cache
def llm(method: str) -> LLM:
    return base().with_speculative_config(METHODS[method])


@cache
def plain(kind: str) -> list[RequestOutput]:
    return base().generate(PROMPTS, PARAMS[kind])


def edited(tokens: list[int]) -> list[int]:
    """One token replaced, one left out, two put in, and the end cut off."""
    return [*tokens[:6], (tokens[6] + 1) % VOCAB_SIZE, *tokens[7:14], *tokens[15:22], 1, 2, *tokens[22:35]]


def check_equal(outputs: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for output, want in zip(outputs, wanted, strict=True):
        for text, other in zip(output.outputs, want.outputs, strict=True):
            assert text.token_ids == other.token_ids
            assert text.finish_reason == other.finish_reason
            for entry, known in zip(text.logprobs, other.logprobs, strict=True):
                assert list(entry) == list(known)
                assert all(entry[token].logprob == pytest.approx(known[token].logprob, abs=1e-6) for token in entry)


def counts(output: RequestOutput) -> tuple[int, int]:
    metrics = output.metrics.speculative_decoding
    return metrics["accepted_prediction_tokens"], metrics["rejected_prediction_tokens"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=pytest.mark.full if (row + column) % 4 and method != "plain" else ())
        for row, method in enumerate(METHODS)
        for column, kind in enumerate(PARAMS)
    ],
)
def test_outputs_are_those_without(method: str, kind: str) -> None:
    """Right predictions, edited ones, wrong ones and none in one batch."""
    right = [list(output.outputs[0].token_ids) for output in plain(kind)]
    given = [right[0], edited(right[1]), random_ids(40, 1, VOCAB_SIZE), None]
    params = [replace(PARAMS[kind], prediction=prediction) for prediction in given]
    outputs = llm(method).generate(PROMPTS, params)
    check_equal(outputs, plain(kind))
    accepted, rejected = counts(outputs[0])
    assert accepted > 25
    assert counts(outputs[1])[0] > 10
    assert "accepted_prediction_tokens" not in outputs[3].metrics.speculative_decoding
    if kind == "greedy":
        assert rejected == 0
        steps = [output.metrics.speculative_decoding["num_steps"] for output in outputs]
        assert steps[0] <= 5
        assert steps[1] <= 20  # of 40 tokens
        assert counts(outputs[2])[1] <= 40, "a wrong prediction is left after a few drafts"
    assert sum(len(text.token_ids) for text in outputs[0].outputs) == 40 * PARAMS[kind].n


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rules_that_keep_the_distribution_alone_take_predictions_too(rule: str) -> None:
    """Greedy rows decode by the argmax under every rule; sampled ones are drawn otherwise, and go on to their end."""
    config = {"method": "layer_skip", "exit_layer": 1, "rejection_sample_method": rule}
    made = base().with_speculative_config(config)
    given = [list(output.outputs[0].token_ids) for output in plain("greedy")]
    params = [replace(GREEDY, prediction=prediction) for prediction in given]
    outputs = made.generate(PROMPTS, params)
    check_equal(outputs, plain("greedy"))
    assert counts(outputs[0])[0] > 25
    sampled = made.generate(PROMPTS, [replace(each, temperature=1.0, seed=3) for each in params])
    assert all(len(output.outputs[0].token_ids) == 40 for output in sampled)
    assert all(sum(counts(output)) > 0 for output in sampled)


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_predictions_end_with_the_budget(max_tokens: int) -> None:
    right = list(plain("greedy")[0].outputs[0].token_ids)
    params = replace(GREEDY, max_tokens=max_tokens, prediction=right)
    (output,) = base().generate(PROMPTS[:1], params)
    assert output.outputs[0].token_ids == right[:max_tokens]
    stop = replace(GREEDY, stop_token_ids=[right[5]], prediction=right)
    (output,) = base().generate(PROMPTS[:1], stop)
    assert output.outputs[0].token_ids == right[: right.index(right[5]) + 1]


@pytest.mark.usefixtures("_governed")
def test_a_governor_decides_over_predictions_as_over_other_drafts() -> None:
    given = [list(output.outputs[0].token_ids) for output in plain("greedy")]
    outputs = llm("ngram").generate(PROMPTS, [replace(GREEDY, prediction=prediction) for prediction in given])
    check_equal(outputs, plain("greedy"))


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prediction contains token ids \[64\]"):
        base().generate([[1, 2]], replace(GREEDY, prediction=[64]))
    with pytest.raises(ConfigError, match=r"prediction is text, but this model has no tokenizer; .*token ids"):
        base().generate([[1, 2]], replace(GREEDY, prediction="text"))
    with pytest.raises(ConfigError, match="prediction"):
        SamplingParams(prediction=[-1])


# -- the place in a prediction ---------------------------------------------------------------------------------------


def drafts(prediction: str, output: str, prompt: str = "") -> list[str]:
    """What is drafted after every beginning of an output, letters for tokens."""
    followed = Prediction([*map(ord, prediction)], len(prompt))
    row = [*map(ord, prompt + output)]
    return ["".join(map(chr, followed.draft(row[:end], 4))) for end in range(len(prompt), len(row) + 1)]


@pytest.mark.parametrize(
    ("prediction", "output", "last"),
    [
        ("abcdefgh", "abc", "defg"),
        ("abcdefgh", "axc", "defg"),  # replaced
        ("abcdefgh", "axcd", "efgh"),
        ("abcdefgh", "abxyc", "defg"),  # put in
        ("abcdefgh", "abdef", "gh"),  # left out
        ("abcdefgh", "zzz", ""),  # elsewhere
        ("abcXdef.abcYghi.", "abcXdef.abc", "Yghi"),  # goes on, though it was here before
        ("abcXdef.abcYghi.", "qcYg", "hi."),  # the second place, which more leads to
        ("ab", "ab", ""),
        ("ab", "abab", ""),
        ("", "ab", ""),
    ],
)
def test_the_place_is_found_anew(prediction: str, output: str, last: str) -> None:
    assert drafts(prediction, output)[-1] == last
    assert drafts(prediction, output, prompt="abcdefgh")[-1] == last  # the prompt says nothing of the place


def test_from_afar_more_than_one_token_must_agree() -> None:
    prediction = "a" + "." * 40 + "mnop"
    assert drafts(prediction, "xm")[-1] == ""
    assert drafts(prediction, "xmn")[-1] == "op"


def test_many_places_cost_no_more() -> None:
    prediction = Prediction([5] * 20_000, 0)
    prediction.draft([5] * 300 + [6], 4)
    assert prediction.draft([5] * 300 + [6, 5], 4) == (5, 5, 5, 5)


# -- joined drafts ---------------------------------------------------------------------------------------------------


def test_joined_drafts() -> None:
    chain = DraftTree.chain(1, [5, 6], source="p")
    tree = DraftTree((1, 7, 5, 8, 9), (-1, 0, 0, 2, 3), source="d")
    joined = chain.joined(tree, 100)
    assert (joined.tokens, joined.parents) == ((1, 5, 6, 7, 8, 9), (-1, 0, 1, 0, 1, 4))
    assert joined.sources[1:] == ("p", "p", "d", "d", "d")
    assert joined.main_chain().tokens == (1, 5, 6)
    small = chain.joined(tree, 4)
    assert (small.tokens, small.parents) == ((1, 5, 6, 7), (-1, 0, 1, 0))
