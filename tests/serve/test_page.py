"""The page in a browser: a question, its stream, rejected branches, Markdown, keyboard, reload, phones and themes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft.views.token_view import page as assembled
from serving import Running

SHOTS = Path(__file__).parents[2] / ".cache" / "page"


def opened(page: Any, running_server: Running) -> Any:
    """The page, with names of models."""
    page.goto(running_server.server.address)
    page.wait_for_selector("#name option", state="attached")
    return page


@pytest.fixture
def page(browser: Any, running_server: Running) -> Iterator[Any]:
    page = browser.new_page()
    yield opened(page, running_server)
    page.close()


@pytest.fixture
def touched(browser: Any, running_server: Running) -> Iterator[Any]:
    """The same on a phone."""
    context = browser.new_context(has_touch=True, is_mobile=True, viewport={"width": 390, "height": 800})
    yield opened(context.new_page(), running_server)
    context.close()


@pytest.mark.full
@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 1100), ("light", 390)])
def test_a_question_is_answered(browser: Any, running_server: Running, theme: str, width: int) -> None:
    page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": 800})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url) if "127.0.0.1" not in request.url else None)
    opened(page, running_server)
    if page.locator("#options").get_attribute("aria-expanded") == "false":
        page.locator("#options").click()
    page.locator("#tokens").fill("40")
    page.locator("#verify").check()
    page.locator("#text").fill("Tell me a story")
    page.keyboard.press("Enter")
    page.wait_for_selector(".assistant + .told:has-text('identical to plain')")
    expected = running_server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Tell me a story"}],
        temperature=0,
        max_tokens=40,
    ).json()
    assert " ".join(page.locator(".text").inner_text().split())
    assert not page.locator(".assistant .token:visible").count()
    page.get_by_role("button", name="Tokens").click()
    shown = page.eval_on_selector_all(
        ".tokens > .token", "all => all.map(one => one.firstChild?.nodeValue ?? '').join('')"
    )
    assert shown == expected["choices"][0]["message"]["content"]
    assert page.locator(".tokens > .drafted").count() > 0
    refused = page.locator(".refused").first
    for reveal in (refused.hover, refused.focus):
        page.locator("#text").focus()
        page.mouse.move(0, 0)
        assert not refused.locator(".branches").is_visible()
        reveal()
        assert refused.locator(".branches").is_visible()
        assert refused.locator(".branches").inner_text().strip()
    drafter = page.locator(".tokens > .drafted").first.get_attribute("class")
    assert page.locator(".legend > .drafted").first.get_attribute("class") == drafter.replace(" refused", "")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.wait_for_selector("#figures:has-text('running')")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{theme}_{width}.png")
    assert faults == []
    page.close()


@pytest.mark.full
def test_a_reload_ends_the_stream_and_escape_stops_it(page: Any, running_server: Running) -> None:
    for leave in (lambda: page.keyboard.press("Escape"), page.reload):
        page.locator("#tokens").fill("1500")
        page.locator("#temperature").fill("1.5")
        page.locator("#text").fill("Talk on and on")
        page.keyboard.press("Enter")
        page.wait_for_selector(".tokens > .token", state="attached")
        leave()
        page.wait_for_timeout(500)
        assert running_server.num_open == 0


def test_the_page_asks_nobody_else() -> None:
    """One file without addresses of others, that carries no style or script from elsewhere."""
    text = assembled("foredraft.serve", "page.html")
    assert "function marked(" in text
    assert ".branches {" in text
    assert re.findall(r"https?://|//cdn|@import|<link|src=", text) == []
    assert "function rendered(" in text
    assert "innerHTML" not in text


UNENDING = """() => {
  window.real = window.fetch;
  window.fetch = (url, options) => !url.includes("chat") ? window.real(url, options) : Promise.resolve(new Response(
    new ReadableStream({ start(stream) {
      const choice = { delta: { content: "word" }, draft: { sources: ["target"], rejected: [] } };
      stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify({ choices: [choice] })}\\n\\n`));
      options.signal.addEventListener("abort", () => stream.error(new DOMException("", "AbortError")));
    } })));
}"""
"""An answer of one word that does not end."""


def ask(page: Any, text: str, tokens: int = 8) -> None:
    page.locator("#tokens").fill(str(tokens))
    page.locator("#text").fill(text)
    page.keyboard.press("Enter")


@pytest.mark.full
def test_a_new_conversation_begins_with_nothing_of_the_one_before(page: Any) -> None:
    """The answer that "New" had stopped was its first message."""
    page.evaluate(UNENDING)
    ask(page, "Talk on and on")
    page.wait_for_selector(".tokens > .token", state="attached")
    page.locator("#reset").click()
    page.wait_for_selector("#send:text('Send')")
    page.evaluate("window.fetch = window.real")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Once more")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Once more"}]


@pytest.mark.full
def test_a_question_that_was_refused_can_be_changed(page: Any) -> None:
    """It stayed in the conversation, beside an empty answer, so that a question that was too long ended it for good."""
    long = "too long " * 60_000
    ask(page, long)
    page.wait_for_selector(".error:has-text('maximum context length')")
    assert page.locator("#text").input_value() == long.strip()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Short")
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["Short"]
    page.wait_for_selector(".tokens > .token", state="attached")
    page.wait_for_selector("#send:text('Send')")
    page.locator("#temperature").focus()
    ask_again = page.locator("#temperature")
    page.evaluate("document.getElementById('text').value = 'Again'; document.getElementById('form').requestSubmit()")
    page.wait_for_selector(":nth-match(.assistant, 3) + .told:has-text('tokens per step')")
    page.wait_for_selector("#send:text('Send')")
    assert ask_again.evaluate("one => one === document.activeElement"), "focus stays where the reader has it"


@pytest.mark.full
def test_what_a_proxy_says_is_told_and_names_come_once_there_are_some(browser: Any, running_server: Running) -> None:
    """A page that was opened while the model was loaded had no names until it was loaded again."""
    page = browser.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    loading = {"error": {"message": "the model is still being loaded"}}
    page.route("**/v1/models", lambda route: route.fulfill(status=503, json=loading))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=502, body="<html>Bad Gateway</html>"))
    page.goto(running_server.server.address)
    page.wait_for_selector("#model:text('still being loaded')")
    ask(page, "Hello")
    page.wait_for_selector(".error:text('502')")
    page.unroute("**/v1/models")
    page.unroute("**/v1/chat/completions")
    page.wait_for_selector("#name option", state="attached")
    assert faults == []
    page.close()


BURST = """() => {
  window.asked = 0;
  const height = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight").get;
  Object.defineProperty(document.body, "scrollHeight", { get() { window.asked += 1; return height.call(this); } });
  const choice = (text) => ({ delta: { content: text }, draft: { sources: ["target"], rejected: [] } });
  const told = (text) => `data: ${JSON.stringify({ choices: [choice(text)] })}\\n\\n`;
  const real = window.fetch;
  window.fetch = (url, options) => url.includes("chat") ? Promise.resolve(new Response(
    told("<img src=x onerror=alert(1)>\\n").repeat(2000) + "data: [DONE]\\n\\n")) : real(url, options);
}"""
"""An answer of two thousand tokens at once, which are markup; and how often the page is asked for its height."""


@pytest.mark.full
def test_a_long_answer_is_not_laid_out_for_every_token(page: Any) -> None:
    """Six thousand tokens held the page for more than half a minute."""
    page.evaluate(BURST)
    ask(page, "Talk on and on")
    page.wait_for_selector(".told:has-text('2000 tokens')")
    page.wait_for_selector("#send:text('Send')")
    assert page.evaluate("window.asked") < 200
    page.wait_for_timeout(200)
    assert page.evaluate("innerHeight + scrollY >= document.documentElement.scrollHeight - 80"), "the end is shown"
    assert page.locator("main img").count() == 0


MARKDOWN = """# Title

Some *italic*, **bold** and `a <b> *c*` of snake_case_name, 2 * 3 * 4 and <img src=x onerror=alert(1)>
  {"indent": 1}

- one
- two
  1. inner
  2. other

> quoted

***

```python
def f(x):
    return "<b>"
```
tail
```
open"""
RENDERED = (
    "<h3>Title</h3>"
    "<p>Some <em>italic</em>, <strong>bold</strong> and <code>a &lt;b&gt; *c*</code> of snake_case_name, 2 * 3 * 4 and "
    '&lt;img src=x onerror=alert(1)&gt;\n  {"indent": 1}</p>'
    '<ul><li><p>one</p></li><li><p>two</p><ol start="1"><li><p>inner</p></li><li><p>other</p></li></ol></li></ul>'
    "<blockquote><p>quoted</p></blockquote><hr>"
    '<pre tabindex="0" data-language="python"><code>def f(x):\n    return "&lt;b&gt;"</code></pre>'
    '<p>tail</p><pre tabindex="0"><code>open</code></pre>'
)
ANSWER = """([text, metrics]) => {
  const choices = text.split(/(?<=\\s)/).map((piece, place) => ({ delta: { content: piece },
    draft: { sources: [["target", "suffix", "medusa"][place % 3]], rejected: [] } }));
  const chunks = [...choices.map((choice) => ({ choices: [choice] })), { choices: [], metrics }];
  const real = window.fetch;
  window.fetch = (url, options) => url.includes("chat") ? Promise.resolve(new Response(
    chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\\n\\n`).join(""))) : real(url, options);
}"""
"""An answer with this text, from three sources, and these metrics."""


def counts(speedup: float | None) -> dict[str, Any]:
    governor = None if speedup is None else {"estimated_speedup": speedup, "decision": ""}
    found = {"tokens_per_step": 2.0, "method": "suffix", "lossless": True, "governor": governor}
    return {"speculative_decoding": found | {"exactness": {"kind": "up to rounding", "reason": ""}}}


@pytest.mark.full
def test_an_answer_is_rendered_and_its_markup_stays_text(touched: Any) -> None:
    touched.evaluate(ANSWER, [MARKDOWN, counts(1.37)])
    touched.locator("#examples button").first.click()
    touched.wait_for_selector(".again")
    assert touched.locator(".text").evaluate("one => one.innerHTML") == RENDERED
    assert touched.locator(".told:has(.speedup)").inner_text().startswith("1.4x plain, ")
    assert touched.locator(".told:has(.speedup)").inner_text().endswith("by suffix, lossless (up to rounding)")
    assert not touched.locator("#empty").is_visible()
    for text in (">" * 5000, "- " * 5000, "*" * 5000, "_a " * 5000, "`" * 5001, "1. a\n" * 3000):
        took = touched.evaluate(
            "text => { const t = performance.now(); rendered(text); return performance.now() - t; }", text
        )
        assert took < 2000, f"{text[:4]} took {took:.0f} ms"


@pytest.mark.full
def test_a_drafter_keeps_its_colour_and_the_server_may_not_know_the_speed(touched: Any) -> None:
    touched.evaluate(ANSWER, ["one two three four", counts(None)])
    for _ in range(2):
        touched.locator("#text").fill("Go")
        touched.locator("#send").click()
        touched.wait_for_selector("#send:text('Send')")
        touched.wait_for_selector(".exchange:last-child .again")
    assert touched.locator(".speedup").count() == 0
    for tokens in touched.get_by_role("button", name="Tokens").all():
        if tokens.get_attribute("aria-pressed") == "false":
            tokens.click()
    for legend in touched.locator(".legend").all():
        assert legend.locator("span").all_inner_texts() == ["the model itself 2", "suffix 1", "medusa 1"]
    classes = touched.locator(".tokens .token").evaluate_all("all => all.map(one => one.className)")
    assert classes[:4] == classes[4:]
    assert len(set(classes)) == 3


@pytest.mark.full
def test_an_answer_is_copied_and_written_again(touched: Any, running_server: Running) -> None:
    touched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    touched.evaluate(ANSWER, ["**one** two", counts(1.0)])
    for text in ("First", "Second"):
        touched.locator("#text").fill(text)
        touched.locator("#send").click()
        touched.wait_for_selector(f".exchange:has-text('{text}') .again", state="attached")
    assert touched.locator(".again:visible").count() == 1
    touched.get_by_role("button", name="Copy").last.click()
    touched.wait_for_selector("button:text('Copied')")
    assert touched.evaluate("navigator.clipboard.readText()") == "**one** two"
    touched.locator(".again:visible").click()
    touched.wait_for_selector(".again:visible")
    said = touched.evaluate("messages.map((message) => message.content)")
    assert said == ["First", "**one** two", "Second", "**one** two"]
    assert touched.locator(".user").all_inner_texts() == ["First", "Second"]


@pytest.mark.full
def test_fingers_find_targets_of_40_pixels(touched: Any) -> None:
    branch = {"source": "suffix", "text": "a long branch that leaves the window"}
    touched.evaluate(ANSWER, ["one two", counts(1.0)])
    touched.locator("#options").click()
    touched.locator("#text").fill("Go")
    touched.locator("#send").click()
    touched.wait_for_selector(".again")
    touched.get_by_role("button", name="Tokens").click()
    for target in touched.locator("button:visible, select:visible, input:visible, .row label:visible").all():
        box = target.bounding_box()
        assert box["height"] >= 40, target.inner_html()
    touched.evaluate(
        "branch => document.querySelector('.tokens').append(marked('x'.repeat(30), 'target', [branch]))", branch
    )
    refused = touched.locator(".refused")
    size = refused.evaluate("one => [getComputedStyle(one, '::after').width, getComputedStyle(one, '::after').height]")
    assert size == ["40px", "40px"]
    refused.tap()
    assert refused.locator(".branches").is_visible()
    box = refused.locator(".branches").bounding_box()
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
