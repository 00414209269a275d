"""What axe-core finds on the page: nothing, in every part of it. Everything fits a small phone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.browser.reading import ask, finish

pytestmark = pytest.mark.browser

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
FINDINGS = """async () => (await axe.run({ resultTypes: ["violations"] })).violations.map(
  ({ id, nodes }) => id + ": " + nodes.map(({ html }) => html.slice(0, 200))
)"""


@pytest.fixture(scope="module")
def axe():
    source = AXE.read_bytes()
    assert hashlib.sha256(source).hexdigest() == AXE_SHA256
    return source.decode()


def test_axe_finds_nothing(open_page, axe):
    page = open_page(reduced_motion="reduce", bypass_csp=True)
    page.evaluate(axe)
    ask(page, "code")
    finish(page)
    page.click("[aria-label='Try again']")
    page.wait_for_selector(".versions")
    finish(page)
    page.click(".conversation .more")
    assert page.evaluate(FINDINGS) == []
    page.click("[data-do=delete]")
    page.wait_for_selector("#toast", state="visible")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(FINDINGS) == []
    for dialog in ("storage", "system", "settings"):
        page.click(f"#open-{dialog}")
        page.wait_for_selector(f"#{dialog}")
        assert page.evaluate(FINDINGS) == []
        page.keyboard.press("Escape")


def test_everything_fits_a_screen_of_320_by_480(open_page):
    page = open_page(width=320, height=480)
    ask(page, "markdown")
    finish(page)
    page.click("#open-sidebar")
    page.click(".conversation .more")
    check_fits(page, "#conversation-menu")
    page.click("[data-do=delete]")
    check_fits(page, "#toast")
    page.click("#open-sidebar")
    page.click("#open-storage")
    page.wait_for_selector(".deleted-list li")
    for dialog in ("storage", "system", "settings"):
        if dialog != "storage":
            page.click(f"#open-{dialog}")
        check_fits(page, f"#{dialog}")
        page.keyboard.press("Escape")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("Escape")
    check_fits(page, "#composer")


def check_fits(page, selector):
    """Check that the element is inside the window, and nothing scrolls sideways."""
    page.wait_for_selector(selector)
    size = page.viewport_size
    box = page.locator(selector).bounding_box()
    assert min(box["x"], box["y"]) >= 0
    assert box["x"] + box["width"] <= size["width"]
    assert box["y"] + box["height"] <= size["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
