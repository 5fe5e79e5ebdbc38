"""The page in a browser: a question, its stream, rejected branches, keyboard, reload, phones and themes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from foretoken.views.page import page as assembled
from serving import Running

SHOTS = Path(__file__).parents[2] / ".cache" / "page"


@pytest.mark.slow
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


@pytest.mark.slow
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
    text = assembled("foretoken.serve", "page.html")
    assert "function marked(" in text
    assert ".branches {" in text
    assert re.findall(r"https?://|//cdn|@import|<link|src=", text) == []
    assert "innerHTML" not in text
