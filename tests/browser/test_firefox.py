"""The chat page in Firefox: what must work in every browser. puppeteer drives it, because Playwright cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import script
from tests.browser.reading import LONG, answers, ask, finish, stream_some
from tests.conftest import NODE_PACKAGES
from tests.frontends.websocket.builders import make_engine, serving

pytestmark = pytest.mark.browser

READY = "#engine-dot[data-state=READY]"


class Firefox:
    """A Firefox that firefox_driver.cjs drives."""

    def __init__(self, node: str, executable: str) -> None:
        driver = Path(__file__).with_name("firefox_driver.cjs")
        self._process = subprocess.Popen(
            [node, str(driver), executable],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NODE_PATH": str(NODE_PACKAGES)},
        )
        self._num_pages = 0

    def do(self, page: int, command: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([page, command, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the driver has ended"
        answer = json.loads(line)
        assert "error" not in answer, (command, arguments, answer["error"])
        return answer["value"]

    def new_page(self) -> Page:
        self._num_pages += 1
        self.do(self._num_pages, "new_page")
        return Page(self, self._num_pages)

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Page:
    """A tab, with as much of Playwright's as the tests' helpers use."""

    def __init__(self, firefox: Firefox, number: int, selector: str = "") -> None:
        self._firefox, self._number, self._selector = firefox, number, selector
        self.keyboard = self

    def _do(self, command: str, *arguments: Any) -> Any:
        return self._firefox.do(self._number, command, *arguments)

    def goto(self, url: str) -> None:
        self._do("goto", url)
        self.wait_for_selector(READY)

    def reload(self) -> None:
        self.wait_for_selector("body:not([data-saving])")  # it has stored what it was told
        self._do("reload")
        self.wait_for_selector(READY)

    def fill(self, selector: str, text: str) -> None:
        self._do("fill", selector, text)

    def press(self, key: str) -> None:
        self._do("press", key)

    def click(self, selector: str) -> None:
        self._do("click", selector)

    def wait_for_selector(self, selector: str, state: str = "visible") -> None:
        self._do("wait_for_selector", selector, state)

    def evaluate(self, source: str) -> Any:
        return self._do("evaluate", source)

    def locator(self, selector: str) -> Page:
        return Page(self._firefox, self._number, selector)

    def all_inner_texts(self) -> list[str]:
        return list(self._do("texts", self._selector))

    def all_text_contents(self) -> list[str]:
        return list(self._do("contents", self._selector))

    def close(self) -> None:
        self._do("close")


@pytest.fixture(scope="module")
def firefox() -> Iterator[Firefox]:
    executable = next((path for name in ("firefox-esr", "firefox") if (path := shutil.which(name))), None)
    node = shutil.which("node")
    if executable is None:
        pytest.skip("browser: no firefox: apt install firefox-esr")
    if node is None or not (NODE_PACKAGES / "puppeteer-core").is_dir():
        pytest.skip("node: no puppeteer-core: npm install --prefix tests/node")
    driven = Firefox(node, executable)
    yield driven
    driven.close()


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory):
    with make_engine(tmp_path_factory.mktemp("engine"), script) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(shared_engine):
    with serving(shared_engine) as server:
        yield server


@pytest.fixture
def engine(shared_engine):
    """The module's engine, with nothing asked yet."""
    shared_engine.submits.clear()
    return shared_engine


@pytest.fixture
def page(firefox: Firefox, server) -> Iterator[Page]:
    """The chat page with an empty storage; a script error or a blocked resource fails the test."""
    firefox.do(0, "new_context")
    page = firefox.new_page()
    page.goto(server.url)
    yield page
    assert firefox.do(0, "problems") == []


def titles(page: Page) -> list[str]:
    return page.locator(".conversation .title").all_text_contents()


def test_an_answer_appears_while_it_is_written(page: Page, engine) -> None:
    stream_some(page, engine)
    (partial,) = page.locator(".message.streaming .body").all_inner_texts()
    assert LONG.startswith(partial.strip())
    assert len(partial) < len(LONG) / 2
    engine.release()
    assert answers(page) == [LONG.strip()]


def test_markdown_is_rendered_and_nothing_in_it_runs(page: Page) -> None:
    ask(page, "markdown")
    finish(page)
    assert page.locator(".message.assistant h1").all_inner_texts() == ["A title"]
    assert page.evaluate("window.hacked === undefined")


def test_two_tabs_keep_each_others_conversations(page: Page, firefox: Firefox, server) -> None:
    idle = firefox.new_page()
    idle.goto(server.url)
    ask(page, "about foxes")
    finish(page)
    idle.wait_for_selector(".conversation:has-text('about foxes')")  # without a reload
    ask(idle, "about owls")
    finish(idle)
    idle.close()
    page.wait_for_selector(".conversation:has-text('about owls')")
    page.reload()
    assert titles(page) == ["about owls", "about foxes"]


def test_a_reloaded_page_goes_on_with_its_answer(page: Page, engine) -> None:
    stream_some(page, engine)
    page.reload()
    page.wait_for_selector(".message.streaming")
    engine.release()
    assert answers(page) == [LONG.strip()]
    assert len(engine.submits) == 1


def test_versions_of_an_answer_are_kept(page: Page) -> None:
    for text in ("first", "second"):
        ask(page, text)
        finish(page)
    page.click("[aria-label='Try again']")
    page.wait_for_selector(".versions:has-text('2/2')")
    finish(page)
    assert answers(page) == ["Turn 1: you said “first”."]
    page.click("[aria-label='Previous version']")
    page.wait_for_selector(".versions:has-text('1/2')")
    page.reload()
    assert answers(page) == ["Turn 1: you said “first”.", "Turn 2: you said “second”."]


def test_what_is_exported_is_imported(page: Page, firefox: Firefox, server) -> None:
    ask(page, "about foxes")
    finish(page)
    page.evaluate(
        "{ const make = URL.createObjectURL; URL.createObjectURL = (blob) => ((window.saved = blob), make(blob)); }"
    )
    page.click("#open-storage")
    page.click("#export-all")
    text = page.evaluate(
        "new Promise((done) => { const look = () => (window.saved ? done(window.saved.text()) : "
        "setTimeout(look, 20)); look(); })"
    )
    assert "about foxes" in text
    firefox.do(0, "new_context")
    other = firefox.new_page()
    other.goto(server.url)
    assert titles(other) == []
    other.click("#open-storage")
    other.evaluate(
        "{ const chosen = new DataTransfer(); chosen.items.add(new File([" + json.dumps(text) + "], 'a.json')); "
        "const input = document.getElementById('import-file'); input.files = chosen.files; "
        "input.dispatchEvent(new Event('change')); }"
    )
    other.wait_for_selector("#storage-message:has-text('Added 1 conversation with 2 messages')")
    assert titles(other) == ["about foxes"]


def test_unsent_files_survive_a_reload(page: Page) -> None:
    page.evaluate(
        "{ const chosen = new DataTransfer(); chosen.items.add(new File(['a note'], 'notes.txt')); "
        "const input = document.getElementById('attach-files'); input.files = chosen.files; "
        "input.dispatchEvent(new Event('change')); }"
    )
    page.wait_for_selector(".chip:has-text('notes.txt')")
    page.reload()
    page.wait_for_selector(".chip:has-text('notes.txt')")
