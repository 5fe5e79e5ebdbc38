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
from foredraft.llm import LLM
from foredraft.serve.chat import read_chat
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
FUNCTIONS: Any = [tool["function"] for tool in TOOLS[:2]]
OF_NAME = {"name": "add"}
CALLING: Any = {"tools": None, "tool_choice": None, "functions": FUNCTIONS}
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


def allowing(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


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
        ({"tool_choice": allowing("required", "sub")}, "tool_choice"),
        ({"tool_choice": allowing("always", "add")}, "tool_choice"),
        ({"tool_choice": allowing("auto")}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "add"}]}}},
            "tool_choice",
        ),
        (CALLING | {"function_call": {"name": "mul"}}, "of one of the functions"),
        (CALLING | {"function_call": "required"}, "of one of the functions"),
        (CALLING | {"functions": None, "function_call": OF_NAME}, "there are no functions"),
        (CALLING | {"functions": [{"type": "function"}]}, "functions[0]"),
        (CALLING | {"functions": "add"}, "a list of"),
        (CALLING | {"tools": TOOLS}, "functions and tools"),
        (CALLING | {"tool_choice": "auto"}, "functions and tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"$ref": 1}}}],
                "tool_choice": "auto",
            },
            "(strict)",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_by_name(server: Running, fields: dict[str, Any], said: str) -> None:
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


BEGUN = '<tool_call>\n{"name": %s'
STRICTLY: dict[str, Any] = {"strict": tuple(STRICT)}
FORCED: dict[str, Any] = {"forced": tuple(STRICT)}


@pytest.mark.parametrize("has_tags", [False, True])
@pytest.mark.parametrize(
    ("options", "text", "followed", "ends"),
    [
        (STRICTLY, "", "", True),
        (STRICTLY, "a < b, <tool", "a < b, <tool", True),
        (STRICTLY, f"Well, {ADDED} and {PAINTED}", f"Well, {ADDED} and {PAINTED}", True),
        (STRICTLY, BEGUN % '"add", "arguments": {"c": 1}}', BEGUN % '"add", "arguments": {"', False),
        (STRICTLY, BEGUN % '"sub"', BEGUN % '"', False),
        (STRICTLY, "Well, <tool_call>add", "Well, <tool_call>", False),
        (STRICTLY | {"is_single": True}, f"{ADDED} done", f"{ADDED} done", True),
        (STRICTLY | {"is_single": True}, f"{ADDED}\n{PAINTED}", f"{ADDED}\n", None),
        (FORCED, ADDED, ADDED, True),
        (FORCED, "a", "", False),
    ],
)
def test_a_call_that_is_begun_or_forced_follows_its_schema(
    llm: LLM, has_tags: bool, options: dict[str, Any], text: str, followed: str, ends: bool | None
) -> None:
    """And no other text is bound; with tags that are spelled, or tokens as in Qwen's vocabulary."""
    tokenizer = copy.deepcopy(llm.tokenizer)
    if has_tags:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    found, may_end = follows(tokenizer, Tools(STRICT, **options, has_tags=has_tags), text)
    assert text.startswith(found)
    assert found.startswith(followed)
    assert len(found) < len(followed) + len("<tool_call>")
    assert (found == text) == (followed == text)
    assert ends is None or may_end == ends


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


@pytest.mark.full
def test_the_openai_client_accumulates_streams(server: Running) -> None:
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0}
    with server.client.chat.completions.stream(
        **asked, messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = choice.message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS["add"])
    asked |= {"max_output_tokens": 200}
    with server.client.responses.stream(
        **asked, input=MESSAGES, tools=FLAT, tool_choice={"type": "function", "name": "add"}
    ) as responses:
        responses.until_done()
        (item,) = responses.get_final_response().output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), PARAMETERS["add"])
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "name": "it", "schema": schema | {"additionalProperties": False}}
    with server.client.responses.stream(**asked, input="Say it", text={"format": form}) as responses:
        responses.until_done()
        found = responses.get_final_response()
    assert found.status == "completed"
    assert found.output_text.replace(" ", "") in ('{"a":"x"}', '{"a":"y"}')


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


def test_a_template_without_tools_is_refused_by_name(served: Served) -> None:
    with pytest.raises(ApiError, match="--chat-template"):
        read_chat({"messages": MESSAGES, "tools": TOOLS}, served, ServerSettings(tool_call_parser="hermes"))


# -- functions, which the OpenAI API had before tools: tools of which one is called ------------------------------------


def ask_functions(server: Running, **fields: Any) -> Any:
    sent = {"messages": MESSAGES, "functions": FUNCTIONS, "max_tokens": 200, "temperature": 0}
    return server.post("/v1/chat/completions", **sent | fields)


def test_a_named_function_is_called_as_the_tool_of_its_name(server: Running) -> None:
    """Whole and streamed."""
    sent = {"n": 2, "seed": 3, "temperature": 1}
    named = ask(server, **sent, tools=TOOLS[:2], tool_choice=NAMED)
    found = ask_functions(server, **sent, function_call=OF_NAME)
    whole = ChatCompletion.model_validate_json(found.content, strict=True)
    assert whole.usage == named.usage
    body = {"messages": MESSAGES, "functions": FUNCTIONS, "function_call": OF_NAME, "max_tokens": 200, **sent}
    events = server.events("/v1/chat/completions", body)
    chunks = [ChatCompletionChunk.model_validate(event, strict=True).choices[0] for event in events]
    for choice, by_tool in zip(whole.choices, named.choices, strict=True):
        message, (call,) = choice.message, told(by_tool)["calls"]
        assert (message.content, message.tool_calls, choice.finish_reason) == (None, None, "stop")
        assert message.function_call is not None
        assert message.function_call.model_dump() == call
        pieces = [chunk.delta.function_call for chunk in chunks if chunk.index == choice.index]
        given = [piece for piece in pieces if piece is not None]
        assert [piece.name for piece in given if piece.name] == ["add"]
        assert "".join(piece.arguments or "" for piece in given) == call["arguments"]


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_a_model_may_answer_without_a_call(server: Running, choice: Any) -> None:
    found = ask_functions(server, function_call=choice)
    assert found.status_code == 200, found.text
    assert "x-foredraft-warning" not in found.headers
    assert found.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tools": TOOLS}, ["add", "paint"]),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ["add"]),
        ({"functions": FUNCTIONS}, ["add"]),
    ],
)
def test_calls_beyond_the_one_that_is_wanted_are_left_out(
    server: Running, fields: dict[str, Any], names: list[str]
) -> None:
    """As in vLLM; a model may write more, and clients that wanted one got two."""
    both = {"structured_outputs": {"choice": [f"{ADDED}\n{PAINTED}"]}, "messages": MESSAGES, "max_tokens": 300}
    (choice,) = server.post("/v1/chat/completions", **both, **fields).json()["choices"]
    chunks = [event["choices"][0] for event in server.events("/v1/chat/completions", both | fields)]
    is_tools = "tools" in fields
    for reason in (choice["finish_reason"], chunks[-1]["finish_reason"]):
        assert reason == ("tool_calls" if is_tools else "function_call")
    said = [choice["message"], *(chunk["delta"] for chunk in chunks)]
    for messages in (said[:1], said[1:]):
        calls = [call["function"] for one in messages for call in one.get("tool_calls") or []]
        calls += [one["function_call"] for one in messages if one.get("function_call")]
        assert [call["name"] for call in calls if call.get("name")] == names
        assert "".join(call["arguments"] for call in calls).startswith('{"a": 1, "b": 2}')
