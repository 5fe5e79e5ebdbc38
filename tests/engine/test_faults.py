"""Faults stay in their row: of drafters, of logits processors, of tokenizers, of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import foredraft
from contained import CONTAINED, TEXTS, VOCAB_SIZE, draft_model, layer_skip, params, plain, run, target
from drafting import made
from foredraft import LLM, SamplingParams
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.row import RowState
from foredraft.errors import NumericsError
from foredraft.model.lm import CausalLM
from foredraft.testing import check_drafter, toy_model
from foredraft.tree import DraftTree

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: made("ngram", 4, prompt_lookup_min=1),
    "layer-skip": layer_skip,
    "draft-model": draft_model,
    "token-recycling": lambda: made("token_recycling", 4, VOCAB_SIZE, max_draft_nodes=12, initial_state="prompt"),
}


def kinds_of(*names: str) -> list[Any]:
    """All drafters, those without these names in the whole matrix alone."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.full) for name in DRAFTERS]


def failing(drafter: Drafter, verb: str, number: int, fault: BaseException, *, after: bool) -> Drafter:
    """The drafter, whose n-th call of a verb fails before or after its work; "ended" is that of states of rows."""
    owner: Any = RowState() if verb == "ended" else drafter
    sound, calls = getattr(owner, verb), [0]

    def broken(*args: Any, **keys: Any) -> Any:
        calls[0] += 1
        result = sound(*args, **keys) if calls[0] != number or after else None
        if calls[0] == number:
            raise fault
        return result

    setattr(owner, verb, broken)
    if owner is not drafter:
        start = drafter.start

        def starting(rows: Any, chunks: Any) -> None:
            start(rows, chunks)
            for row in rows:
                row.state["of a test"] = owner

        drafter.start = starting  # type: ignore[method-assign]
    return drafter


@pytest.mark.sample(2)
@pytest.mark.parametrize("verb", ["start", "propose", "observe", "ended"])
@pytest.mark.parametrize("method", kinds_of("layer-skip", "token-recycling"))
def test_a_failing_drafter_changes_no_token_and_rows_that_it_did_not_touch_are_drafted_for(
    method: str, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    for number, after in ((1, True), (2, False)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="foredraft"):
            rows = run(failing(DRAFTERS[method](), verb, number, ValueError("out of ideas"), after=after))
        assert [row.output_ids for row in rows] == plain()
        assert {row.finish_reason for row in rows} == {"length"}
        touched = [row for row in rows if row.stats.drafter_error]
        assert all(row.stats.drafter_error == "ValueError: out of ideas" for row in touched)
        assert [record for record in caplog.messages if "out of ideas" in record] == caplog.messages[:1]
        assert 1 <= len(touched) <= 3
        assert sum(row.stats.num_draft_tokens for row in rows if row not in touched) > 0


def test_drafting_ends_for_good_where_it_has_failed() -> None:
    rows = run(failing(DRAFTERS["layer-skip"](), "propose", 2, RuntimeError("no"), after=True))
    assert [row.stats.num_spec_steps for row in rows if row.stats.drafter_error] == [1, 1, 1]
    assert all(row.stats.num_spec_steps > 1 for row in rows if not row.stats.drafter_error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_concerns_all_is_not_contained(error: type[BaseException]) -> None:
    with pytest.raises(error):
        run(failing(DRAFTERS["ngram"](), "propose", 2, error(), after=False))


def test_checks_of_drafters_stay_loud() -> None:
    def make(depth: int) -> Drafter:
        return failing(made("ngram", depth, prompt_lookup_min=1), "observe", 3, ValueError("loud"), after=False)

    with pytest.raises(ValueError, match="loud"):
        check_drafter(make, target(), depths=(2,))


# -- processors ----------------------------------------------------------------------------------------------------


def broken_at(length: int) -> Callable[..., torch.Tensor]:
    """A processor that fails once the text has this many tokens, drafted ones included."""

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= length:
            raise LookupError("no such state")
        return scores

    return broken


@pytest.mark.parametrize("method", kinds_of("draft-model"))
def test_a_failing_processor_ends_its_row_alone(method: str) -> None:
    """After exactly the tokens that come before the place where it fails, whatever was drafted beyond."""

    def given(number: int) -> SamplingParams:
        return replace(params(number), logits_processors=[broken_at(len(TEXTS[1]) + 6)] if number == 1 else ())

    rows = run(DRAFTERS[method](), given=given)
    expected = plain()
    assert [row.output_ids for row in rows] == [expected[0], expected[1][:6], *expected[2:]]
    assert [row.finish_reason for row in rows] == ["length", "error", "length", "length", "length"]
    assert rows[1].stop_reason == "LookupError: no such state"
    assert not any(row.stats.drafter_error for row in rows)


def test_scores_of_another_shape_are_a_fault() -> None:
    def given(number: int) -> SamplingParams:
        return replace(params(number), logits_processors=[lambda _, scores: scores[:, :3]] if number == 1 else ())

    rows = run(EmptyDrafter(), given=given)
    assert "returned (1, 3); it must return scores (1, 64)" in str(rows[1].stop_reason)
    assert [row.output_ids for row in rows[2:]] == plain()[2:]


def test_a_call_tells_which_of_its_rows_have_failed_and_raises_when_all_have() -> None:
    llm = LLM(toy_model(VOCAB_SIZE, dtype=torch.float32), "ngram")
    prompts: list[Any] = [{"prompt_token_ids": text} for text in TEXTS[:2]]
    broken = replace(params(1), logits_processors=[broken_at(9)])
    sound, failed = llm.generate(prompts, [params(0), broken])
    assert sound.outputs[0].finish_reason == "length"
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].stop_reason == "LookupError: no such state"
    with pytest.raises(LookupError, match="no such state"):
        llm.generate(prompts, broken)
    assert llm.num_unfinished == 0


def test_a_drafter_names_itself_in_the_metrics_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> list[DraftTree]:
        raise ValueError("out of ideas")

    llm = LLM(toy_model(VOCAB_SIZE, dtype=torch.float32), "ngram")
    prompt: Any = {"prompt_token_ids": TEXTS[0]}
    assert "drafter_error" not in llm.generate(prompt, params(0))[0].metrics.speculative_decoding
    monkeypatch.setattr(NGramDrafter, "propose", broken)
    (output,) = llm.generate(prompt, params(0))
    assert output.metrics.speculative_decoding["drafter_error"] == "ValueError: out of ideas"
    assert output.outputs[0].finish_reason == "length"


def test_generate_raises_as_transformers_does() -> None:
    model = toy_model(VOCAB_SIZE, dtype=torch.float32)
    ids = torch.tensor([TEXTS[0]])
    for custom in (None, foredraft.speculate("ngram")):
        with pytest.raises(LookupError, match="no such state"):
            model.generate(
                ids, max_new_tokens=8, do_sample=False, logits_processor=[broken_at(9)], custom_generate=custom
            )


# -- texts and the model -------------------------------------------------------------------------------------------


def test_numbers_that_are_none_are_told_to_be_the_models() -> None:
    """One token's embedding is NaN: the row that meets it ends, by name of the culprit; the others do not change."""
    model = toy_model(VOCAB_SIZE)
    rows_before = plain()
    poison = next(t for t in range(1, VOCAB_SIZE) if all(t not in text for text in [*TEXTS, *rows_before]))
    model.model.embed_tokens.weight.data[poison] = torch.nan
    engine = Engine(CausalLM(model, execution="eager", probe=False), DRAFTERS["ngram"](), CONTAINED)
    texts = [*TEXTS[:2], [5, poison, 6]]
    rows = [engine.add_request(text, params(number))[0] for number, text in enumerate(texts)]
    errors = []
    while engine.has_unfinished:
        errors += [output.error for output in engine.step() if output.error is not None]
    assert [row.output_ids for row in rows[:2]] == rows_before[:2]
    assert rows[2].finish_reason == "error"
    assert len(errors) == 1
    assert isinstance(errors[0], NumericsError)
    assert "the model returned NaN logits" in str(rows[2].stop_reason)
