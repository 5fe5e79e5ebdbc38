"""Faults stay in their rows: of drafters, processors, tokenizers and the model, and of Ctrl-C."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import foredraft
from contained import CONTAINED, TEXTS, VOCAB_SIZE, draft_model, layer_skip, params, plain, run, target
from cuts import cut_at, spread
from drafting import made
from foredraft import LLM, SamplingParams
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter, Needs
from foredraft.engine.engine import Engine
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.row import RowState
from foredraft.errors import MOST_CHARACTERS, NumericsError, PromptError, error_text, is_fatal
from foredraft.model.lm import CausalLM
from foredraft.serve.errors import ApiError
from foredraft.testing import PerfectDrafter, toy_model
from foredraft.tree import DraftTree
from harness import buffers_of
from tiny import tiny

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


def always_failing(verb: str, fault: BaseException, which: Callable[[Any], bool] = lambda rows: True) -> Drafter:
    """A drafter whose verb fails for chosen rows."""
    drafter = DRAFTERS["ngram"]()
    sound = getattr(drafter, verb)

    def broken(rows: Any, *others: Any) -> Any:
        if which(rows):
            raise fault
        return sound(rows, *others)

    setattr(drafter, verb, broken)
    return drafter


def test_drafting_that_has_ended_stays_so_when_a_row_leaves_for_want_of_memory() -> None:
    drafter = always_failing("observe", ValueError("no"), lambda rows: len(rows) == 3)
    config = replace(CONTAINED, max_kv_bytes=576 * bytes_per_token(target()))
    engine = Engine(target(), drafter, config)
    rows = [engine.add_request([5, 6, 7] * 6, replace(params(i), max_tokens=125))[0] for i in range(3)]
    while engine.has_unfinished:
        engine.step()
        if engine.profile.num_preemptions == 0:
            drafted = [row.stats.num_spec_steps for row in rows]
    assert engine.profile.num_preemptions
    assert [row.stats.num_spec_steps for row in rows] == drafted
    assert all(row.stats.drafter_error for row in rows)


def test_a_long_message_is_passed_on_by_its_two_ends(caplog: pytest.LogCaptureFixture) -> None:
    """A processor that puts its scores into its message does not fill results and logs."""
    fault = ValueError(f"begin{'x' * 48_000}end")
    drafter = always_failing("propose", fault)
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        rows = run(drafter)
    messages = [
        rows[0].stats.drafter_error,
        error_text(fault),
        error_text(PromptError(str(fault))),
        str(ApiError(400, str(fault))),
    ]
    for message in messages:
        assert "begin" in message
        assert message.endswith("end")
        assert len(message) <= MOST_CHARACTERS + len(" ... ")
    assert len(caplog.messages[0]) < 2 * MOST_CHARACTERS


def test_memory_that_has_run_out_is_never_contained() -> None:
    """torch says so in a plain RuntimeError where a CPU's allocator fails."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 58)
    assert is_fatal(caught.value)
    assert not is_fatal(RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="allocate"):
        run(always_failing("propose", caught.value))

    def hungry(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise caught.value

    with pytest.raises(RuntimeError, match="allocate"):
        run(EmptyDrafter(), given=lambda number: params(number, logits_processors=[hungry]))


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


class Spoiler(Drafter):
    """Leaves NaN in the target's cache, behind the columns that count, and drafts nothing, or something wrong."""

    name = "spoiler"

    def __init__(self, num_drafted: int) -> None:
        self._num_drafted = num_drafted

    def needs(self, target: CausalLM, cache: Any) -> Needs:
        self._cache = cache
        return Needs()

    def propose(self, rows: Any, budgets: Any) -> list[DraftTree]:
        for buffer in buffers_of(self._cache):
            buffer[0, :, self._cache.lengths[0] : self._cache.lengths[0] + 12] = torch.nan
        lengths = [min(self._num_drafted, budget) for budget in budgets]
        return [DraftTree.chain(row.pending, [1] * length) for row, length in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize("num_drafted", [0, 2])
def test_what_a_drafter_leaves_in_the_cache_ends_no_row(num_drafted: int) -> None:
    rows = run(Spoiler(num_drafted))
    assert [(row.output_ids, row.finish_reason) for row in rows] == [(text, "length") for text in plain()]


class Unreadable:
    """A tokenizer that cannot read one of the tokens."""

    def __init__(self, token: int) -> None:
        self.token = token

    def decode(self, ids: list[int], **_: Any) -> str:
        if self.token in ids:
            raise UnicodeError("no such token")
        return "".join(chr(ord("0") + token) for token in ids)


@pytest.mark.parametrize("num_drafted", [0, 3, 8])
def test_a_text_ends_before_the_token_that_cannot_be_read_whatever_was_drafted(num_drafted: int) -> None:
    """Stop strings are looked for; the tokens before the unreadable one stay."""
    expected = plain()
    bad = expected[1][6]
    drafter = PerfectDrafter(
        [[*text, *output] for text, output in zip(TEXTS, expected, strict=True)], num_drafted, vocab_size=VOCAB_SIZE
    )
    rows = run(drafter, given=lambda number: params(number, stop=["zz"]), tokenizer=Unreadable(bad))
    for row, output in zip(rows, expected, strict=True):
        cut = output.index(bad) if bad in output else len(output)
        assert row.output_ids == output[:cut]
        assert row.finish_reason == ("length" if cut == len(output) else "error")
    assert rows[1].stop_reason == "UnicodeError: no such token"


@pytest.mark.parametrize("others", [{}, {"stop": ["zz"]}, {"logprobs": 2}])
def test_a_text_that_cannot_be_read_ends_its_own_row_of_a_call(
    others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stop strings the engine reads it, without them the session does: the other rows and calls do not notice."""
    llm = tiny().with_speculative_config("ngram")
    prompts = ["Once upon a time", "How many apples? Tom has", "Once upon a"]
    given = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **others)
    sound = [output.outputs[0] for output in llm.generate(prompts, given)]
    bad = next(token for token in sound[1].token_ids if all(token not in one.token_ids for one in sound[::2]))
    place = sound[1].token_ids.index(bad)
    decode = type(llm.tokenizer).decode

    def broken(self: Any, ids: Any, *args: Any, **keys: Any) -> str:
        if bad in list(ids):
            raise UnicodeError("no such token")
        return str(decode(self, ids, *args, **keys))

    stream = llm.stream(prompts[0], given)
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.tokenizer), "decode", broken)
        found = [output.outputs[0] for output in llm.generate(prompts, given)]
        assert [one.token_ids for one in found[::2]] == [one.token_ids for one in sound[::2]]
        assert [one.text for one in found[::2]] == [one.text for one in sound[::2]]
        assert found[1].token_ids == sound[1].token_ids[:place]
        assert (found[1].finish_reason, found[1].stop_reason) == ("error", "UnicodeError: no such token")
        assert sound[1].text.startswith(found[1].text)
        assert found[1].text or place == 0
        if "logprobs" in others:
            assert [len(one.logprobs or ()) for one in found] == [12, place, 12]
        with pytest.raises(UnicodeError, match="no such token"):
            llm.generate(prompts[1], given)
    assert "".join(delta.text for delta in stream) == sound[0].text
    assert llm.num_unfinished == 0
    assert llm.generate(prompts[1], given)[0].outputs[0].token_ids == sound[1].token_ids


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_governed")
def test_an_llm_that_is_cut_off_at_any_line_goes_on() -> None:
    """Also between taking the turn and the block that gives it back, and where a call has queued but half its rows."""
    llm = LLM(toy_model(VOCAB_SIZE), "ngram", max_num_seqs=3)
    prompts: list[Any] = [{"prompt_token_ids": text} for text in TEXTS]
    given = [params(number) for number in range(len(TEXTS))]

    def call() -> None:
        llm.generate(prompts[:3], [replace(one, max_tokens=4) for one in given[:3]])

    num_lines = cut_at(None, call)
    for number in [*range(2, 60, 10), *spread(num_lines, 6)]:
        cut_at(number, call)
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, given)]
        assert found == plain(), number
        assert llm.num_unfinished == 0, number
        assert llm.memory.planned_share in (None, 0.0), number
