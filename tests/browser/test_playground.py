"""The playground in a headless browser, with `txl serve` of the small run."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("playwright", reason="make test-browser installs playwright for these tests")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")

from playwright.sync_api import Browser, Dialog, Locator, Page, expect, sync_playwright  # pyright: ignore[reportMissingImports]

from tests.serving.conftest import wait_for
from tests.serving.test_command import process

PATIENCE = 60_000
"""Longest wait in milliseconds, enough for a busy machine."""
PROMPT = "12. The river rose"
LEVELS = (1, 2, 4, 6, 9)
expect.set_options(timeout=PATIENCE)


class Server:
    """The API of `txl serve` in a separate process, which the page uses too."""

    def __init__(self, url: str, key: str):
        self.url, self.api = url, httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"})

    def post(self, path: str, **fields: Any) -> Any:
        answer = self.api.post(path, json=fields)
        assert answer.is_success, answer.text
        return answer.json()

    def streams(self) -> list[dict[str, Any]]:
        return self.api.get("/v1/streams").json()["data"]


@contextmanager
def serving(run: Path, *options: str) -> Iterator[Server]:
    with process(run, *options) as (_, url):
        yield Server(url, options[-1] if "--api-key" in options else "none")


@pytest.fixture(scope="module")
def server(trained) -> Iterator[Server]:
    with serving(trained) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses root, the usual user of a container.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield found
        found.close()


class Tab:
    """Page in a browser tab, with the actions of a reader; records errors, and requests to other servers."""

    def __init__(self, page: Page, url: str):
        self.page, self.errors, self.foreign = page, [], []
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dismiss)
        page.on(
            "request",
            lambda request: None if request.url.startswith((url, "data:")) else self.foreign.append(request.url),
        )
        page.goto(url)
        self.text = page.locator("#tokens")
        self.tokens = page.locator(".t")
        self.draft = page.get_by_label("Your text")
        self.status = page.get_by_role("status")
        self.error = page.locator("#error")
        self.details = page.get_by_role("region", name="Token", exact=True)
        self.others = self.details.get_by_role("list", name="Alternatives").get_by_role("button")
        self.another = self.details.locator("button.other:not([aria-current])").first
        self.branches = page.get_by_role("navigation", name="Branches")

    def _dismiss(self, dialog: Dialog) -> None:
        self.errors.append(dialog.message)
        dialog.dismiss()

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def ready(self) -> Tab:
        expect(self.page.get_by_role("heading", level=1)).to_have_text("small")
        return self

    def settings(self, count: int, seed: int | None = 7, attention: bool = True) -> None:
        self.page.get_by_label("tokens", exact=True).fill(str(count))
        panel = self.page.locator("#settings")
        if panel.get_attribute("open") is None:
            panel.locator("summary").click()
        self.page.get_by_label("Seed").fill("" if seed is None else str(seed))
        self.page.get_by_label("Watch attention").set_checked(attention)

    def done(self) -> None:
        expect(self.status).to_have_text(re.compile("Done"))
        expect(self.button("Continue")).to_be_enabled()

    def begin(self, text: str, count: int, seen: int = 0, **settings: Any) -> None:
        """Ask for a continuation, and wait until `seen` tokens are on the page."""
        self.settings(count, **settings)
        self.draft.fill(text)
        self.button("Continue").click()
        if seen:
            expect(self.tokens.nth(seen)).to_be_attached()

    def go_on(self, text: str, count: int, **settings: Any) -> None:
        self.begin(text, count, **settings)
        self.done()

    def choose(self, other: Locator | None = None) -> None:
        """Choose an alternative of the token that is shown, and wait for its branch."""
        (other or self.another).click()
        expect(self.branches).to_be_visible()
        self.done()

    def shown(self) -> str:
        """Return the text on the page."""
        return self.text.text_content() or ""

    def no_errors(self, *expected: str) -> None:
        """Fail on requests to other servers and on errors, except the expected errors, which must all have occurred."""
        assert self.foreign == []
        left = [error for error in self.errors if not any(known in error for known in expected)]
        assert left == []
        for known in expected:
            assert any(known in error for error in self.errors), known
        self.errors.clear()


@pytest.fixture
def tab_at(browser):
    """Function that opens pages; the test fails at its end if a page has an error that was not expected."""
    opened: list[Tab] = []

    def open_tab(url: str, **context: Any) -> Tab:
        tab = Tab(browser.new_context(**context).new_page(), url)
        opened.append(tab)
        return tab

    yield open_tab
    for tab in opened:
        tab.page.context.close()
    for tab in opened:
        tab.no_errors()


@pytest.fixture
def tab(tab_at, server) -> Tab:
    return tab_at(server.url).ready()


def whole(server: Server, prompt: str, count: int, seed: int = 7) -> tuple[str, list[dict[str, Any]], str]:
    """Return the text, tokens and stream id that the API returns for the requests of the page."""
    stream = server.post("/v1/streams", seed=seed)["id"]
    read = server.post(f"/v1/streams/{stream}/append", text=prompt, logprobs=8, attention=True)
    made = server.post(f"/v1/streams/{stream}/generate", max_tokens=count, logprobs=8, attention=True)
    return prompt + made["text"], read["tokens"] + made["tokens"], stream


def test_a_text_is_continued_and_coloured_by_surprisal(server, tab):
    text, tokens, _ = whole(server, PROMPT, 40)
    tab.go_on(PROMPT, 40)
    assert tab.shown() == text
    classes = tab.tokens.evaluate_all("spans => spans.map((span) => [...span.classList])")
    assert len(classes) == len(tokens)
    for token, names in zip(tokens, classes, strict=True):
        surprisal = token["surprisal"]
        level = 0 if surprisal is None else sum(surprisal >= bits for bits in LEVELS)
        assert f"s{level}" in names
        assert token["source"] in names
    assert len({name for names in classes for name in names if re.fullmatch(r"s\d", name)}) >= 3
    colours = tab.page.locator("#legend li").evaluate_all(
        "all => all.map((each) => getComputedStyle(each).backgroundColor)"
    )
    assert len(set(colours)) == len(LEVELS) + 1
    expect(tab.page.locator("#speed")).to_have_text(re.compile(r"^40 tokens at \d+(\.\d)? a second$"))
    assert tab.draft.input_value() == ""
    tab.no_errors()


def test_going_on_twice_is_the_text_of_going_on_once(server, tab):
    text, _, _ = whole(server, PROMPT, 40)
    tab.go_on(PROMPT, 15)
    tab.go_on("", 25)
    assert tab.shown() == text


def test_the_strip_tells_attention_and_bits_per_character(server, tab):
    _, tokens, stream = whole(server, PROMPT, 40)
    tab.go_on(PROMPT, 40)
    last = tokens[-1]["attention"]
    expect(tab.page.locator("#reach")).to_have_text(f"mean {last['mean']:.1f}, 90% within {last['reach']}")
    found = server.api.get(f"/v1/streams/{stream}").json()
    expected = f"{found['bits_per_character']:.2f} over {found['characters']} characters"
    expect(tab.page.locator("#bits")).to_have_text(expected)
    for name in ("memory", "compression"):
        colours = tab.page.locator(f"#{name}").evaluate(
            "canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size"
        )
        assert colours > 5


def test_alternatives_are_those_of_the_model(server, tab):
    _, tokens, _ = whole(server, PROMPT, 20)
    tab.go_on(PROMPT, 20)
    place = len(PROMPT) + 6
    expect(tab.details).to_be_hidden()
    tab.tokens.nth(place).hover()
    expect(tab.details).to_be_visible()
    token = tokens[place]
    listed = {token["id"]: token, **{other["id"]: other for other in token["top"]}}
    expect(tab.others).to_have_count(len(listed))
    part = 2.718281828459045 ** token["top"][0]["logprob"]
    expect(tab.others.first).to_contain_text(f"{100 * part:.0f}%" if part >= 0.0995 else f"{100 * part:.1f}%")
    expect(tab.details).to_contain_text(f"{token['surprisal']:.2f} bits, rank {token['rank']}")
    expect(tab.details).to_contain_text(f"90% within {token['attention']['reach']} tokens")
    tab.page.mouse.move(2, 2)
    expect(tab.details).to_be_hidden()


def test_an_alternative_makes_a_branch_that_goes_on_as_the_api_does(server, tab):
    text, tokens, stream = whole(server, PROMPT, 30)
    tab.go_on(PROMPT, 30)
    place = len(PROMPT) + 10
    token = tokens[place]
    number, other = next((n, other) for n, other in enumerate(token["top"]) if other["id"] != token["id"])
    twin = server.post(f"/v1/streams/{stream}/fork", at=place, token=other["id"], seed=7)["id"]
    made = server.post(f"/v1/streams/{twin}/generate", max_tokens=30)["text"]
    before = "".join(token["piece"] for token in tokens[:place])
    tab.tokens.nth(place).click()
    tab.choose(tab.others.nth(number))
    expected = (before.encode() + bytes(other["bytes"])).decode() + made
    assert tab.shown() == expected
    assert tab.branches.get_by_role("button").count() == 3
    tab.branches.get_by_role("button").first.click()
    assert tab.shown() == text
    tab.branches.get_by_role("button").last.click()
    assert tab.shown() == expected
    tab.button("Delete branch 2").click()
    expect(tab.branches).to_be_hidden()
    assert tab.shown() == text


def test_drawing_again_keeps_what_stands_before(server, tab):
    tab.go_on(PROMPT, 30, seed=None)
    old = tab.shown()
    tab.tokens.nth(len(PROMPT) + 2).click()
    tab.choose(tab.button("Draw again from here"))
    assert tab.shown() != old
    assert tab.shown().startswith(PROMPT)
    assert tab.tokens.count() == len(PROMPT) + 2 + 30


def test_stop_works_at_once_and_nothing_goes_on(server, tab):
    tab.begin(PROMPT, 60_000, seen=len(PROMPT) + 20)
    began = time.perf_counter()
    tab.button("Stop").click()
    expect(tab.status).to_have_text("Stopped")
    assert time.perf_counter() - began < 2
    expect(tab.button("Continue")).to_be_enabled()
    count = tab.tokens.count()
    wait_for(lambda: not any(stream["busy"] for stream in server.streams()), 10)
    assert tab.tokens.count() == count
    old = tab.shown()
    tab.go_on("", 10)
    assert tab.shown().startswith(old)
    assert tab.tokens.count() == count + 10
    assert count + 10 in [stream["tokens"] for stream in server.streams()]


def test_stop_needs_no_second_stream(trained, tab_at):
    with serving(trained, "--max-kept", "1") as server:
        tab = tab_at(server.url).ready()
        tab.begin(PROMPT, 60_000, seen=len(PROMPT) + 20)
        tab.button("Stop").click()
        expect(tab.status).to_have_text("Stopped")
        count = tab.tokens.count()
        tab.go_on("", 10)
        assert tab.tokens.count() == count + 10
        assert [stream["tokens"] for stream in server.streams()] == [count + 10]
        tab.errors = [each for each in tab.errors if "429" not in each]  # occurs if the server was ahead of the page


def test_escape_stops_too(tab):
    tab.settings(60_000)
    tab.draft.fill(PROMPT)
    tab.draft.press("Control+Enter")
    expect(tab.tokens.nth(len(PROMPT) + 5)).to_be_attached()
    tab.page.keyboard.press("Escape")
    expect(tab.status).to_have_text("Stopped")


def test_an_alternative_chosen_while_text_comes_stops_it(server, tab):
    tab.begin(PROMPT, 60_000, seen=len(PROMPT) + 20)
    tab.page.get_by_label("tokens", exact=True).fill("10")
    tab.tokens.nth(5).click()
    tab.choose()
    assert tab.tokens.count() == 5 + 1 + 10


def test_the_key_is_asked_for_and_sent_as_a_header(trained, tab_at):
    with serving(trained, "--api-key", "open sesame") as server:
        tab = tab_at(server.url)
        sent: list[tuple[str, str | None]] = []
        tab.page.on("request", lambda request: sent.append((request.url, request.headers.get("authorization"))))
        field = tab.page.get_by_label("API key", exact=True)
        expect(field).to_be_focused()
        field.fill("wrong")
        tab.button("Use it").click()
        expect(tab.page.get_by_role("dialog")).to_contain_text("not accepted")
        field.fill("open sesame")
        field.press("Enter")
        tab.ready()
        tab.go_on(PROMPT, 5)
        assert tab.tokens.count() == len(PROMPT) + 5
        assert sent[-1][1] == "Bearer open sesame"
        assert all("sesame" not in url for url, _ in sent)
        assert tab.page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        tab.page.reload()
        tab.ready()
        tab.no_errors("401")


def test_without_the_key_one_line_says_so(trained, tab_at):
    with serving(trained, "--api-key", "open sesame") as server:
        tab = tab_at(server.url)
        tab.button("Cancel").click()
        expect(tab.error).to_have_text("The server wants its API key.")
        tab.draft.fill(PROMPT)
        tab.button("Continue").click()
        tab.page.get_by_label("API key", exact=True).fill("open sesame")
        tab.button("Use it").click()
        tab.done()
        expect(tab.error).to_be_hidden()
        tab.no_errors("401")


def test_a_full_server_is_one_line_and_the_text_is_kept(trained, tab_at):
    with serving(trained, "--max-kept", "1") as server:
        stream = server.post("/v1/streams")["id"]
        tab = tab_at(server.url).ready()
        tab.begin(PROMPT, 5)
        expect(tab.error).to_have_text(
            re.compile(r"^The server is busy: 1 streams are kept already; .* try again in \d+ seconds\.$")
        )
        assert tab.draft.input_value() == PROMPT
        server.api.delete(f"/v1/streams/{stream}")
        tab.button("Continue").click()
        tab.done()
        expect(tab.error).to_be_hidden()
        tab.no_errors("429")


def test_a_refusal_is_told_in_the_servers_words(trained, tab_at):
    with serving(trained, "--max-prompt", "20") as server:
        tab = tab_at(server.url).ready()
        tab.draft.fill("x" * 30)
        tab.button("Continue").click()
        expect(tab.error).to_have_text(re.compile("^The server refused: .*30 tokens"))
        assert tab.draft.input_value() == "x" * 30
        tab.no_errors("400")


def test_a_lost_server_is_one_line_and_a_new_one_goes_on(trained, tab_at):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(trained, "--port", str(port)) as first:
        tab = tab_at(first.url).ready()
        tab.begin(PROMPT, 60_000, seen=len(PROMPT) + 10)
    expect(tab.error).to_have_text("The connection to the server was lost; what came until then is kept.")
    count, old = tab.tokens.count(), tab.shown()
    tab.button("Continue").click()
    expect(tab.error).to_have_text("The server does not answer. Is it still running?")
    with serving(trained, "--port", str(port)) as second:
        tab.go_on("", 10)
        expect(tab.error).to_be_hidden()
        assert tab.tokens.count() == count + 10
        assert tab.shown().startswith(old)
        assert [stream["tokens"] for stream in second.streams()] == [count + 10]
        tab.no_errors("ERR_", "404")


@pytest.mark.parametrize("width", [320, 360, 1100])
def test_nothing_is_wider_than_the_screen(server, tab_at, width):
    tab = tab_at(server.url, viewport={"width": width, "height": 740}, has_touch=True).ready()

    def fits() -> bool:
        return tab.page.evaluate("document.documentElement.scrollWidth") <= width

    assert fits()
    tab.go_on("W" * 400 + "\n" + PROMPT, 20)
    assert fits()
    tab.tokens.nth(410).tap()
    expect(tab.details).to_be_visible()
    box = tab.details.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    tab.another.tap()
    expect(tab.branches).to_be_visible()
    tab.done()
    assert fits()
    box = tab.page.locator("#page").bounding_box()
    assert box is not None
    assert box["height"] > 150


def _luminance(colour: str) -> float:
    parts = [float(value) / 255 for value in re.findall(r"[\d.]+", colour)[:3]]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_every_colour(server, tab_at, scheme):
    tab = tab_at(server.url, color_scheme=scheme).ready()
    paper = _luminance(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert paper > 0.8 if scheme == "light" else paper < 0.05
    pairs = tab.page.locator("#legend li, button, #about, #draft, summary").evaluate_all(
        """all => all.filter((each) => !each.disabled).map((each) => {
          let at = each;
          while (getComputedStyle(at).backgroundColor === "rgba(0, 0, 0, 0)") at = at.parentElement;
          return [getComputedStyle(each).color, getComputedStyle(at).backgroundColor];
        })"""
    )
    assert len(pairs) > 8
    for ink, paper in pairs:
        high, low = sorted((_luminance(ink), _luminance(paper)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)


def test_all_of_it_works_from_the_keyboard(tab):
    page, press = tab.page, tab.page.keyboard.press
    expect(tab.draft).to_be_focused()
    page.keyboard.type(PROMPT)
    press("Control+Enter")
    tab.done()
    old = tab.shown()
    expect(tab.draft).to_be_focused()
    press("Shift+Tab")
    expect(tab.tokens.last).to_be_focused()
    assert tab.tokens.last.evaluate("span => getComputedStyle(span).outlineStyle") == "solid"
    press("Home")
    expect(tab.tokens.first).to_be_focused()
    for _ in range(4):
        press("ArrowRight")
    press("ArrowDown")
    press("ArrowUp")
    press("ArrowLeft")
    focused = page.locator(".t:focus")
    expect(focused).to_have_attribute("aria-label", re.compile(r"bits, rank \d+, probability"))
    expect(tab.details).to_be_visible()
    press("Enter")
    expect(tab.others.first).to_be_focused()
    press("ArrowDown")
    expect(tab.others.nth(1)).to_be_focused()
    press("Escape")
    expect(tab.details).to_be_hidden()
    expect(focused).to_have_count(1)
    press("Enter")
    if tab.others.first.get_attribute("aria-current"):
        press("ArrowDown")
    press("Enter")
    expect(tab.branches).to_be_visible()
    tab.done()
    assert tab.shown() != old
    press("Tab")
    expect(page.locator(".t:focus")).to_have_count(1)


def test_many_tokens_stay_fast_and_the_oldest_lose_their_colour(server, tab):
    tab.settings(300, attention=False)
    lines = "".join(f"{number}. The river rose.\n" for number in range(130))
    tab.page.evaluate(
        """() => {
          let last = performance.now();
          window.longest = 0;
          setInterval(() => { window.longest = Math.max(window.longest, performance.now() - last); last = performance.now(); }, 20);
        }"""
    )
    tab.draft.fill(lines)
    tab.button("Continue").click()
    tab.done()
    assert tab.tokens.count() <= 2250
    n_token = len(lines) + 300
    assert n_token in [stream["tokens"] for stream in server.streams()]
    assert tab.page.evaluate("window.longest") < 2000
    assert tab.shown().startswith(lines)
    blocks = tab.text.locator("> *").evaluate_all("all => all.map((each) => [each.className, each.textContent])")
    assert all(text.endswith("\n") for name, text in blocks[:-1])
    assert blocks[0][0] == "plain"
    tab.draft.press_sequentially("still quick", timeout=5000)
    tab.go_on("!", 5)
    assert tab.shown().startswith(lines)


def test_a_long_text_is_read_without_its_first_tokens_being_shown(server, tab):
    text = "".join(f"{number}. The river rose; é.\n" for number in range(500))
    tab.begin(text, 0, attention=False)
    expect(tab.text).to_have_text(text, use_inner_text=False)
    expect(tab.button("Continue")).to_be_enabled()
    expect(tab.error).to_be_hidden()
    assert tab.shown() == text
    assert tab.draft.input_value() == ""
    found = next(stream for stream in server.streams() if stream["tokens"] == len(text.encode()))
    expected = f"{found['bits_per_character']:.2f} over {found['characters']:,} characters"
    expect(tab.page.locator("#bits")).to_have_text(expected)
    tab.page.get_by_label("tokens", exact=True).fill("5")
    tab.tokens.nth(3).click()  # too far back for a fork on the server: the text is read again
    tab.choose()
    assert text.startswith(tab.shown()[:-40])


def test_markup_is_text(tab):
    text = "<img src=x onerror=alert(1)><b>no</b>&lt;<script>alert(2)</script>"
    tab.go_on(text, 10)
    assert tab.shown().startswith(text)
    assert tab.text.locator("img, b, script").count() == 0
    tab.tokens.nth(0).click()
    expect(tab.details.get_by_role("heading")).to_have_text("<")
    tab.tokens.nth(text.index("&")).click()
    expect(tab.details.get_by_role("heading")).to_have_text("&")
    tab.choose(tab.button("Draw again from here"))
    assert tab.page.locator("main img, main script, nav img").count() == 0


def test_white_space_and_parts_of_characters_can_be_seen(tab):
    tab.settings(0)
    text = "a \n\té“x"
    tab.draft.fill(text)
    tab.button("Continue").click()
    expect(tab.tokens).to_have_count(len(text.encode()))
    expect(tab.button("Continue")).to_be_enabled()
    assert tab.shown() == text
    for place, name in ((1, "␣"), (2, "↵"), (3, "⇥"), (4, "\\xc3"), (5, "\\xa9")):
        tab.tokens.nth(place).click()
        expect(tab.details.get_by_role("heading")).to_have_text(name)
        tab.page.keyboard.press("Escape")
    assert tab.tokens.nth(2).evaluate("span => getComputedStyle(span, '::before').content") == '"↵"'
    parts = tab.page.locator(".part")
    assert parts.count() == 3
    assert parts.first.bounding_box()["width"] > 4


def test_text_can_be_edited_or_begun_anew_and_no_stream_is_left(server, trained, tab_at):
    with serving(trained) as alone:
        tab = tab_at(alone.url).ready()
        tab.go_on(PROMPT, 10)
        text = tab.shown()
        tab.button("Edit text").click()
        expect(tab.draft).to_have_value(text)
        expect(tab.text).to_be_hidden()
        tab.go_on("other", 5)
        tab.button("New text").click()
        expect(tab.draft).to_have_value("")
        tab.go_on("third", 5)
        tab.page.goto("about:blank")
        wait_for(lambda: not alone.streams(), 10)


def test_wrong_settings_are_not_sent(tab):
    tab.settings(10)
    tab.page.get_by_label("Top-p").fill("1.5")
    tab.draft.fill(PROMPT)
    tab.button("Continue").click()
    expect(tab.page.get_by_label("Top-p")).to_be_focused()
    assert tab.tokens.count() == 0
