"""A conversation: equal to a fresh one, cheap to go on with, and its commands, piped."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from typer.testing import CliRunner, Result

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.cli.conversation import ChatTurn, Conversation, totals
from foredraft.cli.running import respell
from foredraft.engine.frontend import StreamOutput
from foredraft.errors import ConfigError, ContextLengthError
from foredraft.testing import toy_model

QUESTIONS = ("Tell me a story about a lion and a mouse.", "What is your favorite movie?", "Who was it?")
SHORT = SamplingParams(temperature=0, max_tokens=24)


@cache
def fresh() -> LLM:
    return LLM("zoo:tiny", dtype="float32")


@cache
def kept() -> LLM:
    return LLM("zoo:tiny", "draft_model", dtype="float32", num_cached_prefixes=2, prefill_chunk_size=64)


def messages(turns: list[ChatTurn], question: str) -> list[dict[str, str]]:
    """The conversation so far as a user of `LLM.chat` would write it."""
    said = [
        message
        for asked, turn in zip(QUESTIONS, turns, strict=False)
        for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": turn.text})
    ]
    return [*said, {"role": "user", "content": question}]


# -- the conversation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SHORT, replace(SHORT, temperature=0.9, seed=5)], ids=["greedy", "sampled"])
def test_answers_are_those_of_a_fresh_conversation(params: SamplingParams) -> None:
    conversation, turns = Conversation(kept(), params), []
    for question in QUESTIONS:
        expected = fresh().chat(messages(turns, question), params)[0]
        turns.append(conversation.ask(question))
        assert turns[-1].token_ids == expected.outputs[0].token_ids
        assert turns[-1].output.prompt_token_ids == expected.prompt_token_ids
    assert conversation.messages == [
        *messages(turns[:-1], QUESTIONS[-1]),
        {"role": "assistant", "content": turns[-1].text},
    ]


def test_only_new_text_is_fed() -> None:
    """From the second turn on: the last token of the answer, which no cache holds, and the new message."""
    llm = LLM("zoo:tiny", dtype="float32", num_cached_prefixes=1, prefill_chunk_size=64)
    conversation = Conversation(llm, SHORT)
    before = conversation.ask(QUESTIONS[0])
    fed_so_far = llm.profile.num_prefill_tokens
    assert fed_so_far == len(before.output.prompt_token_ids) - 1
    for question in QUESTIONS[1:]:
        turn = conversation.ask(question)
        known = len(before.output.prompt_token_ids) + len(before.token_ids) - 1
        assert turn.output.num_cached_tokens == known
        assert turn.num_fed_tokens == len(turn.output.prompt_token_ids) - known
        assert llm.profile.num_prefill_tokens == fed_so_far + turn.num_fed_tokens - 1
        before, fed_so_far = turn, llm.profile.num_prefill_tokens
    assert totals(conversation.answered)["num_fed_tokens"] == fed_so_far + len(QUESTIONS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_decoding_gives_the_same_answer(temperature: float) -> None:
    conversation = Conversation(kept(), replace(SHORT, temperature=temperature))
    turn = conversation.ask(QUESTIONS[0])
    again = conversation.again()
    assert (again.method, again.seed, again.token_ids) == ("none", turn.seed, turn.token_ids)
    assert conversation.turns == [turn]
    assert conversation.method == "draft_model"


def test_an_answer_can_be_stopped() -> None:
    """What was said stays in the conversation; the plain answer goes as far."""
    pieces: list[StreamOutput] = []
    conversation = Conversation(kept(), replace(SHORT, max_tokens=60))
    turn = conversation.ask(QUESTIONS[0], pieces.append, lambda: len(pieces) == 2)
    assert turn.is_stopped
    assert turn.output.outputs[0].finish_reason == "abort"
    assert conversation.messages[-1]["content"] == turn.text
    assert conversation.again().token_ids == turn.token_ids
    assert kept().num_unfinished == 0
    following = conversation.ask("Go on.")
    expected = fresh().chat(conversation.messages[:-1], conversation.params)[0].outputs[0]
    assert following.token_ids == expected.token_ids


def test_a_full_context_is_refused_and_changes_nothing() -> None:
    llm = LLM("zoo:tiny", dtype="float32", num_cached_prefixes=1, prefill_chunk_size=64, max_model_len=48)
    conversation = Conversation(llm, replace(SHORT, max_tokens=None, ignore_eos=True))
    turn = conversation.ask("Hello, how are you?")
    assert turn.output.outputs[0].finish_reason == "length"
    assert conversation.num_tokens == 48
    said = list(conversation.messages)
    with pytest.raises(ContextLengthError, match=r"has \d+ tokens, and the context holds 48: no room.*/reset"):
        conversation.ask("And now?")
    assert conversation.messages == said
    conversation.reset()
    assert conversation.ask("Hello, how are you?").token_ids == turn.token_ids


def test_methods_change_between_turns_and_keep_what_was_fed() -> None:
    conversation = Conversation(kept(), SHORT)
    first = conversation.ask(QUESTIONS[0])
    conversation.use("ngram")
    turn = conversation.ask(QUESTIONS[1])
    assert (turn.method, conversation.method) == ("ngram", "ngram")
    assert turn.output.num_cached_tokens == len(first.output.prompt_token_ids) + len(first.token_ids) - 1
    conversation.use("draft_model")
    assert conversation.llm is kept()
    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        conversation.use("ngarm")
    assert conversation.method == "draft_model"


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Conversation(LLM(toy_model()), SHORT)
    with pytest.raises(ConfigError, match="n is 2"):
        Conversation(kept(), replace(SHORT, n=2))


# -- piped -----------------------------------------------------------------------------------------------------------


def chat(*lines: str, options: tuple[str, ...] = ()) -> Result:
    arguments = ["chat", "--model", "zoo:tiny", "--max-new-tokens", "24", "--dtype", "float32", *options]
    return CliRunner().invoke(app, respell(arguments), input="".join(line + "\n" for line in lines))


def test_piped_output_is_the_answers_and_nothing_else() -> None:
    result = chat(*QUESTIONS, "", "/stats")
    turns: list[ChatTurn] = []
    conversation = Conversation(kept(), SHORT)
    turns = [conversation.ask(question) for question in QUESTIONS]
    assert result.exit_code == 0
    assert result.stdout == "".join(turn.text + "\n" for turn in turns)
    assert "num fed tokens" in result.stderr
    assert result.stderr.count(" tok/s") == len(QUESTIONS), "the closing line of every answer"


def test_commands() -> None:
    result = chat(
        "/seed 7", "/seed", QUESTIONS[0], "/plain", "/method ngram", "/method", "/reset", "/help", "/quit", "no"
    )
    assert result.exit_code == 0
    answers = result.stdout.splitlines()
    assert len(answers) == 2
    assert answers[0] == answers[1]
    for said in ("seed 7", "identical: ", "method ngram, drafts of up to 10 tokens", "is empty", "/method [NAME]"):
        assert said in result.stderr


def test_what_is_refused_shows_in_the_exit_code() -> None:
    refused = {
        "/sats": "no command /sats; did you mean /stats?",
        "/zzz": "no command /zzz; known are /method",
        "/seed x": "the seed is 'x'",
        "/seed -5": "seed is -5",
        "/method mgram": "did you mean 'ngram'?",
        "/plain": "no answer yet",
    }
    result = chat(*refused, "/quit")
    assert (result.exit_code, result.stdout) == (2, "")
    assert [message for message in refused.values() if message not in result.stderr] == []


def test_json_is_one_object_per_answer() -> None:
    options = ("--json", "--temperature", "0.8", "--seed", "3")
    result = chat(QUESTIONS[0], "/plain", "/stats", "//stats", options=options)
    assert result.exit_code == 0
    answer, again, stats, slashes = [json.loads(line) for line in result.stdout.splitlines()]
    assert answer["token_ids"] == again["token_ids"]
    assert answer["prompt"] == again["prompt"] == QUESTIONS[0]
    assert answer["chat_template"]
    assert (answer["method"], again["method"], again["identical"]) == ("auto", "none", True)
    assert (answer["num_cached_tokens"], again["num_cached_tokens"]) == (0, answer["num_prompt_tokens"] - 1)
    assert stats["stats"]["num_turns"] == 1
    assert slashes["prompt"] == "/stats"


def test_an_answer_that_differs_shows_in_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    again: Callable[..., ChatTurn] = Conversation.again

    def other(self: Conversation, *args: object, **options: object) -> ChatTurn:
        turn = again(self)
        sample = replace(turn.output.outputs[0], token_ids=(5, *turn.token_ids[1:]))
        return replace(turn, output=replace(turn.output, outputs=(sample,)))

    monkeypatch.setattr(Conversation, "again", other)
    result = chat(QUESTIONS[0], "/plain")
    assert result.exit_code == 3
    assert "different from token 0 on" in result.stderr


def test_the_end_of_input_without_a_line_break_still_is_a_message() -> None:
    result = CliRunner().invoke(app, ["chat", "--model", "zoo:tiny", "--max-new-tokens", "4"], input="Hello")
    assert result.exit_code == 0
    assert result.stdout.strip()
    assert "stopped at the limit of 4 tokens" in result.stderr
