"""Fields of vLLM beside those of the OpenAI API: prompts that are cut, ids of requests, what the template was given."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foredraft.config.sampling import SamplingParams
from foredraft.llm import LLM
from foredraft.serve.chat import read_chat
from foredraft.serve.errors import ApiError
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from serving import Running, with_template

PROMPT = "The quick brown fox jumps over the lazy dog and runs away"
MESSAGES = [{"role": "user", "content": "one two three"}]
GREEDY = {"max_tokens": 6, "temperature": 0.0, "return_token_ids": True}


def prompt_of(llm: LLM, template: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The prompt of a chat under another template: its text and token ids."""
    served = Served({"tiny": with_template(llm, template)})
    asking, _ = read_chat({"messages": MESSAGES, "max_tokens": 1, **body, **fields}, served, ServerSettings())
    (prompt,) = asking.prompts
    return prompt


def ids_of(server: Running, text: str) -> list[int]:
    return list(server.llm.tokenizer(text)["input_ids"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_cut_at_the_side_that_is_named(running_server: Running, side: str, stream: bool) -> None:
    ids = ids_of(running_server, PROMPT)
    kept = ids[-5:] if side == "left" else ids[:5]
    (expected,) = running_server.llm.generate([kept], SamplingParams(max_tokens=6, temperature=0))
    body = {**GREEDY, "truncate_prompt_tokens": 5, "truncation_side": side, "echo": True}
    for prompt in (PROMPT, ids):
        if stream:
            first, *rest = running_server.events("/v1/completions", {**body, "prompt": prompt})
            (choice,) = first["choices"]
            text = "".join(chunk["choices"][0]["text"] for chunk in (first, *rest))
            assert not any("prompt_token_ids" in chunk["choices"][0] for chunk in rest)
        else:
            (choice,) = running_server.post("/v1/completions", **body, prompt=prompt).json()["choices"]
            text = choice["text"]
        assert choice["prompt_token_ids"] == kept
        assert text == running_server.llm.tokenizer.decode(kept) + expected.outputs[0].text


@pytest.mark.full
def test_a_prompt_is_cut_to_the_room_that_max_tokens_leaves(running_server: Running) -> None:
    """Texts that could not fit were refused before they were read; vLLM cuts them."""
    limit = running_server.llm.model_info.context_length
    body = {**GREEDY, "truncate_prompt_tokens": -1, "temperature": 0.0}
    long = "word " * 40 * limit
    answer = running_server.post("/v1/completions", **body, prompt=long).json()
    assert answer["usage"]["prompt_tokens"] == limit - 6
    assert answer["choices"][0]["prompt_token_ids"] == ids_of(running_server, long)[6 - limit :]
    messages = [{"role": "user", "content": long}]
    answer = running_server.post("/v1/chat/completions", **body, messages=messages, return_prompt_text=True).json()
    assert answer["usage"]["prompt_tokens"] == limit - 6
    assert answer["prompt_text"] == running_server.llm.tokenizer.decode(answer["prompt_token_ids"])
    short = running_server.post("/v1/completions", **body, prompt=PROMPT).json()
    assert short["usage"]["prompt_tokens"] == len(ids_of(running_server, PROMPT))


def test_chat_tells_its_prompt_beside_the_choices(running_server: Running) -> None:
    """Where vLLM tells it: samples share it. In a stream, with the first chunk of each."""
    wanted = dict(running_server.llm.chat_prompt(MESSAGES))
    body = {**GREEDY, "messages": MESSAGES, "n": 2, "return_prompt_text": True}
    whole = running_server.post("/v1/chat/completions", **body, prompt_logprobs=1).json()
    assert whole["prompt_token_ids"] == list(wanted["prompt_token_ids"])
    assert whole["prompt_text"] == wanted["prompt"]
    assert len(whole["prompt_logprobs"]) == len(whole["prompt_token_ids"])
    assert all(len(choice["token_ids"]) == 6 for choice in whole["choices"])
    chunks = running_server.events("/v1/chat/completions", body)
    assert [chunk["prompt_token_ids"] for chunk in chunks[:2]] == [whole["prompt_token_ids"]] * 2
    assert [chunk["prompt_text"] for chunk in chunks[:2]] == [wanted["prompt"]] * 2
    assert not any({"prompt_token_ids", "prompt_text"} & chunk.keys() for chunk in chunks[2:])
    plain = running_server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=1).json()
    assert not {"prompt_token_ids", "prompt_text", "prompt_logprobs"} & plain.keys()


def test_special_tokens_are_added_to_a_conversation_that_asks_for_them(llm: LLM) -> None:
    """The field was read by nobody."""
    for adds in (False, True):
        found = prompt_of(llm, "{{ messages[0].content }}", {}, add_special_tokens=adds)["prompt_token_ids"]
        assert found == llm.tokenizer("one two three", add_special_tokens=adds)["input_ids"]


def test_documents_go_to_a_template_that_has_them(running_server: Running, llm: LLM) -> None:
    """Beside ``chat_template_kwargs`` or in it; refused where the template has none, in ``/tokenize``, too."""
    documents = {"documents": [{"title": "a", "text": "b"}]}
    for fields in (documents, {"chat_template_kwargs": documents}):
        for path in ("/v1/chat/completions", "/tokenize"):
            refused = running_server.post(path, messages=MESSAGES, **fields)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_field")
            assert "documents" in refused.json()["error"]["message"]
        template = "{% for one in documents %}{{ one.title }}={{ one.text }}{% endfor %};{{ messages[0].content }}"
        assert prompt_of(llm, template, fields)["prompt"] == "a=b;one two three"
    for name, wrong in (("documents", ["a"]), ("chat_template_kwargs", {"documents": ["a"]})):
        with pytest.raises(ApiError, match="documents is") as raised:
            prompt_of(llm, template, {name: wrong})
        assert raised.value.status == 400


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_request_has_an_id(running_server: Running, path: str) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else {"messages": MESSAGES}
    body = {"input": "a"} if path == "/v1/responses" else body
    url, short = f"{running_server.server.address}{path}", {"max_output_tokens" if "input" in body else "max_tokens": 2}
    named = httpx.post(url, json=body | short, headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    assert named.json()["id"].endswith("-mine-1" if "input" not in body else "resp_mine-1")
    told = httpx.post(url, json=body | short | {"request_id": "a/b"}, headers={"x-request-id": "mine-1"})
    assert (told.headers["x-request-id"], told.json()["id"][-3:]) == ("mine-1", "a/b")
    drawn = httpx.post(url, json=body | short, headers={"x-request-id": "a b"})
    assert drawn.json()["id"].endswith(drawn.headers["x-request-id"])
    assert " " not in drawn.headers["x-request-id"]
    stream = httpx.post(url, json=body | short | {"stream": True}, headers={"x-request-id": "mine-2"})
    assert (stream.headers["x-request-id"], stream.headers.get("x-foredraft-warning")) == ("mine-2", None)
    assert "mine-2" in stream.text
    for wrong in ("a b", "x" * 129, "é", 5):
        refused = httpx.post(url, json=body | {"request_id": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")
        assert refused.headers["x-request-id"]


def test_defaults_of_vllm_are_no_news(running_server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1, "length_penalty": 1.0, "spaces_between_special_tokens": True}
    assert "x-foredraft-warning" not in running_server.post("/v1/completions", **body, include_reasoning=True).headers
    changed = running_server.post("/v1/completions", **{**body, "length_penalty": 2.0}).headers
    assert "length_penalty" in changed["x-foredraft-warning"]


@pytest.mark.parametrize(
    "wrong", [{"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "up"}]
)
def test_cuts_that_are_none_are_refused(running_server: Running, wrong: dict[str, Any]) -> None:
    refused = running_server.post("/v1/completions", prompt="a", **wrong)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong)))


CONTINUED = [*MESSAGES, {"role": "assistant", "content": "four five"}]
PATHS = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": MESSAGES}}


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_that_goes_on_begins_with_what_there_was(running_server: Running, n: int) -> None:
    """`echo` of vLLM, in chat: the last message, if it is the model's."""
    body = {**GREEDY, "messages": CONTINUED, "n": n, "continue_final_message": True, "add_generation_prompt": None}
    plain = running_server.post("/v1/chat/completions", **body).json()["choices"]
    echoed = running_server.post("/v1/chat/completions", **body, echo=True)
    assert "x-foredraft-warning" not in echoed.headers
    for one, other in zip(plain, echoed.json()["choices"], strict=True):
        assert other["message"]["content"] == "four five" + one["message"]["content"]
    chunks = running_server.events("/v1/chat/completions", {**body, "echo": True})
    for index in range(n):
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": "four five"}
        assert "".join(delta["content"] for delta in deltas) == "four five" + plain[index]["message"]["content"]
    asked = {**GREEDY, "messages": MESSAGES}  # the last word is the user's
    assert [
        running_server.post("/v1/chat/completions", **asked, echo=echo).json()["choices"][0]["message"]["content"]
        for echo in (False, True)
    ] == [running_server.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"]] * 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("granularity", ["token", "step"])
def test_chunks_hold_as_many_tokens_as_are_asked_for(running_server: Running, path: str, granularity: str) -> None:
    """All but the first and the last of a text, as in vLLM; together they are the same answer."""
    body = {**PATHS[path], "temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 23, "ignore_eos": True}
    body |= {"return_token_ids": True, "logprobs": 2 if "prompt" in body else True, "stop": ["zebra"]}
    whole = running_server.post(path, **body, stream_interval=5).json()["choices"]
    asked = {**body, "stream_interval": 5, "stream_granularity": granularity, "stream_options": {"include_usage": True}}
    chunks = running_server.events(path, asked)
    assert chunks[-1]["usage"]["completion_tokens"] == 46
    for text in whole:
        found = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == text["index"]]
        found = [choice for choice in found if choice.get("token_ids") or choice["finish_reason"]]
        assert all(len(choice["token_ids"]) >= 5 for choice in found[1:-1])
        assert len(found) <= 6
        assert [token for choice in found for token in choice["token_ids"]] == text["token_ids"]
        said = [choice["text"] if "text" in choice else choice["delta"]["content"] for choice in found]
        assert "".join(said) == (text["text"] if "text" in text else text["message"]["content"])
        assert [choice["finish_reason"] for choice in found] == [None] * (len(found) - 1) + ["length"]
        for name in ("content", "tokens", "token_logprobs", "text_offset"):
            if name in text["logprobs"]:
                assert [one for choice in found for one in choice["logprobs"][name]] == text["logprobs"][name]


def test_intervals_are_refused_where_steps_are_to_be_told(running_server: Running) -> None:
    for wrong in ({"stream_interval": 0}, {"stream_interval": "5"}, {"stream_interval": 2, "return_drafts": True}):
        refused = running_server.post("/v1/completions", prompt="a", stream=True, **wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_interval")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_named_tokens(running_server: Running, stream: bool) -> None:
    """Those of vLLM: the token itself and the named ones, with their values, whatever `logprobs` counts."""
    most = running_server.llm.target.vocab_size
    (known,) = running_server.llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, logprobs=most))
    named = [5, 99, 7, 5]
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1, "logprob_token_ids": named}
    body |= {"return_tokens_as_token_ids": True}
    if stream:
        found = [chunk["choices"][0]["logprobs"] for chunk in running_server.events("/v1/completions", body)]
        tops = [one for logprobs in found for one in logprobs["top_logprobs"]]
    else:
        tops = running_server.post("/v1/completions", **body).json()["choices"][0]["logprobs"]["top_logprobs"]
    text = known.outputs[0]
    assert text.logprobs is not None
    for token, table, told in zip(text.token_ids, text.logprobs, tops, strict=True):
        wanted = dict.fromkeys([token, 5, 99, 7])
        assert list(told) == [f"token_id:{one}" for one in wanted]
        for one in wanted:
            assert told[f"token_id:{one}"] == pytest.approx(max(table[one].logprob, -9999.0), abs=1e-5)
    (ranked,) = running_server.llm.generate(
        PROMPT, SamplingParams(temperature=0, max_tokens=6, logprob_token_ids=named)
    )
    assert ranked.outputs[0].logprobs is not None
    for table, few in zip(text.logprobs, ranked.outputs[0].logprobs, strict=True):
        assert all(few[one].rank <= table[one].rank for one in few)  # of equal ones the table counts one by one


def test_named_tokens_in_chat(running_server: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "logprob_token_ids": [5, 99]}
    answer = running_server.post("/v1/chat/completions", **body, return_tokens_as_token_ids=True)
    for entry in answer.json()["choices"][0]["logprobs"]["content"]:
        names = [top["token"] for top in entry["top_logprobs"]]
        assert names == [*dict.fromkeys([entry["token"], "token_id:5", "token_id:99"])]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    for wrong in (
        {"logprobs": False},
        {"logprob_token_ids": []},
        {"logprob_token_ids": ["a"]},
        {"logprob_token_ids": [10**9]},
        {"logprob_token_ids": list(range(25))},
    ):
        refused = running_server.post("/v1/chat/completions", **(body | wrong))
        assert refused.status_code == 400, refused.text
        assert "logprob_token_ids" in refused.text


REST = "{% if add_generation_prompt %}:{% endif %}{{ messages[-1].content }}{{ thinks }}"


def test_flags_may_stand_among_the_variables_of_the_template(llm: LLM) -> None:
    """``add_generation_prompt`` was ignored there, in silence."""

    def prompt(**body: Any) -> str:
        return str(prompt_of(llm, REST, body)["prompt"])

    whole = ":one two three"
    assert prompt() == prompt(chat_template_kwargs={"add_generation_prompt": True}) == whole
    assert prompt(chat_template_kwargs={"add_generation_prompt": None}) == whole
    assert prompt(chat_template_kwargs={"add_generation_prompt": False}) == whole[1:]
    assert prompt(add_generation_prompt=False) == whole[1:]
    assert prompt(add_generation_prompt=False, chat_template_kwargs={"add_generation_prompt": False}) == whole[1:]
    assert prompt(chat_template_kwargs={"continue_final_message": True}) == whole[1:]
    assert prompt(chat_template_kwargs={"thinks": 2}) == whole + "2"
    for wrong, said in (
        (
            {"add_generation_prompt": False, "chat_template_kwargs": {"add_generation_prompt": True}},
            "set only one of them",
        ),
        ({"chat_template_kwargs": {"add_generation_prompt": "no"}}, "true or false"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": True, "continue_final_message": True}},
            "exclude each other",
        ),
    ):
        with pytest.raises(ApiError, match=said):
            prompt(**wrong)


def test_variables_that_the_template_does_not_have_are_named(running_server: Running) -> None:
    """As fields without effect are."""
    kwargs = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    for path in ("/v1/chat/completions", "/tokenize"):
        found = running_server.post(path, **kwargs)
        assert found.headers["x-foredraft-warning"] == "fields were ignored: chat_template_kwargs.enable_thinking"
    refused = running_server.under(strict_fields=True).post("/v1/chat/completions", json=kwargs)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs.enable_thinking")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_of_earlier_answers_reaches_the_template(llm: LLM, name: str) -> None:
    """It was left out, as fields of messages are that nobody knows."""
    messages = [*MESSAGES, {"role": "assistant", "content": "a", name: "b"}]
    template = "{{ messages[1].content }}={{ messages[1].reasoning_content }}"
    assert prompt_of(llm, template, {"messages": messages})["prompt"] == "a=b"
