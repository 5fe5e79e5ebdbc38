"""Faults where they once spread: half-read texts, the cache, memory, what drafters return, who comes behind."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from contained import CONTAINED, TEXTS, VOCAB_SIZE, draft_model, layer_skip, params, plain, run, target
from drafting import made
from foredraft import LLM, SamplingParams
from foredraft.drafters.compose import UnionDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter, Needs
from foredraft.engine.drafts import Drafts
from foredraft.engine.engine import Engine
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.row import Row
from foredraft.errors import MOST_CHARACTERS, PromptError, is_fatal, told
from foredraft.model.lm import CausalLM
from foredraft.serve.errors import ApiError
from foredraft.testing import PerfectDrafter, check_cache_lengths, toy_model
from foredraft.tree import DraftTree

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: made("ngram", 4, prompt_lookup_min=1),
    "draft-model": draft_model,
    "layer-skip": layer_skip,
    "union": lambda: UnionDrafter([draft_model(), layer_skip()]),
}


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


@pytest.mark.parametrize("method", DRAFTERS)
def test_who_comes_behind_a_row_without_drafts_is_drafted_for(method: str) -> None:
    """The first row fails as it starts, alone in the engine; those that join it are beside it in every step."""
    drafter = raising(DRAFTERS[method](), "start", lambda rows: rows[0].request_id == "first", KeyError(1))
    engine = Engine(target(), drafter, CONTAINED)
    rows = engine.add_request(TEXTS[0], params(0), "first")
    for _ in range(2):
        engine.step()
    rows += [engine.add_request(text, params(number))[0] for number, text in enumerate(TEXTS[1:3], 1)]
    while engine.has_unfinished:
        engine.step()
        check_cache_lengths(engine)
    assert [row.output_ids for row in rows] == plain()[:3]
    assert [row.stats.drafter_error for row in rows] == ["KeyError: 1", "", ""]
    assert rows[0].stats.num_spec_steps == 0
    assert rows[1].stats.num_spec_steps > 0


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
    assert {row.stats.drafter_error for row in rows} == {"Unspeakable"} == {told(Unspeakable())}
    assert len(caplog.messages) == 1


def test_a_long_message_is_passed_on_by_its_two_ends(caplog: pytest.LogCaptureFixture) -> None:
    """A processor that puts its scores into its message does not fill results and logs."""
    fault = ValueError(f"begin{'x' * 48_000}end")
    drafter = raising(made("ngram", 4, prompt_lookup_min=1), "propose", lambda _: True, fault)
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        rows = run(drafter)
    messages = [rows[0].stats.drafter_error, told(fault), told(PromptError(str(fault))), str(ApiError(400, str(fault)))]
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


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_target_that_turns_nan_as_its_own_drafter_leaves_nothing_of_it(
    has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its second layer, say, it overflows at the second drafted token, and nothing of the draft is verified.

    Neither shorter rows of a batch nor later ones in the same slots may meet what it wrote.
    """
    drafter = layer_skip()
    engine = Engine(target(), drafter, CONTAINED)
    propose = Drafts.propose

    def proposed(self: Drafts, rows: Sequence[Row], *others: Any) -> list[DraftTree]:
        propose(self, rows, *others)
        return [DraftTree.root(row.pending) for row in rows]

    monkeypatch.setattr(Drafts, "propose", proposed)
    forward = drafter.model.forward

    def overflowing(nodes: Any, cache: Any, **others: Any) -> torch.Tensor:
        logits = forward(nodes, cache, **others)
        if cache.lengths[0] < len(engine.decoding_rows[0].token_ids):
            return logits
        for row in range(len(nodes.tokens)):
            for buffer in cache._buffers():
                buffer[row, :, cache.lengths[row] : cache.lengths[row] + nodes.width] = torch.nan
        if has_failed:
            raise OverflowError
        return torch.full_like(logits, torch.nan)

    monkeypatch.setattr(drafter.model, "forward", overflowing)
    rows = [engine.add_request(text, params(number))[0] for number, text in enumerate(TEXTS)]
    while engine.has_unfinished:
        engine.step()
        assert all(bool(buffer.isfinite().all()) for buffer in engine.cache._buffers())
    assert [(row.output_ids, row.finish_reason) for row in rows] == [(text, "length") for text in plain()]
    assert any(row.stats.drafter_error for row in rows) == has_failed


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
@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.slow), "ngram"])
def test_a_text_that_cannot_be_read_ends_its_own_row_of_a_call(
    method: str, others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stop strings the engine reads it, without them the session does: the other rows and calls do not notice."""
    llm = LLM("zoo:tiny", None if method == "none" else method, dtype="float32", max_num_seqs=4)
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


class Cut(KeyboardInterrupt):
    """Ctrl-C at a chosen line."""


def cut_at(place: tuple[str, str], number: int, call: Callable[[], Any]) -> None:
    """Call with Ctrl-C before the n-th line that runs in a function of a file."""
    file, name = place
    count = [0]

    def line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] == number:
                raise Cut
        return line

    def enter(frame: Any, *_: Any) -> Any:
        return line if frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        with contextlib.suppress(Cut):
            call()
    finally:
        sys.settrace(before)


PLACES = [("engine/engine.py", "_exclusive"), ("engine/frontend.py", "_step"), ("engine/frontend.py", "open")]


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_an_llm_that_is_cut_off_at_any_line_goes_on(place: tuple[str, str]) -> None:
    """Also between taking the turn and the block that gives it back, and where a call has queued but half its rows."""
    llm = LLM(toy_model(VOCAB_SIZE), "ngram", max_num_seqs=3)
    prompts: list[Any] = [{"prompt_token_ids": text} for text in TEXTS]
    given = [params(number) for number in range(len(TEXTS))]
    for number in range(1, 13):
        cut_at(place, number, lambda: llm.generate(prompts[:3], given[:3]))
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, given)]
        assert found == plain(), number
        assert llm.num_unfinished == 0, number
        engine = llm._runner.engine
        assert not engine.has_unfinished, number
        assert engine.cache.num_rows == 0, number
