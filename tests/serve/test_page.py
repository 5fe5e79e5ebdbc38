"""The page in a browser: a question, its stream, rejected branches, keyboard, reload, phones and themes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from foredraft.views.token_view import page as assembled
from serving import Running

SHOTS = Path(__file__).parents[2] / ".cache" / "page"


@pytest.mark.full
@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 1100), ("light", 390)])
def test_a_question_is_answered(browser: Any, running_server: Running, theme: str, width: int) -> None:
    page = browser.new_page(color_scheme=theme, viewport={"width": width, "height": 800})
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url) if "127.0.0.1" not in request.url else None)
    page.goto(running_server.server.address)
    page.wait_for_selector("#name option", state="attached")
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
    shown = page.eval_on_selector_all(
        ".assistant > .token", "all => all.map(one => one.firstChild?.nodeValue ?? '').join('')"
    )
    assert shown == expected["choices"][0]["message"]["content"]
    assert page.locator(".assistant > .drafted").count() > 0
    refused = page.locator(".refused").first
    for reveal in (refused.hover, refused.focus):
        page.locator("#text").focus()
        page.mouse.move(0, 0)
        assert not refused.locator(".branches").is_visible()
        reveal()
        assert refused.locator(".branches").is_visible()
        assert refused.locator(".branches").inner_text().strip()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.wait_for_selector("#figures:has-text('running')")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{theme}_{width}.png")
    assert faults == []
    page.close()


@pytest.mark.full
def test_a_reload_ends_the_stream_and_escape_stops_it(browser: Any, running_server: Running) -> None:
    page = browser.new_page()
    page.goto(running_server.server.address)
    page.wait_for_selector("#name option", state="attached")
    for leave in (lambda: page.keyboard.press("Escape"), page.reload):
        page.locator("#tokens").fill("1500")
        page.locator("#temperature").fill("1.5")
        page.locator("#text").fill("Talk on and on")
        page.keyboard.press("Enter")
        page.wait_for_selector(".assistant > .token")
        leave()
        page.wait_for_timeout(500)
        assert running_server.server.bridge._open == {}
    page.close()


def test_the_page_asks_nobody_else() -> None:
    """One file without addresses of others, that carries no style or script from elsewhere."""
    text = assembled("foredraft.serve", "page.html")
    assert "function marked(" in text
    assert ".branches {" in text
    assert re.findall(r"https?://|//cdn|@import|<link|src=", text) == []
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
def test_a_new_conversation_begins_with_nothing_of_the_one_before(browser: Any, running_server: Running) -> None:
    """The answer that "New" had stopped was its first message."""
    page = browser.new_page()
    page.goto(running_server.server.address)
    page.wait_for_selector("#name option", state="attached")
    page.evaluate(UNENDING)
    ask(page, "Talk on and on")
    page.wait_for_selector(".assistant > .token")
    page.locator("#reset").click()
    page.wait_for_selector("#send:text('Send')")
    page.evaluate("window.fetch = window.real")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Once more")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Once more"}]
    page.close()


@pytest.mark.full
def test_a_question_that_was_refused_can_be_changed(browser: Any, running_server: Running) -> None:
    """It stayed in the conversation, beside an empty answer, so that a question that was too long ended it for good."""
    page = browser.new_page()
    page.goto(running_server.server.address)
    page.wait_for_selector("#name option", state="attached")
    long = "too long " * 60_000
    ask(page, long)
    page.wait_for_selector(".error:has-text('maximum context length')")
    assert page.locator("#text").input_value() == long.strip()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Short")
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["Short"]
    page.wait_for_selector(".assistant > .token")
    page.wait_for_selector("#send:text('Send')")
    page.locator("#temperature").focus()
    ask_again = page.locator("#temperature")
    page.evaluate("document.getElementById('text').value = 'Again'; document.getElementById('form').requestSubmit()")
    page.wait_for_selector(":nth-match(.assistant, 3) + .told:has-text('tokens per step')")
    page.wait_for_selector("#send:text('Send')")
    assert ask_again.evaluate("one => one === document.activeElement"), "focus stays where the reader has it"
    page.close()


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
def test_a_long_answer_is_not_laid_out_for_every_token(browser: Any, running_server: Running) -> None:
    """Six thousand tokens held the page for more than half a minute."""
    page = browser.new_page()
    page.goto(running_server.server.address)
    page.wait_for_selector("#name option", state="attached")
    page.evaluate(BURST)
    ask(page, "Talk on and on")
    page.wait_for_selector(".told:has-text('2000 tokens')")
    page.wait_for_selector("#send:text('Send')")
    assert page.evaluate("window.asked") < 200
    page.wait_for_timeout(200)
    assert page.evaluate("innerHeight + scrollY >= document.documentElement.scrollHeight - 80"), "the end is shown"
    assert page.locator("main img").count() == 0
    page.close()
