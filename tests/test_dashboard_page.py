"""The dashboard's page in headless Chromium; skipped where there is none (Debian: `apt-get install chromium`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outrider.server.settings import Keys
from serving import Running, change_modes, serving, settled, tiny_engine

sync_api = pytest.importorskip("playwright.sync_api", reason="the page tests need the package playwright")
CHROMIUM = os.environ.get("OUTRIDER_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: install one, or name it in OUTRIDER_CHROMIUM")

KEY = "secret-of-the-tests"
EVIL = "<img src=x onerror=\"document.title='broken'\">"
WAIT = 60_000  # ms, for what happens by itself

# The least contrast of any text that is shown, and where: WCAG 2.1, section 1.4.3.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let least = { ratio: 21, text: "" };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !node.checkVisibility() || node.matches("noscript, option, :disabled")) continue;
    const grounds = [];
    for (let up = node; up; up = up.parentElement) grounds.unshift(getComputedStyle(up).backgroundColor);
    const style = getComputedStyle(node);
    const ground = over(["white", ...grounds]);
    const ink = over(["white", ...grounds, node instanceof SVGElement ? style.fill : style.color]);
    const [low, high] = [light(ground), light(ink)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < least.ratio) least = { ratio, text, colours: [ink, ground] };
  }
  return least;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(tiny_engine(vocabulary=300, template="{{ messages[0]['content'] }}")) as running:
        yield running
        settled(running)


@contextmanager
def opened(browser: Any, running: Running, **options: Any) -> Iterator[Any]:
    """The page in a context of its own. Whatever it fetches from elsewhere, or complains about, fails the test."""
    context = browser.new_context(**options)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    blocked = "Content Security Policy"
    page.on("console", lambda message: wrong.append(message.text) if blocked in message.text else None)
    page.on("request", lambda request: None if request.url.startswith(running.url) else wrong.append(request.url))
    page.set_default_timeout(WAIT)
    page.goto(running.url)
    yield page
    assert wrong == []
    context.close()


def run(page: Any, prompt: str = "abcd abcd abcd abcd abcd", tokens: int = 24) -> None:
    page.wait_for_selector("#status[data-state=live]")
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(tokens))
    page.click("#run")
    page.wait_for_selector("#verdict[data-kind=good], #verdict[data-kind=wrong]")


def test_the_playground_shows_who_wrote_each_token_and_that_the_text_is_the_same(browser: Any, server: Running) -> None:
    """A run with its plain twin: coloured tokens, their steps, the verdict; and the live part knows of it."""
    with opened(browser, server) as page:
        run(page)
        assert "The texts are identical" in page.inner_text("#verdict")
        drafted = page.locator("#text .drafted")
        assert drafted.count() > 0
        assert drafted.first.get_attribute("title") == "ngram: guessed, and right"
        assert "ngram" in page.inner_text("#legend")
        assert page.locator("#race .lane").count() == 2
        page.wait_for_selector("#acceptance .positions", state="attached")
        page.wait_for_selector("#timeline .mode", state="attached")
        assert "First token" in page.inner_text("#latency")
        assert "of" in page.inner_text("#waste")
        assert server.engine.files.digest()[:12] in page.inner_text("#weights")


def test_all_changes_of_mode_are_shown_when_asked_for(browser: Any) -> None:
    with serving() as running:
        change_modes(running.engine, 100)
        with opened(browser, running) as page:
            page.wait_for_selector("#transitions tbody tr")
            assert page.locator("#transitions tbody tr").count() == 64
            assert page.inner_text("#transitions-count") == "The latest 64 of 100."
            page.click("#transitions-all")
            page.wait_for_selector("#transitions-under", state="hidden")
            assert page.locator("#transitions tbody tr").count() == 100


def test_steps_can_be_walked_with_the_keyboard(browser: Any, server: Running) -> None:
    """Ctrl+Enter runs; arrows choose a step, which is told in words and marks its tokens."""
    with opened(browser, server) as page:
        page.wait_for_selector("#status[data-state=live]")
        page.fill("#max-tokens", "12")
        page.uncheck("#compare")
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#verdict:not([hidden])")
        page.focus("#steps")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#step-told").startswith("Step 2 of")
        assert page.get_attribute("#steps", "aria-valuenow") == "2"
        assert page.locator("#steps .chosen").count() == 1


def test_nothing_that_is_said_is_read_as_html(browser: Any) -> None:
    """A prompt, its answer and a model's name with markup in them are shown as they are."""
    template = EVIL + "{{ messages[0]['content'] }}"
    with (
        serving(tiny_engine(vocabulary=300, template=template), names=(EVIL,)) as running,
        opened(browser, running) as page,
    ):
        run(page, EVIL)
        assert EVIL in page.inner_text("#model")
        assert page.locator("main img").count() == 0
        assert page.title() == "Outrider"


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Any) -> None:
    """A wrong one is told; the right one is in sessionStorage alone and opens page and playground."""
    with serving(tiny_engine(), keys=Keys({"a": KEY})) as running, opened(browser, running) as page:
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "not-the-right-one")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-wrong:not([hidden])")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#status[data-state=live]")
        assert page.evaluate("sessionStorage.getItem('outrider.key')") == KEY
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        page.reload()
        page.wait_for_selector("#status[data-state=live]")
        assert not page.locator("#key-dialog").is_visible()


def test_empty_states_are_honest(browser: Any) -> None:
    """A server that did nothing shows no figure, and says so."""
    with serving(tiny_engine()) as running, opened(browser, running) as page:
        page.wait_for_selector("#status[data-state=live]")
        for place in ("#now-speedup", "#now-speed", "#now-acceptance"):
            assert page.inner_text(place) == "–"
        assert page.inner_text("#acceptance") == "No guess was checked yet."
        assert page.inner_text("#transitions") == "No change of mode since the start."
        assert page.inner_text("#requests") == "Nothing runs or waits."
        assert "Nothing was decoded" in page.inner_text("#readout")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_all_text_can_be_read(browser: Any, server: Running, scheme: str, width: int) -> None:
    """Contrast of at least 4.5 to 1 everywhere, and nothing wider than the screen, a phone's too."""
    with opened(browser, server, viewport={"width": width, "height": 800}, color_scheme=scheme) as page:
        run(page)
        page.wait_for_selector("#acceptance .positions", state="attached")
        least = page.evaluate(CONTRAST)
        assert least["ratio"] >= 4.5, least
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_theme_can_be_chosen(browser: Any, server: Running) -> None:
    """The button beats the system's own scheme, and is remembered."""
    with opened(browser, server, color_scheme="light") as page:
        ground = "getComputedStyle(document.body).backgroundColor"
        light = page.evaluate(ground)
        page.click("#theme")
        page.click("#theme")
        assert page.inner_text("#theme") == "Theme: dark"
        assert page.evaluate(ground) != light
        page.reload()
        page.wait_for_selector("html[data-theme=dark]", state="attached")
