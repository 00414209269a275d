"""What axe-core finds on the page: nothing, in every part of it, on a desktop and on a small phone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.browser.reading import ask, finish

pytestmark = pytest.mark.browser

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
FINDINGS = """async () => (await axe.run()).violations.map(
  ({ id, nodes }) => id + ": " + nodes.map(({ html }) => html.slice(0, 200))
)"""


@pytest.fixture(scope="module")
def axe():
    source = AXE.read_bytes()
    assert hashlib.sha256(source).hexdigest() == AXE_SHA256
    return source.decode()


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, "light"), (320, 480, "dark")])
def test_axe_finds_nothing(open_page, axe, width, height, scheme):
    page = open_page(width=width, height=height, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    page.evaluate(axe)
    ask(page, "markdown")
    finish(page)
    page.click("[aria-label='Try again']")
    page.wait_for_selector(".versions")
    finish(page)
    assert page.evaluate(FINDINGS) == []
    if width < 780:
        page.click("#open-sidebar")
    page.click(".conversation .more")
    assert page.evaluate(FINDINGS) == []
    page.click("[data-do=delete]")
    page.wait_for_selector("#toast", state="visible")
    if width < 780:
        page.click("#open-sidebar")
    page.click("#open-storage")
    page.wait_for_selector(".deleted-list li")
    assert page.evaluate(FINDINGS) == []
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    for button in ("#open-system", "#open-settings"):
        page.click(button)
        assert page.evaluate(FINDINGS) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        box = page.locator("dialog[open]").bounding_box()
        assert box["x"] >= 0
        assert box["y"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= height
        page.keyboard.press("Escape")
    assert page.locator("#composer-input").bounding_box()["y"] < height - 40
