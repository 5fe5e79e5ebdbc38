"""Calls of tools: those that a grammar forces, those that the model decides on, and functions, their older form."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from foredraft.config.structured import StructuredOutputs
from foredraft.engine.frontend import StreamOutput
from foredraft.llm import LLM
from foredraft.serve.chat import ChatForm, read_chat
from foredraft.serve.errors import ApiError
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from foredraft.serve.tools import Tools
from foredraft.structured.grammars import Grammars
from schemas import HOSTILE, nested, random_schema
from serving import SETTINGS, Running, running, with_template

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "What is one and two?"}]
DIGITS = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {"a": DIGITS, "b": DIGITS}
PARAMETERS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": ADD, "required": ["a", "b"], "additionalProperties": False},
    "paint": {
        "$defs": {"colour": {"enum": ['"red"', "grün}", "{{ \\ }}"]}},
        "properties": {"colour": {"$ref": "#/$defs/colour"}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": of}} for name, of in PARAMETERS.items()]
TOOLS += [{"type": "function", "function": {"name": 'stop\nnow "at" once'}}]
NAMED: Any = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    made = with_template(llm)
    drafting = {
        name: made.with_speculative_config(method) for name, _, method in (one.partition("=") for one in SETTINGS)
    }
    with running(Served({"tiny": made, **drafting}), ServerSettings(tool_call_parser="hermes")) as found:
        yield found


def ask(server: Running, **fields: Any) -> Any:
    """A whole answer, which the client's types take strictly."""
    sent = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    found = server.post("/v1/chat/completions", **sent | fields)
    assert found.status_code == 200, found.text
    return ChatCompletion.model_validate_json(found.content, strict=True)


def streamed(server: Running, **fields: Any) -> dict[int, Any]:
    """Messages and reasons by index, put together from a stream by the rules of the client."""
    sent = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    found: dict[int, Any] = {}
    for event in server.events("/v1/chat/completions", sent | fields):
        chunk = ChatCompletionChunk.model_validate(event, strict=True)
        (choice,) = chunk.choices
        before = found.setdefault(choice.index, {"calls": [], "reason": None, "num_chunks": 0})
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id is not None:
                assert (call.index, call.type) == (len(before["calls"]), "function")
                before["calls"].append({"name": call.function.name, "arguments": ""})
            before["calls"][call.index]["arguments"] += call.function.arguments or ""
        before["reason"] = choice.finish_reason or before["reason"]
        before["num_chunks"] += 1
    return found


def told(choice: Any) -> dict[str, Any]:
    calls = [each.function for each in choice.message.tool_calls or []]
    return {
        "calls": [{"name": each.name, "arguments": each.arguments} for each in calls],
        "reason": choice.finish_reason,
    }


def check_calls(choice: Any, parameters: dict[str, dict[str, Any]]) -> None:
    """Whole calls of tools that there are, with arguments of their schemas."""
    assert choice.message.content is None
    assert choice.message.tool_calls
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, parameters.get(call.function.name, {"maxProperties": 0}))


@pytest.mark.sample(1)
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_required_call_comes_whole_and_streamed(server: Running, temperature: int) -> None:
    sent = {"temperature": temperature, "seed": 1, "n": 2, "parallel_tool_calls": False}
    found = ask(server, **sent)
    chunks = streamed(server, **sent)
    for choice in found.choices:
        check_calls(choice, PARAMETERS)
        assert len(choice.message.tool_calls or []) == 1
        assert choice.finish_reason == "tool_calls"
        assert told(choice) == {key: chunks[choice.index][key] for key in ("calls", "reason")}
        assert chunks[choice.index]["num_chunks"] > 5


@pytest.mark.parametrize("name", [tool["function"]["name"] for tool in TOOLS])
def test_a_named_tool_is_called_once(server: Running, name: str) -> None:
    """The reason is ``stop`` then, as in the OpenAI API."""
    choice = ask(server, tool_choice={"type": "function", "function": {"name": name}}, seed=2).choices[0]
    check_calls(choice, PARAMETERS)
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == (name, "stop")


def test_several_calls_may_come_unless_one_is_wanted(server: Running) -> None:
    several = ask(server, n=12, seed=3, temperature=1.5).choices
    assert len({call.function.name for choice in several for call in choice.message.tool_calls or []}) > 1
    assert max(len(choice.message.tool_calls or []) for choice in several) > 1
    for choice in several:
        if choice.finish_reason == "tool_calls":
            check_calls(choice, PARAMETERS)
    single = ask(server, n=4, seed=3, temperature=1.5, parallel_tool_calls=False).choices
    assert {len(choice.message.tool_calls or []) for choice in single} == {1}


def test_calls_are_those_of_plain_decoding(server: Running) -> None:
    sent = {"n": 3, "seed": 5, "verify": True, "logprobs": True, "top_logprobs": 2, "model": "lookup"}
    found = server.post(
        "/v1/chat/completions", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=60, **sent
    ).json()
    assert found["verify"]["identical"]
    assert found["verify"]["logprobs_identical"]
    for choice in found["choices"]:
        assert all(len(token["top_logprobs"]) == 2 for token in choice["logprobs"]["content"])
        assert "".join(token["token"] for token in choice["logprobs"]["content"]).startswith("<tool_call>")


@pytest.mark.full
def test_a_call_may_be_cut_anywhere(server: Running) -> None:
    """By the limit of tokens: arguments up to there, and no call without its name; whole and streamed alike."""
    whole = told(ask(server, tool_choice=NAMED, seed=7, temperature=0).choices[0])["calls"][0]["arguments"]
    seen = set()
    for most in (*range(1, 60, 5), 200):
        sent = {"tool_choice": NAMED, "seed": 7, "max_tokens": most, "temperature": 0}
        (choice,) = ask(server, **sent).choices
        found = told(choice)
        assert found == {key: streamed(server, **sent)[0][key] for key in ("calls", "reason")}
        if found["reason"] == "stop":
            break
        assert found["reason"] == "length"
        assert choice.message.content is None
        assert all(call["name"] == "add" and whole.startswith(call["arguments"]) for call in found["calls"])
        seen.add("".join(call["arguments"] for call in found["calls"]))
    assert found["reason"] == "stop"
    assert {"", whole} <= seen | {whole}
    assert len(seen) > 3


@pytest.mark.parametrize(("stop", "reason"), [("</tool_call>", "tool_calls"), ('"arg', "stop"), (', "b', "stop")])
def test_stop_strings_end_calls(server: Running, stop: str, reason: str) -> None:
    """With a reason that says whether there is a whole one."""
    sent = {"tools": TOOLS[:1], "seed": 1, "temperature": 0, "stop": [stop], "parallel_tool_calls": False}
    (choice,) = ask(server, **sent).choices
    found = told(choice)
    assert found["reason"] == reason
    assert found == {key: streamed(server, **sent)[0][key] for key in ("calls", "reason")}
    assert [call["arguments"][:5] for call in found["calls"]] == ([] if stop == '"arg' else ['{"a":'])


def test_calls_of_an_answer_go_back(server: Running) -> None:
    """As the message of an assistant, as the client makes it; the prompt has them as the grammar does."""
    said = ask(server, tool_choice=NAMED, seed=6).choices[0].message
    history = [*MESSAGES, said.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "1", "content": "3"}]
    tokens = server.post("/v1/chat/completions", model="tiny", messages=history, max_tokens=1, return_token_ids=True)
    prompt = server.llm.tokenizer.decode(tokens.json()["prompt_token_ids"])
    arguments = said.tool_calls[0].function.arguments
    assert f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>' in prompt


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "not among the tools"),
        ({"tools": []}, "there are no tools"),
        ({"structured_outputs": {"regex": "a"}}, "leave one of them out"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "1 to 256 characters"),
        ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "surrogate"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}, "'object'"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"$ref": 1}}}]}, "cannot be forced"),
        ({"tools": TOOLS * 2000}, "characters"),
    ],
)
def test_what_cannot_be_forced_is_refused_by_name(server: Running, fields: dict[str, Any], said: str) -> None:
    sent = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", **fields}
    found = server.http.post("/v1/chat/completions", content=json.dumps(sent).encode())
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]


def test_a_form_of_contents_does_not_matter_to_calls(server: Running) -> None:
    """Agents ask for both: the form is that of a final answer, and there is none."""
    check_calls(ask(server, response_format={"type": "json_object"}, seed=1).choices[0], PARAMETERS)


@pytest.mark.parametrize("template", ["{{ tools }}", "{{ tools }}<tool_call><function=</tool_call>"])
def test_another_format_is_refused_by_name(llm: LLM, template: str) -> None:
    """Calls may come in it, and none can be forced; strict is named as ignored."""
    made, settings = Served({"tiny": with_template(llm, template)}), ServerSettings(tool_call_parser="hermes")
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 1}
    assert read_chat(body, made, settings)[0].unknown == ()
    assert read_chat(body | {"tools": STRICT}, made, settings)[0].unknown == ("tools.function.strict",)
    for choice in ("required", NAMED):
        with pytest.raises(ApiError, match="uses another format"):
            read_chat(body | {"tool_choice": choice}, made, settings)


def test_without_llguidance_a_forced_call_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tools = [{"type": "function", "function": {"name": "never_compiled"}}]
    sent = {"messages": MESSAGES, "tools": tools, "tool_choice": "required"}
    found = server.post("/v1/chat/completions", **sent)
    assert found.status_code == 400
    assert "python -m pip install 'llguidance" in found.json()["error"]["message"]


def allowing(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_alone_are_called(server: Running) -> None:
    """The others are as if they were not offered."""
    found = ask(server, tool_choice=allowing("required", "paint"), n=12, seed=1, parallel_tool_calls=False).choices
    for choice in found:
        check_calls(choice, PARAMETERS)
        assert {call.function.name for call in choice.message.tool_calls} == {"paint"}
        assert choice.finish_reason == "tool_calls"
    sent: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 5}
    choices = [{"tools": TOOLS, "tool_choice": allowing("auto", "paint", "add")}, {"tools": TOOLS[:2]}]
    texts = [server.post("/v1/chat/completions", **sent, **each).json() for each in choices]
    assert texts[0]["usage"] == texts[1]["usage"]
    assert texts[0]["choices"][0]["message"] == texts[1]["choices"][0]["message"]


@pytest.mark.parametrize(
    "choice",
    [
        allowing("required", "sub"),
        allowing("always", "add"),
        allowing("auto"),
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "add"}]}},
    ],
)
def test_tools_that_cannot_be_allowed_are_refused(server: Running, choice: Any) -> None:
    found = server.post("/v1/chat/completions", messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    assert found.status_code == 400
    assert "tool_choice" in found.json()["error"]["message"]


STRICT: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS[:2]]


def follows(tokenizer: Any, tools: Tools, text: str) -> tuple[str, bool]:
    """How far a text follows the grammar of tools, and whether it may end there."""
    form = tools.form
    assert form is not None
    eos = tokenizer.eos_token_id
    matching = Grammars(tokenizer, len(tokenizer), [eos]).matching(StructuredOutputs(**form))
    ids = tokenizer.encode(text, add_special_tokens=False)
    for place, token in enumerate(ids):
        allowed = matching.allowed(())
        if allowed is None or not allowed[token]:
            return tokenizer.decode(ids[:place]), bool(allowed is not None and allowed[eos])
        matching.extend([token])
    allowed = matching.allowed(())
    return text, bool(allowed is not None and allowed[eos])


ADDED, PAINTED = (
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in (("add", '{"a": 1, "b": 2}'), ("paint", '{"colour": "grün}"}'))
)


@pytest.mark.parametrize("has_tags", [False, True])
@pytest.mark.parametrize(
    ("text", "followed", "ends"),
    [
        ("", "", True),
        ("a < b, <tool", "a < b, <tool", True),
        (f"Well, {ADDED} and {PAINTED}", f"Well, {ADDED} and {PAINTED}", True),
        ('<tool_call>\n{"name": "add", "arguments": {"c": 1}}', '<tool_call>\n{"name": "add", "arguments": {"', False),
        ('<tool_call>\n{"name": "sub"', '<tool_call>\n{"name": "', False),
        ("Well, <tool_call>add", "Well, <tool_call>", False),
    ],
)
def test_a_call_that_is_begun_follows_its_schema(
    llm: LLM, has_tags: bool, text: str, followed: str, ends: bool
) -> None:
    """Once it is begun, and no other text is bound; with tags that are spelled, or tokens as in Qwen's vocabulary."""
    tokenizer = copy.deepcopy(llm.tokenizer)
    if has_tags:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    found, may_end = follows(tokenizer, Tools(STRICT, strict=tuple(STRICT), has_tags=has_tags), text)
    assert text.startswith(found)
    assert found.startswith(followed)
    assert (found == text) == (followed == text)
    assert may_end == ends


def test_a_forced_call_has_tags_that_are_tokens(llm: LLM) -> None:
    """They were spelled, as no model with such tokens does."""
    tokenizer = copy.deepcopy(llm.tokenizer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    assert follows(tokenizer, Tools(STRICT, tuple(STRICT), has_tags=True), ADDED) == (ADDED, True)
    assert follows(tokenizer, Tools(STRICT, tuple(STRICT), has_tags=True), "a") == ("", False)


def test_one_call_alone_where_one_is_wanted(llm: LLM) -> None:
    tools = Tools(STRICT, strict=tuple(STRICT), is_single=True)
    assert follows(llm.tokenizer, tools, f"{ADDED} done") == (f"{ADDED} done", True)
    found, _ = follows(llm.tokenizer, tools, f"{ADDED}\n{PAINTED}")
    assert found.startswith(f"{ADDED}\n")
    assert len(found) < len(f"{ADDED}\n<tool_call>")


def test_strict_changes_no_text_without_a_call(server: Running) -> None:
    """Under a grammar that takes any text, it is that of no grammar; drafts of it, too."""
    sent = {"messages": MESSAGES, "n": 3, "seed": 3, "max_tokens": 40, "verify": True, "model": "lookup"}
    found = [server.post("/v1/chat/completions", **sent, tools=tools).json() for tools in (TOOLS[:2], STRICT)]
    assert found[1]["verify"]["identical"]
    assert found[1]["usage"]["prompt_tokens"] > found[0]["usage"]["prompt_tokens"]  # which tell of strict
    assert len(found[1]["choices"]) == 3


def test_a_form_of_contents_goes_before_strict(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}
    sent = {"messages": MESSAGES, "tools": STRICT, "max_tokens": 30}
    found = server.post("/v1/chat/completions", **sent, response_format=form).json()["choices"][0]
    assert found["message"]["content"] == '"yes"'


def test_strict_that_cannot_be_held_is_named(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    found = server.post("/v1/chat/completions", messages=MESSAGES, tools=STRICT, max_tokens=2)
    assert found.status_code == 200
    assert found.headers["x-foredraft-warning"] == "fields were ignored: tools.function.strict"


def test_a_strict_schema_that_is_none_is_refused(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "a", "strict": True, "parameters": {"$ref": 1}}}
    found = server.post("/v1/chat/completions", messages=MESSAGES, tools=[tool], max_tokens=2)
    assert found.status_code == 400
    assert "(strict)" in found.json()["error"]["message"]


FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASKED: dict[str, Any] = {"model": "tiny", "input": MESSAGES, "tools": FLAT, "max_output_tokens": 200}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("chat", "responses", "single"),
    [
        ("required", "required", False),
        (NAMED, {"type": "function", "name": "add"}, True),
        (
            allowing("required", "paint", "add"),
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "paint"}, FLAT[0]]},
            True,
        ),
    ],
)
def test_responses_call_what_chat_calls(server: Running, chat: Any, responses: Any, single: bool) -> None:
    """Whole and streamed, by the types of the client."""
    sent: dict[str, Any] = {"seed": 11, "parallel_tool_calls": not single, "temperature": 0.7}
    (choice,) = ask(server, tool_choice=chat, **sent).choices
    asked = {**ASKED, **sent, "tool_choice": responses}
    found = Response.model_validate_json(server.post("/v1/responses", **asked).content, strict=True)
    calls = [{"name": item.name, "arguments": item.arguments} for item in found.output if item.type == "function_call"]
    assert calls == told(choice)["calls"]
    assert len(calls) == len(found.output) > 0
    assert len({item.call_id for item in found.output if item.type == "function_call"}) == len(calls)
    assert found.status == ("incomplete" if choice.finish_reason == "length" else "completed")
    events: list[Any] = [
        TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)
        for event in server.events("/v1/responses", asked)
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = ["" for _ in calls]
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            said[event.output_index] += event.delta
        elif event.type == "response.function_call_arguments.done":
            assert (event.name, event.arguments) == tuple(calls[event.output_index].values())
    assert said == [call["arguments"] for call in calls]
    assert sum(event.type == "response.function_call_arguments.delta" for event in events) > 1
    assert [item.arguments for item in events[-1].response.output] == said
    assert events[-1].response.usage.output_tokens == found.usage.output_tokens


def test_a_response_with_tools_may_be_text(server: Running) -> None:
    (expected,) = ask(server, tool_choice="auto", temperature=0, max_tokens=8).choices
    body = {**ASKED, "max_output_tokens": 8, "temperature": 0}
    whole = Response.model_validate(server.post("/v1/responses", **body).json())
    assert [item.type for item in whole.output] == ["message"]
    assert whole.output_text == expected.message.content
    last = Response.model_validate(server.events("/v1/responses", body)[-1]["response"])
    assert last.output_text == whole.output_text


def test_calls_of_a_response_go_back(server: Running) -> None:
    """With their results, as items; the prompt is that of chat."""
    calls = [("c1", "add", '{"a": 1, "b": 2}'), ("c2", "paint", "{}")]
    items: list[Any] = [{"type": "message", "role": "assistant", "content": "Well."}]
    items += [{"type": "function_call", "call_id": i, "name": name, "arguments": of} for i, name, of in calls]
    items += [{"type": "function_call_output", "call_id": i, "output": "3"} for i, _, _ in calls]
    made = [{"id": i, "type": "function", "function": {"name": name, "arguments": of}} for i, name, of in calls]
    history = [*MESSAGES, {"role": "assistant", "content": "Well.", "tool_calls": made}]
    history += [{"role": "tool", "tool_call_id": i, "content": "3"} for i, _, _ in calls]
    found = server.post("/v1/responses", input=[*MESSAGES, *items], max_output_tokens=8, temperature=0).json()
    expected = server.post("/v1/chat/completions", messages=history, max_tokens=8, temperature=0).json()
    assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert found["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]


TAGGED = {
    "type": "object",
    "properties": {"a": {"const": "</tool_call>"}},
    "required": ["a"],
    "additionalProperties": False,
}
AROUND = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": 2.50, "b": 1e999, "a": 1}}\n</tool_call>\nDone.\n'


def test_a_whole_answer_with_calls_is_what_its_stream_adds_up_to(server: Running) -> None:
    """In chat and in responses, with text around a call, and arguments in the model's own digits."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    sent = {"structured_outputs": {"choice": [AROUND]}, "seed": 1}
    asked = {"messages": MESSAGES, "tools": tools, "max_tokens": 300, **sent}
    message = server.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]
    deltas = [choice["delta"] for event in server.events("/v1/chat/completions", asked) for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"] == "Well.\n\nDone.\n"
    for calls in (message["tool_calls"], [call for delta in deltas for call in delta.get("tool_calls", [])]):
        assert [call["function"]["arguments"] for call in calls] == ['{"a": 2.50, "b": 1e999, "a": 1}']
    items = {"input": MESSAGES, "tools": [{"type": "function", "name": "f"}], "max_output_tokens": 300, **sent}
    whole = server.post("/v1/responses", **items).json()["output"]
    assert [item["type"] for item in whole] == ["message", "function_call", "message"]
    streamed = server.events("/v1/responses", items)[-1]["response"]["output"]
    said = [
        [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in found]
        for found in (streamed, whole)
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_closing_tag_inside_an_argument_ends_no_call(server: Running, choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": TAGGED}}]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
    sent = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300}
    sent |= {"structured_outputs": {"choice": [call]}} if choice == "auto" else {}
    (found,) = ask(server, **sent).choices
    assert told(found)["calls"][0] == {"name": "f", "arguments": '{"a": "</tool_call>"}'}
    assert found.finish_reason == "tool_calls"


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}', '{"a": 1'])
def test_arguments_that_no_template_can_write_go_back_as_text(server: Running, arguments: str) -> None:
    """They came back as ``Infinity`` or ``NaN``, or ended the conversation with half a surrogate pair."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    found = server.post("/v1/chat/completions", messages=history, max_tokens=1, return_prompt_text=True).json()
    assert f'"arguments": {json.dumps(arguments)}' in found["prompt_text"]


HOSTILE_PARAMETERS: dict[str, dict[str, Any]] = {
    "deep": json.loads(nested(150)),
    "deeper": json.loads(nested(400)),
    **{name: wanted["json"] for name, wanted in HOSTILE.items() if "json" in wanted and name != "deep schema"},
    "grammar in a description": {"description": '"\nstart: a\n%llguidance\na ::= b', "properties": {}},
    "grammar in a property": {
        "properties": {'") %json {} start: ("': {"type": "null"}},
        "required": ['") %json {} start: ("'],
    },
    "white space of its own": {"x-guidance": {"whitespace_pattern": ".*"}, "properties": {"a": {"type": "null"}}},
    "lenient": {"x-guidance": {"lenient": True}, "properties": {"a": {"contentMediaType": "x"}}},
    "tags in texts": {"properties": {"a": {"const": "}\n</tool_call>\n<tool_call>\n{"}}, "required": ["a"]},
    "texts of a pattern": {"properties": {"a": {"pattern": "^(a|b)*a(a|b){60}$"}}, "required": ["a"]},
    "a pattern that is none": {"properties": {"a": {"pattern": "("}}},
    "no value possible": {"properties": {"a": False}, "required": ["a"]},
    "endless": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "many required": {"properties": {f"p{i}": {} for i in range(2000)}, "required": [f"p{i}" for i in range(2000)]},
    "elsewhere": {"$ref": "http://example.com/schema.json"},
    "surrogate": {"properties": {"\ud800": {}}},
    "numbers": {"properties": {"a": {"type": "number", "multipleOf": 1e-300, "minimum": -1e308}}, "required": ["a"]},
}


MOST_HOSTILE = {
    ("deep", "auto"),
    ("deeper", "required"),
    ("grammar in a property", "required"),
    ("numbers", "required"),
}


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param(name, choice, marks=() if (name, choice) in MOST_HOSTILE else pytest.mark.full)
        for name in HOSTILE_PARAMETERS
        for choice in ("required", "auto")
    ],
)
def test_hostile_tools_are_refused_or_called(server: Running, name: str, choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": HOSTILE_PARAMETERS[name]}}]
    sent = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "max_tokens": 30, "timeout": 60}
    began = perf_counter()
    found = server.http.post("/v1/chat/completions", content=json.dumps(sent).encode())
    took = perf_counter() - began
    print(f"{name}, {choice}: {found.status_code} {took:.2f} s {found.text[:200]}")
    if found.status_code != 200:
        error = found.json()["error"]
        assert found.status_code == 400, error
        assert "Traceback" not in found.text
    elif choice == "required":
        (text,) = found.json()["choices"]
        calls = text["message"].get("tool_calls", [])
        assert all(call["function"]["name"] == "f" for call in calls)
        if text["finish_reason"] == "tool_calls":
            assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


@pytest.mark.full
@pytest.mark.smollm2
@pytest.mark.usefixtures("_loaded_once")
def test_a_real_model_calls_what_it_must() -> None:
    """With random schemas, whatever it wanted to say; those that end in time are calls of their tools."""
    made = with_template(LLM("zoo:smollm2", "suffix+eagle3", max_num_seqs=4, num_cached_prefixes=4))
    draw = random.Random(7)
    num_ended = 0
    with running(Served({"tiny": made}), ServerSettings(tool_call_parser="hermes")) as server:
        for number in (0, 3):
            parameters = {f"tool_{place}": random_schema(draw) for place in range(3)}
            tools = [
                {"type": "function", "function": {"name": name, "parameters": of}} for name, of in parameters.items()
            ]
            sent = {"tools": tools, "n": 2, "seed": number, "temperature": number % 2, "max_tokens": 300}
            sent |= {"parallel_tool_calls": number % 4 < 2}
            for choice in ask(server, **sent).choices:
                if choice.finish_reason == "tool_calls":
                    check_calls(choice, parameters)
                    num_ended += 1
    assert num_ended >= 2


# -- calls that the model decides on --------------------------------------------------------------------------------

FUNCTION: Any = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_tools_reach_the_template_and_calls_the_client(llm: LLM) -> None:
    settings = ServerSettings(tool_call_parser="hermes")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 41}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    asking, form = read_chat(
        {"messages": history, "tools": FUNCTION, "stream": True},
        Served({"tiny": with_template(llm, TEMPLATE)}),
        settings,
    )
    prompt = asking.prompts[0]["prompt"]
    assert '"name": "add"' in prompt
    assert "assistant: 41" in prompt
    assert isinstance(form, ChatForm)
    texts = tuple(ADDED[i : i + 5] for i in range(0, len(ADDED), 5))
    delta = StreamOutput("0", 0, 0, ADDED, (), tuple(range(len(texts))), 0, "stop", None, texts)
    chunks = [
        ChatCompletionChunk.model_validate_json(told.removeprefix(b"data: "), strict=True)
        for told in form.events([delta], dict)
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    (read,) = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
    assert (read.function.name, read.index) == ("add", 0)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_template_without_tools_is_refused_by_name(served: Served) -> None:
    with pytest.raises(ApiError, match="--chat-template"):
        read_chat({"messages": MESSAGES, "tools": FUNCTION}, served, ServerSettings(tool_call_parser="hermes"))


# -- functions, which the OpenAI API had before tools: tools of which one is called ------------------------------------

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
PLUS = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False},
}
MINUS = PLUS | {"name": "sub"}
OF_NAME = {"name": "add"}
BOTH = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>\n' for name in ("add", "sub"))


def ask_functions(server: Running, **fields: Any) -> Any:
    sent = {"messages": MESSAGES, "functions": [PLUS, MINUS], "max_tokens": 100, "temperature": 0}
    return server.post("/v1/chat/completions", **sent | fields)


def test_a_named_function_is_called_whole_and_streamed(server: Running) -> None:
    found = ChatCompletion.model_validate_json(ask_functions(server, function_call=OF_NAME).content, strict=True)
    message = found.choices[0].message
    assert message.function_call is not None
    assert (message.content, message.tool_calls, found.choices[0].finish_reason) == (None, None, "stop")
    assert message.function_call.name == "add"
    assert json.loads(message.function_call.arguments)["a"] in range(10)
    body = {
        "messages": MESSAGES,
        "functions": [PLUS, MINUS],
        "function_call": OF_NAME,
        "max_tokens": 100,
        "temperature": 0,
    }
    chunks = [
        ChatCompletionChunk.model_validate(event, strict=True) for event in server.events("/v1/chat/completions", body)
    ]
    pieces = [chunk.choices[0].delta.function_call for chunk in chunks]
    told = [piece for piece in pieces if piece is not None]
    assert [piece.name for piece in told if piece.name] == ["add"]
    assert "".join(piece.arguments or "" for piece in told) == message.function_call.arguments


def test_a_function_means_what_a_tool_means(server: Running) -> None:
    by_function = ask_functions(server, function_call=OF_NAME, n=2, seed=3, temperature=1).json()
    tools = [{"type": "function", "function": function} for function in (PLUS, MINUS)]
    named = {"type": "function", "function": OF_NAME}
    by_tool = ask_functions(server, functions=None, tools=tools, tool_choice=named, n=2, seed=3, temperature=1).json()
    assert by_function["usage"] == by_tool["usage"]
    calls = [choice["message"]["tool_calls"][0]["function"] for choice in by_tool["choices"]]
    assert [choice["message"]["function_call"] for choice in by_function["choices"]] == calls


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_a_model_may_answer_without_a_call(server: Running, choice: Any) -> None:
    found = ask_functions(server, function_call=choice)
    assert found.status_code == 200, found.text
    assert "x-foredraft-warning" not in found.headers
    assert found.json()["choices"][0]["message"]["content"]


def test_the_first_call_alone_is_told(server: Running) -> None:
    settings = ServerSettings(tool_call_parser="hermes")
    _, form = read_chat(
        {"messages": MESSAGES, "functions": [PLUS, MINUS], "stream": True}, server.server.application.served, settings
    )
    assert isinstance(form, ChatForm)
    delta = StreamOutput("0", 0, 0, BOTH, (), (1, 2), 0, "stop", None, (BOTH[:40], BOTH[40:]))
    chunks = [json.loads(told.removeprefix(b"data: "))["choices"][0] for told in form.events([delta], dict)]
    told = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert told == [{"name": "add", "arguments": '{"a": 1}'}]
    assert chunks[-1]["finish_reason"] == "function_call"


def test_without_parallel_calls_the_first_tool_alone_is_told(server: Running) -> None:
    """As in vLLM; a model may write more, and clients that wanted one got two."""
    tools = [{"type": "function", "function": function} for function in (PLUS, MINUS)]
    sent = {"messages": MESSAGES, "tools": tools, "stream": True}
    for is_parallel, names in ((True, ["add", "sub"]), (False, ["add"])):
        _, form = read_chat(
            sent | {"parallel_tool_calls": is_parallel},
            server.server.application.served,
            ServerSettings(tool_call_parser="hermes"),
        )
        delta = StreamOutput("0", 0, 0, BOTH, (), (1,), 0, "stop", None, (BOTH,))
        (chunk,) = [json.loads(told.removeprefix(b"data: "))["choices"][0] for told in form.events([delta], dict)]
        assert [call["function"]["name"] for call in chunk["delta"]["tool_calls"]] == names


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"function_call": {"name": "mul"}}, "of one of the functions"),
        ({"function_call": "required"}, "of one of the functions"),
        ({"functions": None, "function_call": OF_NAME}, "there are no functions"),
        ({"functions": [{"type": "function"}]}, "functions[0]"),
        ({"functions": "add"}, "a list of"),
        ({"tools": [{"type": "function", "function": PLUS}]}, "functions and tools"),
        ({"tool_choice": "auto"}, "functions and tool_choice"),
    ],
)
def test_what_is_no_function_is_refused_by_name(server: Running, fields: dict[str, Any], said: str) -> None:
    found = ask_functions(server, **fields)
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]
