"""The chat page in Firefox: what must work in every browser. puppeteer drives it, because Playwright cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import script
from tests.browser.reading import LONG, answers, ask, exported, finish, stored, stream_some
from tests.conftest import NODE_PACKAGES
from tests.e2e.service import Service
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

    def new_page(self, *, context: bool = False) -> Page:
        if context:
            self.do(0, "new_context")
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
        stored(self)
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


def programs() -> tuple[str, str]:
    """Return Node and Firefox; the test is skipped where one is missing."""
    executable = next((path for name in ("firefox-esr", "firefox") if (path := shutil.which(name))), None)
    node = shutil.which("node")
    if executable is None:
        pytest.skip("browser: no firefox: apt install firefox-esr")
    if node is None or not (NODE_PACKAGES / "puppeteer-core").is_dir():
        pytest.skip("node: no puppeteer-core: npm install --prefix tests/node")
    return node, executable


@pytest.fixture(scope="module")
def firefox() -> Iterator[Firefox]:
    driven = Firefox(*programs())
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
    """Yield the module's engine, with nothing asked yet. What a failed test held goes on after it."""
    shared_engine.submits.clear()
    yield shared_engine
    shared_engine.release()


@pytest.fixture
def page(firefox: Firefox, server) -> Iterator[Page]:
    """Yield the chat page with an empty storage; a script error or a blocked resource fails the test."""
    firefox.do(0, "new_context")
    page = firefox.new_page()
    page.goto(server.url)
    yield page
    assert firefox.do(0, "problems") == []


def titles(page: Page) -> list[str]:
    return page.locator(".conversation .title").all_text_contents()


def choose_file(page: Page, element: str, text: str, name: str) -> None:
    file = f"new File([{json.dumps(text)}], {json.dumps(name)})"
    page.evaluate(
        f"{{ const chosen = new DataTransfer(); chosen.items.add({file}); "
        f"const input = document.getElementById({json.dumps(element)}); input.files = chosen.files; "
        "input.dispatchEvent(new Event('change')); }"
    )


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
    stored(idle)
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
    choose_file(other, "import-file", text, "a.json")
    other.wait_for_selector("#storage-message:has-text('Added 1 conversation with 2 messages')")
    assert titles(other) == ["about foxes"]


def wait_until_files_are_stored(page: Page) -> None:
    """Wait until the files are stored: the chip is shown at once, its file is stored a moment later."""
    module = "new URL('composer/unsent_files.js', document.querySelector('script[src$=\"chat.js\"]').src)"
    stored = f"import({module}).then(({{ UnsentFiles }}) => new UnsentFiles().get('')).then((files) => files.length)"
    deadline = time.monotonic() + 30
    while not page.evaluate(stored):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_unsent_files_survive_a_reload(page: Page) -> None:
    choose_file(page, "attach-files", "a note", "notes.txt")
    page.wait_for_selector(".chip:has-text('notes.txt')")
    wait_until_files_are_stored(page)
    page.reload()
    page.wait_for_selector(".chip:has-text('notes.txt')")


def test_500_conversations_are_all_kept_and_found(page: Page) -> None:
    page.click("#open-storage")
    choose_file(page, "import-file", exported(500), "a.json")
    page.wait_for_selector("#storage-message:has-text('Added 500 conversations with 1,000 messages')")
    page.press("Escape")
    ask(page, "one more")
    finish(page)
    page.reload()
    assert len(titles(page)) == 501
    page.fill("#search", "SECRET word 77")
    page.wait_for_selector(".conversation small:has-text('secret word 77')")
    assert titles(page) == ["number 77"]


def test_a_full_storage_is_reported_and_loses_nothing(page: Page) -> None:
    page.evaluate(
        "{ const { put } = IDBObjectStore.prototype; "
        "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }; "
        "window.makeRoom = () => { IDBObjectStore.prototype.put = put; }; }"
    )
    ask(page, "while it is full")
    finish(page)
    page.wait_for_selector("#storage-notice:has-text('storage is full')")
    page.evaluate("window.makeRoom()")
    ask(page, "afterwards")
    finish(page)
    page.wait_for_selector("#storage-notice", state="hidden")
    page.reload()
    assert answers(page) == ["Turn 1: you said “while it is full”.", "Turn 2: you said “afterwards”."]


@pytest.mark.timeout(200)
def test_an_answer_goes_on_after_the_front_end_and_the_engine_were_killed(firefox: Firefox, tmp_path: Path) -> None:
    service = Service(tmp_path)
    page = firefox.new_page(context=True)
    try:
        service.wait_ready()
        page.goto(service.chat_page)
        page.click("#open-settings")
        page.click(".more-fields summary")
        for name, value in (("seed", "11"), ("min_tokens", "240"), ("max_tokens", "240")):  # seconds, not a blink
            page.fill(f"#p-{name}", value)
        page.press("Escape")
        texts = []
        for killed in ("ws", "engine", None):
            page.click("#new-chat")
            ask(page, "Tell me a story about a fox")
            if killed:
                page.wait_for_selector(".message.streaming .body:has-text(' ')")
                service.kill(killed)
                page.wait_for_selector("#engine-dot:not([data-state=READY])")
            finish(page)
            texts.append(answers(page)[-1])
        assert len(texts[0]) > 100
        assert texts[0] == texts[1] == texts[2]
    finally:
        page.close()
        firefox.do(0, "problems")  # the console told of lost connections
        service.stop()
