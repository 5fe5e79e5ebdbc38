"""Faults where they once spread: half-read texts, the cache, memory, what drafters return, who comes behind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from contained import CONTAINED, TEXTS, VOCAB_SIZE, params, plain, run, target
from cuts import cut_at, spread
from drafting import made
from foredraft import LLM, SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter, Needs
from foredraft.engine.engine import Engine
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.row import Row
from foredraft.errors import MOST_CHARACTERS, PromptError, error_text, is_fatal
from foredraft.model.lm import CausalLM
from foredraft.serve.errors import ApiError
from foredraft.testing import PerfectDrafter, toy_model
from foredraft.tree import DraftTree
from tiny import tiny


def raising(drafter: Drafter, verb: str, which: Callable[[list[Row]], bool], fault: BaseException) -> Drafter:
    """The drafter, whose verb fails for chosen rows."""
    sound = getattr(drafter, verb)

    def broken(rows: Any, *others: Any) -> Any:
        if which(rows if isinstance(rows, list) else [rows]):
            raise fault
        return sound(rows, *others)

    setattr(drafter, verb, broken)
    return drafter


# -- drafters ------------------------------------------------------------------------------------------------------


def test_drafting_that_has_ended_stays_so_when_a_row_leaves_for_want_of_memory() -> None:
    drafter = raising(made("ngram", 4, prompt_lookup_min=1), "observe", lambda rows: len(rows) == 3, ValueError("no"))
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


def test_an_error_that_cannot_be_told_is_told_by_its_type(caplog: pytest.LogCaptureFixture) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    drafter = raising(made("ngram", 4, prompt_lookup_min=1), "propose", lambda _: True, Unspeakable())
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        rows = run(drafter)
    assert [row.output_ids for row in rows] == plain()
    assert {row.stats.drafter_error for row in rows} == {"Unspeakable"} == {error_text(Unspeakable())}
    assert len(caplog.messages) == 1


def test_a_long_message_is_passed_on_by_its_two_ends(caplog: pytest.LogCaptureFixture) -> None:
    """A processor that puts its scores into its message does not fill results and logs."""
    fault = ValueError(f"begin{'x' * 48_000}end")
    drafter = raising(made("ngram", 4, prompt_lookup_min=1), "propose", lambda _: True, fault)
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
        run(raising(made("ngram", 4, prompt_lookup_min=1), "propose", lambda _: True, caught.value))

    def hungry(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise caught.value

    with pytest.raises(RuntimeError, match="allocate"):
        run(EmptyDrafter(), given=lambda number: params(number, logits_processors=[hungry]))


# -- what is not a number ------------------------------------------------------------------------------------------


class Spoiler(Drafter):
    """Leaves NaN in the target's cache, behind the columns that count, and drafts nothing, or something wrong."""

    name = "spoiler"

    def __init__(self, num_drafted: int) -> None:
        self._num_drafted = num_drafted

    def needs(self, target: CausalLM, cache: Any) -> Needs:
        self._cache = cache
        return Needs()

    def propose(self, rows: Any, budgets: Any) -> list[DraftTree]:
        for buffer in self._cache._buffers():
            buffer[0, :, self._cache.lengths[0] : self._cache.lengths[0] + 12] = torch.nan
        lengths = [min(self._num_drafted, budget) for budget in budgets]
        return [DraftTree.chain(row.pending, [1] * length) for row, length in zip(rows, lengths, strict=True)]


@pytest.mark.parametrize("num_drafted", [0, 2])
def test_what_a_drafter_leaves_in_the_cache_ends_no_row(num_drafted: int) -> None:
    rows = run(Spoiler(num_drafted))
    assert [(row.output_ids, row.finish_reason) for row in rows] == [(text, "length") for text in plain()]


# -- texts ---------------------------------------------------------------------------------------------------------


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
        llm.generate(prompts[:3], given[:3])

    num_lines = cut_at(None, call)
    for number in [*range(2, 60, 10), *spread(num_lines, 6)]:
        cut_at(number, call)
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, given)]
        assert found == plain(), number
        assert llm.num_unfinished == 0, number
        assert llm.memory.planned_share in (None, 0.0), number
