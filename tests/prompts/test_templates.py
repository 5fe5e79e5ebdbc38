"""Chat templates in a process of their own: the text of transformers, whatever goes wrong in them, and their bounds."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
from transformers import PreTrainedTokenizerBase

from foredraft import zoo
from foredraft.errors import ConfigError, PromptError
from foredraft.prompts.prompts import chat_text
from foredraft.prompts.templates import TemplateFailure, TemplateRenderer, renderer

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
SAID: dict[str, Any] = {"role": "assistant", "content": "Well, ", "name": None}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"é": [1, 2.5, None, True]}}}


@pytest.fixture(scope="module")
def own() -> PreTrainedTokenizerBase:
    return zoo.load("tiny")[2]


def with_template(own: PreTrainedTokenizerBase, template: str) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(own)
    tokenizer.chat_template = template
    return tokenizer


def add(a: int) -> int:
    """Add.

    Args:
      a: A number.
    """
    return a


@dataclass
class Message:
    role: str
    content: str


ALL = "{% for m in messages %}[{{ m | tojson }}]{% endfor %}{{ add_generation_prompt }}"
SAME: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "all": (ALL, [USER, SAID], {}),
    "blocks": ("{% if true %}\n  a\n    {% endif %}\nb\n", [USER], {}),
    "tokens": ("{{ bos_token }}{{ eos_token }}{{ messages[0]['content'] }}", [USER], {}),
    "tools": ("{{ tools | tojson(indent=2) }}{{ tools is none }}", [USER], {"tools": [TOOL, add]}),
    "without": ("{{ tools is none }}{{ documents is none }}{{ other is defined }}", [USER], {}),
    "documents": ("{{ documents[0].title }}", [USER], {"documents": [{"title": "é"}]}),
    "a variable": (
        "{{ thinks }}{{ key }}",
        [USER],
        {"thinks": True, "key": (1, numpy.float32(0.5), numpy.bool_(False))},
    ),
    "namespace": ("{% set n = namespace(a=1) %}{% for i in [1] %}{% set n.a = 2 %}{% endfor %}{{ n.a }}", [USER], {}),
    "dict": ("{{ dict(a=1) | tojson }}{{ dict.fromkeys(['a'], 2) | tojson }}", [USER], {}),
    "loops": ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", [USER], {}),
    "generation": ("{% generation %}{{ messages[0].content }}{% endgeneration %}.", [USER], {}),
    "time": ("{{ strftime_now('%Y') }}", [USER], {}),
    "escapes": (
        "{{ messages[0].content }}{{ messages | tojson }}",
        [{"role": "user", "content": "<é&\U0001f600'\x00"}],
        {},
    ),
    "reasoning": ("{{ messages[0].reasoning_content }}", [{**SAID, "reasoning": "a"}], {}),
    "a dataclass": (ALL, [Message("user", "a")], {}),
    "continued": ("{{ messages[-1].content }}|end", [USER, SAID], CONTINUED := {"continue_final_message": True}),
    "continued, trimmed": ("{{ messages[-1].content | trim }}|end", [USER, SAID], CONTINUED),
    "continued parts": (
        "{{ messages[-1].content[0].text }}|",
        [{"role": "assistant", "content": [{"type": "text", "text": "a b"}]}],
        CONTINUED,
    ),
    "another template": ("no", [USER], {"chat_template": "{{ messages[0].role }}"}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_text_is_that_of_transformers(own: PreTrainedTokenizerBase, name: str) -> None:
    template, messages, options = SAME[name]
    tokenizer = with_template(own, template)
    options = {"add_generation_prompt": "continue_final_message" not in options, **options}
    expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert chat_text(tokenizer, messages, **options) == expected


FAILING = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages[7].content }}": "no element 7",
    "{{ range(10 ** 9) }}": "OverflowError",
    "{{ '%d' % 'a' }}": "TypeError",
    "{{ 'a'.encode('nothing') }}": "LookupError",
    "{{ '\\ud83d'.encode() }}": "UnicodeEncodeError",
    "{{ ('9' * 5000) | int + 1 }}": "",
    "{{ nothing.of.it }}": "undefined",
    "{{ raise_exception('not so') }}": "not so",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{% set n = namespace(_a=1) %}": "underscore",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
}


@pytest.mark.parametrize("template", FAILING)
def test_whatever_a_template_raises_is_a_refusal(own: PreTrainedTokenizerBase, template: str) -> None:
    """Some were tracebacks, and 500 from the server."""
    tokenizer = with_template(own, template)
    if not FAILING[template]:
        assert chat_text(tokenizer, [USER])
        return
    with pytest.raises(PromptError, match="chat template of the model does not accept these messages") as caught:
        chat_text(tokenizer, [USER])
    assert FAILING[template] in str(caught.value)
    assert len(str(caught.value)) < 1200


LARGE = (
    "{{ 'x' * 10 ** 10 }}",
    "{{ [0] * n }}",
    "{{ 'x' | center(n) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ messages | tojson(indent='x' * n) }}",
    "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% for i in range(1000) %}{{ 'x' * 1000000 }}{% endfor %}",
)
LONG = (
    "{{ n ** n }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    pytest.param(
        "{% macro f(k) %}{% if k %}{{ f(k - 1) }}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        marks=pytest.mark.full,
    ),
    pytest.param("{{ lipsum(n=n) }}", marks=pytest.mark.full),
)


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells no limit of memory")
@pytest.mark.parametrize("template", LARGE)
def test_the_memory_of_a_template_is_bounded(template: str) -> None:
    with pytest.raises(TemplateFailure, match="64 MB"):
        renderer().render(template, {"n": 10**10, "messages": [USER]})
    assert renderer().render("{{ n }}", {"n": 1}) == "1"


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform == "win32", reason="there is no timer of processor time")
@pytest.mark.parametrize("template", LONG)
def test_the_time_of_a_template_is_bounded(template: str) -> None:
    """Also within one operation, which no thread could be stopped in."""
    with pytest.raises(TemplateFailure, match="1 s of processor time"):
        renderer().render(template, {"n": 10**7})
    assert renderer().render("{{ n }}", {"n": 1}) == "1"


def test_a_large_conversation_is_within_the_bounds() -> None:
    text = "\U0001f600" * 1_000_000
    assert renderer().render("{{ a }}{{ a }}", {"a": text}) == text * 2


@pytest.mark.parametrize("template", ["{% if a }}", "{{ a | nothing }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30])
def test_what_is_not_a_template_is_told_apart(own: PreTrainedTokenizerBase, template: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*chat_template.jinja"):
        chat_text(with_template(own, template), [USER])


def processes(patch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Processes that are started from now on."""
    found, start = [], subprocess.Popen
    patch.setattr(subprocess, "Popen", lambda *given, **options: found.append(start(*given, **options)) or found[-1])
    return found


def test_a_worker_that_somebody_ends_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made, workers = TemplateRenderer(), processes(monkeypatch)
    assert made.render("{{ a }}", {"a": 1}) == "1"
    (worker,) = workers
    worker.kill()
    worker.wait()
    assert made.render("{{ a }}", {"a": 2}) == "2"
    assert len(workers) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="processes do not show their environment")
def test_a_worker_does_not_hold_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEY", "secret")
    made, workers = TemplateRenderer(), processes(monkeypatch)
    made.render("", None)
    (worker,) = workers
    assert b"secret" not in Path(f"/proc/{worker.pid}/environ").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing is forked")
def test_a_forked_process_has_a_worker_of_its_own() -> None:
    code = """
import os
from foredraft.prompts.templates import renderer
assert renderer().render("{{ a }}", {"a": 1}) == "1"
first = renderer()._worker.pid
number = os.fork()
if not number:
    os._exit(0 if renderer().render("{{ a }}", {"a": 2}) == "2" and renderer()._worker.pid != first else 3)
assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 0
assert renderer().render("{{ a }}", {"a": 3}) == "3" and renderer()._worker.pid == first
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ([], {}, "empty"),
        (["a"], {}, "a mapping"),
        ([USER], {"documents": ["a"]}, "documents"),
        ([USER], {"tools": [3]}, "a tool is 3; give"),
        ([USER], {"tools": [len]}, "documented function"),
        ([USER], {"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ([{"role": "assistant"}], {"continue_final_message": True, "add_generation_prompt": False}, "content"),
        ([[USER]], {}, "a mapping"),
    ],
)
def test_what_no_template_is_given(own: PreTrainedTokenizerBase, messages: Any, options: Any, said: str) -> None:
    with pytest.raises(PromptError, match=said):
        chat_text(own, messages, **options)


def test_deep_messages_are_refused(own: PreTrainedTokenizerBase) -> None:
    deep: Any = "a"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(PromptError, match="nested too deeply"):
        chat_text(own, [{"role": "user", "content": deep}])


@pytest.mark.parametrize("name", ["tokenize", "return_tensors", "padding"])
def test_options_of_tokens_have_no_meaning(own: PreTrainedTokenizerBase, name: str) -> None:
    with pytest.raises(ConfigError, match=f"chat does not support '{name}'"):
        chat_text(own, [USER], **{name: True})
