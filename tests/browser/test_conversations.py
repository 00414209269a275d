"""Conversations are never lost: several tabs, branches, undo, a full storage, files, drafts."""

from __future__ import annotations

import json

import pytest

from tests.browser.conftest import script
from tests.browser.reading import LONG, answers, ask, exported, finish, reload, stored, stream_some
from tests.frontends.websocket.builders import make_engine, serving

pytestmark = pytest.mark.browser

READY = "#engine-dot[data-state=READY]"


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


def open_tab(page):
    """Return another tab of the same browser, at the same address."""
    tab = page.context.new_page()
    tab.set_default_timeout(30_000)
    tab.goto(page.url)
    tab.wait_for_selector(READY)
    return tab


def titles(page):
    return page.locator(".conversation .title").all_text_contents()


def version(page):
    return page.locator(".versions span").all_inner_texts()


def do(page, title, action):
    """Choose from the menu of a conversation."""
    page.click(f"[aria-label='Actions for “{title}”']")
    page.click(f"#conversation-menu [data-do={action}]")


def saved(page, press):
    """Return the file that an action saves."""
    with page.expect_download() as download:
        press()
    return download.value


def prompt_of(engine):
    return engine.tokenizer.decode([*memoryview(engine.submits[-1].prompt).cast("I")], True)


def test_an_idle_tab_erases_nothing_that_another_tab_made(open_page):
    page = open_page()
    idle = open_tab(page)
    ask(page, "about foxes")
    finish(page)
    idle.wait_for_selector(".conversation:has-text('about foxes')")  # without a reload
    ask(idle, "about owls")
    finish(idle)
    stored(idle)
    idle.close()
    page.wait_for_selector(".conversation:has-text('about owls')")
    reload(page)
    page.wait_for_selector(READY)
    assert titles(page) == ["about owls", "about foxes"]


def test_questions_of_two_tabs_in_one_conversation_are_both_kept(open_page):
    page = open_page()
    ask(page, "hello")
    finish(page)
    other = open_tab(page)
    for tab in (page, other):  # neither hears of the other in time
        tab.evaluate("BroadcastChannel.prototype.postMessage = () => {}")
    for tab, text in ((page, "mine"), (other, "yours")):
        ask(tab, text)
        finish(tab)
    reload(page)
    page.wait_for_selector(READY)
    assert version(page) == ["2/2"]
    page.click("[aria-label='Previous version']")
    shown = {page.locator(".message.user .body").last.inner_text()}
    page.click("[aria-label='Next version']")
    shown.add(page.locator(".message.user .body").last.inner_text())
    assert shown == {"mine", "yours"}


def test_another_tab_follows_an_answer_while_it_is_written(open_page, engine):
    page = open_page()
    stream_some(page, engine)
    other = open_tab(page)
    other.wait_for_selector(".message.streaming .body:has-text('keeps the page')")
    page.close()
    engine.release()
    assert answers(other) == [LONG.strip()]
    assert len(engine.submits) == 1


def test_try_again_and_edit_keep_what_they_replace(open_page):
    page = open_page()
    for text in ("first", "second"):
        ask(page, text)
        answers(page)
    page.locator("[aria-label='Try again']").first.click()
    page.wait_for_selector(".versions")
    assert answers(page) == ["Turn 1: you said “first”."]
    page.locator(".message.user [aria-label=Edit]").first.click()
    page.fill(".edit-box textarea", "changed")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant:has-text('changed')")
    finish(page)
    assert version(page) == ["2/2"]
    page.click("[aria-label='Previous version']")  # of the question: the second try of its answer
    assert version(page) == ["1/2", "2/2"]
    page.locator(".message.assistant [aria-label='Previous version']").click()
    reload(page)
    page.wait_for_selector(READY)
    assert answers(page) == ["Turn 1: you said “first”.", "Turn 2: you said “second”."]
    assert version(page) == ["1/2", "1/2"]


def test_an_answer_that_was_stopped_continues_where_it_ended(open_page, engine):
    page = open_page()
    stream_some(page, engine)
    page.click("#send[aria-label=Stop]")
    (text,) = answers(page)
    engine.release()
    page.click("[aria-label=Continue]")
    page.wait_for_selector(".versions:has-text('2/2')")
    finish(page)
    assert prompt_of(engine).rstrip().endswith(f"<assistant>{text}")
    assert answers(page)[0].startswith(text)
    assert len(answers(page)[0]) > len(text)
    page.click("[aria-label='Previous version']")
    assert answers(page) == [text]


def test_a_deleted_conversation_comes_back_at_once_or_later(open_page):
    page = open_page()
    for text in ("about foxes", "about owls"):
        page.click("#new-chat")
        ask(page, text)
        finish(page)
    do(page, "about owls", "delete")
    page.wait_for_selector("#empty", state="visible")
    assert titles(page) == ["about foxes"]
    page.click("#toast button")
    page.wait_for_selector(".message.assistant:has-text('about owls')")
    do(page, "about foxes", "delete")
    reload(page)
    page.wait_for_selector(READY)
    assert titles(page) == ["about owls"]
    page.click("#open-storage")
    page.click("[aria-label='Restore “about foxes”']")
    page.wait_for_selector(".conversation:has-text('about foxes')")
    page.keyboard.press("Escape")
    do(page, "about foxes", "delete")
    page.click("#open-storage")
    page.click("#purge")
    assert page.inner_text("#purge") == "Really delete 1? This cannot be undone."
    page.click("#purge")
    page.wait_for_selector("#deleted", state="hidden")
    reload(page)
    page.wait_for_selector(READY)
    page.click("#open-storage")
    page.wait_for_selector("#usage-text:has-text('1 conversation,')")


def test_conversations_that_an_earlier_version_stored_are_taken_over(open_page):
    page = open_page()
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    old = [
        {"id": "a", "title": "old one", "updated": 1, "messages": messages},
        {"id": "b", "title": "old two", "updated": 2, "messages": []},
    ]
    page.evaluate("old => localStorage.setItem('inferengine.conversations', old)", json.dumps(old))
    for _ in range(2):
        reload(page)
        page.wait_for_selector(READY)
        assert titles(page) == ["old two", "old one"]
    page.click(".conversation:has-text('old one') .open")
    page.wait_for_selector(".message.user:has-text('a question') + .message.assistant:has-text('an answer')")
    assert page.evaluate("localStorage.getItem('inferengine.conversations')") is None


def choose_file(page, text):
    page.set_input_files(
        "#import-file", files=[{"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}]
    )


def test_500_conversations_are_all_kept_and_found(open_page):
    page = open_page()
    page.click("#open-storage")
    choose_file(page, exported(500))
    page.wait_for_selector("#storage-message:has-text('Added 500 conversations with 1,000 messages')")
    choose_file(page, exported(500))
    page.wait_for_selector("#storage-message:has-text('Added 0 conversations with 0 messages')")
    page.keyboard.press("Escape")
    ask(page, "one more")
    finish(page)
    reload(page)
    page.wait_for_selector(READY)
    assert len(titles(page)) == 501
    page.fill("#search", "SECRET word 77")
    page.wait_for_selector(".conversation small:has-text('secret word 77')")
    assert titles(page) == ["number 77"]
    page.click(".conversation .open")
    page.wait_for_selector(".message.assistant:has-text('secret word 77')")
    page.fill("#search", "")
    page.wait_for_selector(".conversation:has-text('number 499')")


def test_a_file_that_is_no_export_is_refused_with_the_field(open_page):
    page = open_page()
    page.click("#open-storage")
    for text, reason in (
        ("[", "not JSON"),
        ("{}", "“format” must be"),
        (exported(1).replace('"question 0"', "7"), "conversations[0].messages[0].content must be a text"),
    ):
        choose_file(page, text)
        page.wait_for_selector(f"#storage-message:has-text('{reason}')")
    assert titles(page) == []


def test_a_full_storage_is_reported_and_loses_nothing(open_page):
    page = open_page()
    ask(page, "before")
    finish(page)
    page.evaluate("""() => {
      const { put } = IDBObjectStore.prototype;
      IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
      window.makeRoom = () => { IDBObjectStore.prototype.put = put; };
    }""")
    page.click("#new-chat")
    ask(page, "while it is full")
    finish(page)
    page.wait_for_selector("#storage-notice:has-text('storage is full')")
    file = saved(page, lambda: page.click("#storage-export"))
    kept = json.loads(file.path().read_text())["conversations"]
    assert [len(conversation["messages"]) for conversation in kept] == [2, 2]
    page.evaluate("window.makeRoom()")
    ask(page, "afterwards")
    finish(page)
    page.wait_for_selector("#storage-notice", state="hidden")
    reload(page)
    page.wait_for_selector(READY)
    assert answers(page) == ["Turn 1: you said “while it is full”.", "Turn 2: you said “afterwards”."]
    assert titles(page) == ["while it is full", "before"]


def test_an_export_is_read_again_with_all_branches_by_another_browser(open_page):
    page = open_page()
    ask(page, "markdown")
    finish(page)
    page.click("[aria-label='Try again']")
    page.wait_for_selector(".versions")
    finish(page)
    text = saved(page, lambda: do(page, "markdown", "json")).path().read_text()
    assert "request" not in text  # who knows the id of a request may read its output
    other = open_page()
    choose_file(other, text)
    other.click(".conversation .open")
    other.wait_for_selector(".message.assistant h1")
    assert version(other) == ["2/2"]
    assert "## Answer\n\n# A title" in saved(page, lambda: do(page, "markdown", "md")).path().read_text()
    web_page = saved(page, lambda: do(page, "markdown", "html"))
    assert web_page.suggested_filename == "markdown.html"
    reader = page.context.new_page()
    reader.goto(web_page.path().rename(web_page.path().with_suffix(".html")).as_uri())
    assert reader.locator("article h1").inner_text() == "A title"
    assert reader.locator("script, img, button").count() == 0
    assert "monospace" in reader.locator("pre code").evaluate("code => getComputedStyle(code).fontFamily")


def test_each_conversation_keeps_its_unsent_text(open_page):
    page = open_page()
    ask(page, "about foxes")
    finish(page)
    page.fill("#composer-input", "for the foxes")
    page.click("#new-chat")
    assert page.input_value("#composer-input") == ""
    page.fill("#composer-input", "for a new chat")
    page.click(".conversation .open")
    page.wait_for_function("document.querySelector('#composer-input').value === 'for the foxes'")
    page.click("#new-chat")
    reload(page)
    page.wait_for_selector(READY)
    assert page.input_value("#composer-input") == "for a new chat"


def test_text_that_is_typed_before_the_page_is_ready_is_kept(open_page):
    page = open_page()
    page.fill("#composer-input", "a draft")
    tab = page.context.new_page()
    held = []
    tab.route("**/chat.js", lambda route: held.append(route))
    tab.goto(page.url, wait_until="commit")
    tab.fill("#composer-input", "typed early")
    assert tab.is_disabled("#send")  # the browser itself would send the form, and load another page
    while not held:
        tab.wait_for_timeout(10)
    held[0].continue_()
    tab.wait_for_selector(READY)
    assert tab.input_value("#composer-input") == "a draft\ntyped early"
    assert tab.is_enabled("#send")


def test_conversations_are_renamed_and_pinned(open_page):
    page = open_page()
    for text in ("one", "two"):
        page.click("#new-chat")
        ask(page, text)
        finish(page)
    do(page, "one", "pin")
    do(page, "one", "rename")
    page.keyboard.type("The first one")
    page.keyboard.press("Enter")
    page.wait_for_selector(".conversation:has-text('The first one')")
    reload(page)
    page.wait_for_selector(READY)
    assert titles(page) == ["The first one", "two"]
    assert page.locator(".group h2").all_inner_texts() == ["Pinned", "Today"]


def test_each_conversation_has_a_system_prompt_of_its_own_with_a_sign(open_page, engine):
    page = open_page()
    page.click("#open-system")
    page.fill("#system-text", "Speak like a fox.")
    page.click("#system button[value=save]")
    page.wait_for_selector("#modes:has-text('System prompt: Speak like a fox.')")
    ask(page, "hello")
    finish(page)
    assert prompt_of(engine).startswith("<system>Speak like a fox.\n<user>hello")
    page.click("#new-chat")
    page.wait_for_selector("#modes", state="hidden")
    ask(page, "other")
    finish(page)
    assert prompt_of(engine).startswith("<user>other")
    page.click(".conversation:has-text('hello') .open")
    page.wait_for_selector("#modes:has-text('Speak like a fox.')")
