"""The page of `mambakit serve` in headless Chromium, against a real server. make test-serving installs Chromium."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import wait_for

from .browser import CONTROL, Browser, Page, browser, chromium
from .servers import LONG, Running, make_run, serving

FIRST, SECOND = ".output:nth-of-type(1)", ".output:nth-of-type(2)"
KEY = "open sesame"
PROMPT = "the cat sat on"
REFUSED = "Failed to load resource: the server responded with a status of"  # said by Chromium itself, of every 4xx
Opened = Callable[..., Page]


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None and "MAMBAKIT_CHROMIUM" not in os.environ:
        pytest.skip("needs Chromium, which make test-serving installs")
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints."""
    return make_run(tmp_path_factory.mktemp("runs") / "story", 2)


@pytest.fixture(scope="module")
def server(story: Path) -> Iterator[Running]:
    with serving(story) as running:
        yield running


@pytest.fixture
def opened(chrome: Browser, server: Running) -> Iterator[Opened]:
    """Pages, of this server or another. None may complain, or ask another host for anything."""
    pages: list[Page] = []

    def open_page(of: Running = server, **options: Any) -> Page:
        pages.append(chrome.open(f"{of.address}/", **options))
        return pages[-1]

    yield open_page
    for page in pages:
        assert [line for line in page.complaints if not line.startswith(REFUSED)] == []
        assert page.requests and all(request.startswith(page.address) for request in page.requests), page.requests
        page.close()


def with_models(page: Page) -> Page:
    page.wait("!document.querySelector('select').disabled")
    return page


def set_numbers(page: Page, **numbers: float | str) -> None:
    for name, value in numbers.items():
        page.type(f"#{name}", str(value))


def is_running(page: Page) -> bool:
    return bool(page.value("!document.querySelector('#stop').disabled"))


def wait_until_done(page: Page) -> None:
    wait_for(lambda: not is_running(page))


def run(page: Page) -> None:
    page.click("#run")
    wait_until_done(page)


def stat(page: Page, name: str, output: str = FIRST) -> str:
    return page.text(f"{output} [data-stat={name}]")


def new_text(page: Page, output: str = FIRST) -> str:
    text: str = page.value(f"document.querySelector('{output} .new').textContent")
    return text


def test_text_appears_while_it_is_generated(opened: Opened, server: Running) -> None:
    page = with_models(opened())
    page.type("#prompt", PROMPT)
    set_numbers(page, temperature=0, top_p=1, max_tokens=5000, seed=3)
    page.value("document.querySelector('#prompt').focus()")
    page.press("Enter", CONTROL)
    lengths = []
    while is_running(page):
        lengths.append(len(new_text(page)))
    assert len(set(lengths)) > 5 and lengths == sorted(lengths)
    assert page.text(f"{FIRST} .given") == PROMPT
    assert new_text(page) == server.text(prompt=PROMPT, temperature=0, max_tokens=5000)
    assert stat(page, "tokens") == "5000" and stat(page, "finish") == "token limit" and stat(page, "seed") == "3"
    assert float(stat(page, "rate")) > 0 and stat(page, "first").endswith("s")
    colors = [
        page.value(f"getComputedStyle(document.querySelector('{FIRST} {part}')).color") for part in (".given", ".new")
    ]
    assert colors[0] != colors[1]


def test_stop_ends_the_stream_and_frees_the_slot(opened: Opened, server: Running) -> None:
    page = with_models(opened())
    cancelled = server.metric("cancelled_sequences_total")
    for stop in (lambda: page.click("#stop"), lambda: page.press("Escape")):
        page.type("#prompt", PROMPT)
        set_numbers(page, temperature=0, max_tokens=LONG)
        page.click("#run")
        page.wait(f"document.querySelector('{FIRST} .new').textContent.length > 20")
        assert server.num_running() == 1
        stop()
        wait_until_done(page)
        assert stat(page, "finish") == "stopped" and stat(page, "tokens").startswith("≈")
        wait_for(lambda: server.num_running() == 0, 5)
        cancelled += 1
        assert server.metric("cancelled_sequences_total") == cancelled
    set_numbers(page, max_tokens=5)
    run(page)
    assert stat(page, "tokens") == "5"


def test_two_checkpoints_beside_each_other(opened: Opened, server: Running) -> None:
    page = with_models(opened())
    assert not page.value(f"document.querySelector('{SECOND}').checkVisibility()")
    page.click("#compare")
    chosen = ["story/step_00000002", "story/step_00000001"]
    page.choose(f"{FIRST} select", chosen[0])
    assert page.value(f"document.querySelector('{SECOND} select').value") == chosen[1]
    assert page.text(f"{SECOND} select option:checked") == "step_00000001"
    page.type("#prompt", PROMPT)
    set_numbers(page, temperature=1, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, max_tokens=40)
    run(page)
    assert stat(page, "seed") == stat(page, "seed", SECOND) and stat(page, "seed").isdigit()
    set_numbers(page, seed=7)
    run(page)
    asked = {"prompt": PROMPT, "temperature": 1, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
    texts = [server.text(model=name, **asked, max_tokens=40, seed=7) for name in chosen]
    assert [new_text(page), new_text(page, SECOND)] == texts and texts[0] != texts[1]
    places = "[first, second] = [...document.querySelectorAll('.output')].map(part => part.getBoundingClientRect())"
    assert page.value(f"{places}, first.right < second.left && first.top === second.top")
    page.resize(400, 800)
    page.wait(f"{places}, first.bottom < second.top && first.left === second.left")


def test_what_the_server_refuses_is_said_in_its_words(opened: Opened, server: Running) -> None:
    page = with_models(opened())
    set_numbers(page, max_tokens=LONG + 1)
    run(page)
    assert str(LONG) in page.text(f"{FIRST} .error") and stat(page, "finish") == "error"
    set_numbers(page, temperature=0, max_tokens=3)
    run(page)  # an empty prompt starts a new text
    assert not page.value(f"document.querySelector('{FIRST} .error').checkVisibility()")
    assert stat(page, "tokens") == "3"


def test_a_number_that_cannot_be_is_not_sent(opened: Opened) -> None:
    page = with_models(opened(width=400))
    page.click("summary")
    set_numbers(page, top_p=1.5)
    page.click("summary")
    page.click("#run")
    assert not is_running(page) and page.value("document.activeElement.id") == "top_p"
    assert not any("completions" in request for request in page.requests)


def test_a_server_that_has_gone_is_said(chrome: Browser, story: Path) -> None:
    with serving(story, grace=1.0) as gone:
        page = with_models(chrome.open(f"{gone.address}/"))
        set_numbers(page, temperature=0, max_tokens=LONG)
        page.click("#run")
        page.wait(f"document.querySelector('{FIRST} .new').textContent.length > 20")
    wait_until_done(page)
    assert page.text(f"{FIRST} .error") == "The connection ended before the text did."
    assert len(new_text(page)) > 20 and stat(page, "finish") == "error"
    run(page)
    assert page.text(f"{FIRST} .error") == "The server does not answer. Is it still running?"
    page.close()


def test_markup_is_shown_as_text(opened: Opened) -> None:
    page = with_models(opened())
    markup = "<img src=nowhere onerror='document.title = 1'><b>&amp;"
    page.type("#prompt", markup)
    set_numbers(page, max_tokens=1)
    run(page)
    assert page.text(f"{FIRST} .given") == markup
    assert page.value(f"document.querySelectorAll('{FIRST} .text *').length") == 3


def test_prompt_and_settings_survive_a_reload(opened: Opened) -> None:
    page = with_models(opened())
    page.type("#prompt", "line one\nline two")
    set_numbers(page, temperature=1.3, max_tokens=7, seed=11)
    page.value("document.querySelector('#top_k + input').focus()")
    for _ in range(3):
        page.press("ArrowRight")  # the slider
    page.click("#compare")
    page.choose(f"{SECOND} select", "story/step_00000002")
    page.load()
    with_models(page)
    values = page.value("[...document.querySelectorAll('#prompt, [type=number]')].map(field => field.value)")
    assert values == ["line one\nline two", "1.3", "0.95", "3", "0", "1", "7", "11"]
    assert page.value("document.querySelector('#top_k + input').value") == "3"
    assert page.value("document.querySelector('#compare').checked")
    assert page.value(f"document.querySelector('{SECOND} select').value") == "story/step_00000002"
    page.click("#reset")
    assert page.value("document.querySelector('#temperature').value") == "0.8"


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(opened: Opened, story: Path) -> None:
    with serving(story, api_key=KEY) as locked:
        page = opened(locked)
        page.wait("document.querySelector('#key').checkVisibility()")
        assert page.text("#server") == "This server asks for an API key."
        page.type("#key", "wrong")
        page.press("Enter")
        page.wait("document.querySelector('#server').textContent === 'The server does not accept this API key.'")
        page.type("#key", KEY)
        page.press("Enter")
        with_models(page)
        assert not page.value("document.querySelector('#key').checkVisibility()")
        set_numbers(page, temperature=0, max_tokens=2)
        run(page)
        assert stat(page, "tokens") == "2"
        page.load()
        with_models(page)
        assert KEY not in page.value("JSON.stringify(localStorage) + document.cookie")


@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_window_is_never_scrolled_sideways(opened: Opened, dark: bool) -> None:
    page = with_models(opened(width=360, height=640, dark=dark))
    assert not page.value("document.querySelector('#settings').open")
    page.click("summary")
    set_numbers(page, max_tokens=200, temperature=0)
    page.click("#compare")
    page.type("#prompt", "endless" * 60)
    run(page)
    assert len(new_text(page, SECOND)) > 20
    assert page.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    outside = """[...document.querySelectorAll('body *')].filter(part => part.checkVisibility() && part.id !== 'announce')
        .filter(part => part.getBoundingClientRect().right > document.documentElement.clientWidth).map(part => part.outerHTML)"""
    assert page.value(outside) == []


def test_everything_can_be_reached_by_keyboard_and_has_a_name(opened: Opened) -> None:
    page = with_models(opened())
    page.click("#compare")
    page.type("#prompt", PROMPT)
    set_numbers(page, max_tokens=2)
    run(page)
    page.value("document.querySelector('#prompt').focus()")
    reached = []
    for _ in range(40):
        page.press("Tab")
        reached.append(
            page.value("[document.activeElement.tagName, document.activeElement.id, document.activeElement.type]")
        )
    controls = page.value("""[...document.querySelectorAll('button, input, select, textarea, summary, .text')]
        .filter(part => part.checkVisibility() && !part.disabled).map(part => [part.tagName, part.id, part.type])""")
    assert [part for part in controls if part not in reached and part[1] != "prompt"] == []
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "slider", "spinbutton", "combobox", "textbox", "switch", "region", "article"}
    found = [(node["role"]["value"], node["name"]["value"]) for node in nodes if "name" in node]
    found = [(role, name) for role, name in found if role in named]
    assert {role for role, _ in found} == named and all(name for _, name in found), found


@pytest.mark.parametrize("allowed", [["clipboardReadWrite", "clipboardSanitizedWrite"], ["clipboardReadWrite"]])
def test_copy_takes_prompt_and_new_text(opened: Opened, chrome: Browser, allowed: list[str]) -> None:
    page = with_models(opened())
    page.type("#prompt", PROMPT)
    set_numbers(page, temperature=0, max_tokens=8)
    run(page)
    chrome.call("Browser.grantPermissions", permissions=allowed, browserContextId=page.context)
    page.click(f"{FIRST} .copy")
    page.wait(f"document.querySelector('{FIRST} .copy').textContent === 'Copied'")
    assert page.value("navigator.clipboard.readText()") == PROMPT + new_text(page)
