"""One headless chromium for all tests, and per test a page of the chat served by a real front end."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

from tests.conftest import BROWSERS
from tests.frontends.websocket.builders import make_engine, serving

MARKDOWN = """# A title

Some **bold**, *italic* and `code`, with a [link](https://example.com) and a [bad one](javascript:alert(1)).

- first
- second
  - nested

1. one
2. two

| name | value |
|---|---|
| a | 1 |

> quoted

```python
def hello():
    return "<b>not bold</b>"
```
<script>window.hacked = true</script><img src=x onerror="window.hacked = true">
"""


NAMES = "--host-resolver-rules=MAP *.example 127.0.0.1"  # host names of this machine that are not localhost
EVIL = "<img src=x onerror='window.hacked = true'><script>window.hacked = true</script>"
CALLS = (
    "Let me look.<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Lisbon", "unit": "celsius"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "' + EVIL.replace('"', "") + '"}}\n</tool_call>'
)
CODE = """```python
@cached
class Point(Base):
    \"\"\"A point.\"\"\"
    def norm(self, p=2.5):  # not a comment to miss
        return f"{self.x}" if self is None else print(r"\\d+")
```
```html
<a href="x" class='y'>text &amp; more</a>
```
```diff
- old
+ new
```
```bash
export HOME=$PWD && echo "done $1" | grep -c x
```
```css
.a > #b:hover { color: #fff; width: calc(1px + 2em) }
```
"""
JSON_ANSWER = '{"name": "Anna", "text": "' + EVIL + '", "age": 31, "ok": true}'


def script(prompt: str, choice: int) -> str:
    """Answer by what the last user turn says."""
    question = prompt.rpartition("<user>")[2].partition("\n<assistant>")[0]
    if question.startswith("markdown"):
        return MARKDOWN
    if question.startswith("<tool_response>"):
        return f"The tools say: {question}"
    if question.startswith("call"):
        return CALLS
    if question.startswith("code"):
        return CODE
    if question.startswith("json"):
        return JSON_ANSWER
    if question.startswith("think"):
        return f"<think>First I consider {EVIL}.</think>Then I **answer**."
    if question.startswith("long"):
        return "One sentence after the other keeps the page busy. " * 25
    turns = prompt.count("<user>")
    return f"Turn {turns}: you said “{question}”."


@pytest.fixture(scope="module")  # playwright's own event loop runs as long as it: no other test may start one then
def chromium():
    """Yield the browser: chromium, or Firefox (over WebDriver BiDi) where INFERENGINE_TEST_BROWSER is the path of
    one."""
    sync_api = pytest.importorskip("playwright.sync_api")
    firefox = os.environ.get("INFERENGINE_TEST_BROWSER")
    executable = firefox or next(path for name in BROWSERS if (path := shutil.which(name)))
    with sync_api.sync_playwright() as playwright:
        if firefox:
            browser = playwright.firefox.launch(executable_path=executable, channel="moz-firefox")
        else:
            browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", NAMES])
        yield browser
        browser.close()


@pytest.fixture
def engine(tmp_path):
    with make_engine(tmp_path, script) as engine:
        yield engine


@pytest.fixture
def server(engine):
    with serving(engine) as server:
        yield server


@pytest.fixture
def open_page(chromium, server):
    """Open the chat page; a script error or a blocked resource on it fails the test."""
    contexts: list[Any] = []
    problems: list[str] = []

    def open_one(*, width: int = 1280, height: int = 800, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: note_problem(message, problems))
        page.goto(server.url)
        page.wait_for_selector("#engine-dot[data-state=READY]")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def shared_page(chromium, tmp_path_factory):
    """Yield one page for all tests of a module that leave it as it was; a blocked resource on it fails the last of
    them."""
    problems: list[str] = []
    with make_engine(tmp_path_factory.mktemp("engine"), script) as engine, serving(engine) as server:
        page = chromium.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: note_problem(message, problems))
        page.goto(server.url)
        yield page
        page.close()
    assert problems == []


def note_problem(message: Any, problems: list[str]) -> None:
    """Record errors of scripts and of the content security policy; a socket that cannot connect is the test's own
    doing."""
    if message.type == "error" and "WebSocket connection" not in message.text:
        problems.append(message.text)
