"""Results: sequences that equal lists, and reprs that fit on a screen."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from foredraft import LLM, SamplingParams, SpeculativeConfig, speculate, trajectory
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.frontend import CompletionOutput, FrozenList, RequestMetrics, RequestOutput
from foredraft.errors import CopyError
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model

STORY = "Once upon a time there was a"


@pytest.fixture(scope="module")
def output() -> RequestOutput:
    llm = LLM("zoo:tiny", "draft_model", dtype="float32")
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
    assert frozen[:2] == [4, 5]
    assert frozen[::-1] == [6, 5, 4]
    assert frozen[-1] == 6
    assert hash(frozen) == hash((4, 5, 6))
    assert len({frozen, (4, 5, 6)}) == 1
    for twin in (copy.copy(frozen), copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert type(twin) is FrozenList
        assert twin == [4, 5, 6]
    assert json.loads(json.dumps(frozen)) == [4, 5, 6]
    for more in ([7], (7,), FrozenList([7])):
        assert frozen + more == [4, 5, 6, 7]
    with pytest.raises(TypeError):
        frozen + 7
    tokens = alias = [3]
    tokens += frozen
    assert alias == [3, 4, 5, 6]
    for joined, same in (
        ([3] + frozen, [3, 4, 5, 6]),  # noqa: RUF005
        ((3,) + frozen, (3, 4, 5, 6)),  # noqa: RUF005
        (sum([frozen, frozen], []), [4, 5, 6, 4, 5, 6]),  # noqa: RUF017
        (sum([frozen], []), [4, 5, 6]),  # noqa: RUF017
    ):
        assert joined == same
        assert type(joined) is type(same)
    longer = frozen
    longer += [7]
    assert (longer, frozen) == ([4, 5, 6, 7], [4, 5, 6])
    assert isinstance(frozen, list)
    with pytest.raises(TypeError):
        7 + frozen


@pytest.mark.parametrize(
    "change",
    [
        lambda frozen: frozen.append(1),
        lambda frozen: frozen.extend([1]),
        lambda frozen: frozen.insert(0, 1),
        lambda frozen: frozen.pop(),
        lambda frozen: frozen.remove(4),
        lambda frozen: frozen.clear(),
        lambda frozen: frozen.sort(),
        lambda frozen: frozen.reverse(),
        lambda frozen: frozen.__setitem__(0, 1),
        lambda frozen: frozen.__delitem__(0),
        lambda frozen: frozen.__imul__(2),
    ],
)
def test_a_frozen_list_cannot_be_changed(change: Any) -> None:
    frozen = FrozenList([4, 5, 6])
    with pytest.raises(TypeError, match="results cannot be changed"):
        change(frozen)
    assert frozen == [4, 5, 6]


def test_results_compare_like_vllms(output: RequestOutput) -> None:
    """They are lists there: ``output.outputs[0].token_ids == [...]`` was once False, whatever the tokens."""
    first, second = output.outputs
    assert output.outputs == [first, second]
    assert first.token_ids == list(first.token_ids)
    assert first.token_ids == tuple(first.token_ids)
    assert first.token_ids[:5] == list(first.token_ids)[:5]
    assert output.prompt_token_ids == list(output.prompt_token_ids)
    assert first.token_ids != list(output.prompt_token_ids)


def test_deltas_compare_with_lists_too() -> None:
    with LLM(toy_model(), "ngram").stream([1, 2, 3], SamplingParams(max_tokens=4, seed=1)) as stream:
        tokens: list[int] = []
        for delta in stream:
            assert delta.token_ids == list(delta.token_ids)
            tokens += delta.token_ids
    assert stream.outputs()[0].outputs[0].token_ids == tokens


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


@pytest.mark.parametrize(
    ("config", "method"), [(None, "none"), ("ngram", "ngram"), ("ngram>suffix+nasd", "ngram>suffix+nasd")], ids=str
)
def test_an_llm_names_what_it_runs_and_how(config: Any, method: str) -> None:
    llm = LLM("zoo:tiny", config, dtype="float32", execution="eager")
    assert repr(llm) == f"LLM('zoo:tiny', dtype=float32, execution=eager, method={method})"


def test_other_objects_are_short() -> None:
    model = toy_model()
    llm = LLM(model, {"model": model, "num_speculative_tokens": 3})
    assert repr(llm.speculative_config).startswith(
        "SpeculativeConfig(method='draft_model', model=LlamaForCausalLM, num_"
    )
    assert len(repr(llm.speculative_config)) < 300
    assert len(repr(llm.drafting)) < 600
    found = trajectory(LLM(model), [1, 2, 3], sampling_params=SamplingParams(max_tokens=40, temperature=0))
    assert repr(found).startswith("Trajectory(3 prompt_token_ids, 40 token_ids in ")
    assert found.token_ids == list(found.token_ids)
    assert found.prompt_token_ids == [1, 2, 3]
    engine = Engine(CausalLM(model), EmptyDrafter())
    engine.add_request([1, 2, 3], SamplingParams())
    assert (
        repr(engine) == "Engine(LlamaForCausalLM, drafter=none, acceptance=match, 0 rows running, 1 requests waiting)"
    )


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(), "SamplingParams()"),
        (SamplingParams(temperature=0, seed=3, stop="x"), "SamplingParams(temperature=0.0, stop=('x',), seed=3)"),
    ],
)
def test_parameters_show_what_differs_from_the_defaults(params: SamplingParams, text: str) -> None:
    assert repr(params) == text
    assert eval(text) == params


def test_a_config_shows_what_has_a_value() -> None:
    config = SpeculativeConfig(method="ngram")
    assert "None" not in repr(config)
    assert eval(repr(config)) == config


# -- what stays in its process ---------------------------------------------------------------------------------------


def test_what_belongs_to_a_process_says_so_when_it_is_pickled() -> None:
    """It was a TypeError about a weak reference, or a lock."""
    llm = LLM(toy_model(64), "ngram")
    with llm.stream([[5]], SamplingParams(max_tokens=2)) as stream:
        for one, remedy in (
            (llm, "make one in each process, from the name of the model"),
            (stream, r"outputs\(\) gives what has come so far"),
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


def test_a_shallow_copy_of_an_llm_drafts_over_the_same_target() -> None:
    llm = LLM(toy_model(64), "ngram")
    twin = copy.copy(llm)
    assert type(twin) is LLM
    assert vars(twin) == vars(llm)
    assert llm.with_speculative_config("nasd").target is llm.target
    assert llm.speculative_config.method == "ngram"
