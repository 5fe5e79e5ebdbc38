"""Results: sequences that equal lists, and reprs that fit on a screen."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from foredraft import LLM, SamplingParams, speculate
from foredraft.engine.frontend import CompletionOutput, FrozenList, RequestMetrics, RequestOutput
from foredraft.errors import CopyError
from foredraft.testing import toy_model
from tiny import tiny

STORY = "Once upon a time there was a"


@pytest.fixture(scope="module")
def output() -> RequestOutput:
    llm = tiny().with_speculative_config("draft_model")
    return llm.generate(STORY, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=5, n=2))[0]


# -- sequences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [[], [1], [1, 2, 3]], ids=str)
def test_a_frozen_list_equals_lists_and_tuples(items: list[int]) -> None:
    frozen, other = FrozenList(items), [*items, 9]
    for same in (items, tuple(items), FrozenList(items)):
        assert (frozen == same, same == frozen, frozen != same, same != frozen) == (True, True, False, False)
    for different in (other, tuple(other), FrozenList(other), set(items), iter(items), None, "x"):
        assert (frozen == different, different == frozen, frozen != different) == (False, False, True)


def test_a_frozen_list_stays_one_where_it_is_cut_copied_or_stored() -> None:
    frozen = FrozenList([4, 5, 6])
    assert (frozen[:2], frozen[::-1], frozen[-1]) == ([4, 5], [6, 5, 4], 6)
    assert len({frozen, (4, 5, 6)}) == 1
    for twin in (copy.copy(frozen), copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert type(twin) is FrozenList
        assert twin == [4, 5, 6]
    assert json.loads(json.dumps(frozen)) == [4, 5, 6]
    tokens = alias = [3]
    tokens += frozen
    longer = frozen
    longer += [7]
    assert (alias, longer, frozen) == ([3, 4, 5, 6], [4, 5, 6, 7], [4, 5, 6])
    for joined, same in (
        (frozen + (7,), [4, 5, 6, 7]),  # noqa: RUF005
        ([3] + frozen, [3, 4, 5, 6]),  # noqa: RUF005
        ((3,) + frozen, (3, 4, 5, 6)),  # noqa: RUF005
        (sum([frozen, frozen], []), [4, 5, 6, 4, 5, 6]),  # noqa: RUF017
    ):
        assert joined == same
    with pytest.raises(TypeError):
        frozen + 7


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        *(("append", [1]), ("extend", [[1]]), ("insert", [0, 1]), ("pop", []), ("remove", [4]), ("clear", [])),
        *(("sort", []), ("reverse", []), ("__setitem__", [0, 1]), ("__delitem__", [0]), ("__imul__", [2])),
    ],
)
def test_a_frozen_list_cannot_be_changed(verb: str, arguments: list[Any]) -> None:
    frozen = FrozenList([4, 5, 6])
    with pytest.raises(TypeError, match="results cannot be changed"):
        getattr(frozen, verb)(*arguments)
    assert frozen == [4, 5, 6]


# -- reprs -----------------------------------------------------------------------------------------------------------


def test_a_result_prints_in_a_few_lines(output: RequestOutput) -> None:
    """A result of 100 tokens once printed 9,811 characters of traces."""
    (first, _), metrics = output.outputs, output.metrics
    assert len(str(output)) < 800
    assert len(str(first)) < 250
    assert len(str(metrics)) < 250
    assert STORY in str(output)
    assert repr(first.text[:90])[:-1] in str(output)
    assert "100 token_ids" in str(first)
    assert "finish_reason='length'" in str(first)
    assert f"tokens_per_step={metrics.speculative_decoding['tokens_per_step']:.2f}" in str(metrics)


def test_long_texts_and_many_samples_are_cut() -> None:
    samples = [
        CompletionOutput(index, "x" * 9999, FrozenList(range(999)), None, None, "stop", "y" * 999, 7)
        for index in range(50)
    ]
    output = RequestOutput("0", "z" * 9999, FrozenList(range(999)), FrozenList(samples), True, RequestMetrics())
    assert len(str(output)) < 1500
    assert "and 47 more" in str(output)
    assert "999 prompt_token_ids" in str(output)


# -- what stays in its process ---------------------------------------------------------------------------------------


def test_what_belongs_to_a_process_says_so_when_it_is_pickled() -> None:
    """It was a TypeError about a weak reference, or a lock."""
    llm = LLM(toy_model(64), "ngram")
    with llm.stream([[5]], SamplingParams(max_tokens=2)) as stream:
        for one, remedy in (
            (llm, "Create one in each process from the name of the model"),
            (stream, r"copy the results so far, outputs\(\)"),
            (speculate("ngram"), "with the same arguments in each process"),
        ):
            with pytest.raises(CopyError, match=remedy) as refusal:
                pickle.dumps(one)
            assert isinstance(refusal.value, TypeError)
        for one in (llm, stream):
            with pytest.raises(CopyError, match="copied"):
                copy.deepcopy({"inside": one})
        with pytest.raises(CopyError, match="copied"):  # one that was dropped would end the other
            copy.copy(stream)
        list(stream)
        assert pickle.loads(pickle.dumps(stream.outputs()))[0].finished
