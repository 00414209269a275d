"""The chat page in a real browser, on a real front end, over the real wire."""

from __future__ import annotations

import re

import pytest

from inferengine.wire.messages import Reject
from tests.browser.conftest import MARKDOWN
from tests.browser.reading import CONTRAST, LONG, answers, ask, reload, stream_some
from tests.frontends.websocket.builders import serving

pytestmark = pytest.mark.browser


def test_an_answer_is_shown_with_its_figures(open_page):
    page = open_page()
    ask(page, "hello there")
    assert answers(page) == ["Turn 1: you said “hello there”."]
    assert re.search(r"first token .* tokens", page.inner_text(".figures-line"))
    assert page.input_value("#composer-input") == ""


def test_the_answer_appears_while_it_is_written(open_page, engine):
    page = open_page()
    stream_some(page, engine)
    partial = page.inner_text(".message.streaming .body")
    assert LONG.startswith(partial.strip())
    assert len(partial) < len(LONG) / 2
    engine.release()
    assert answers(page) == [LONG.strip()]


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_keeps_the_text_so_far_and_frees_the_engine(open_page, engine, way):
    page = open_page()
    stream_some(page, engine)
    if way == "button":
        page.click("#send[aria-label=Stop]")
    else:
        page.keyboard.press("Escape")
    (text,) = answers(page)
    assert LONG.startswith(text)
    assert "stopped" in page.inner_text(".figures-line")
    assert page.inner_text("#live") == "Answer stopped."
    assert engine.num_running == 0
    assert page.get_attribute("#send", "aria-label") == "Send"


def test_several_turns_send_the_conversation(open_page):
    page = open_page()
    for turn in ("one", "two", "three"):
        ask(page, turn)
        answers(page)
    assert answers(page)[-1] == "Turn 3: you said “three”."


def test_parameters_are_sent_and_stored(open_page, engine):
    page = open_page()
    page.click("#open-settings")
    page.fill("#p-system", "Be brief.")
    page.fill("#p-max_tokens", "12")
    page.fill("#p-seed", "7")
    page.locator("#p-temperature").fill("0.2")
    page.locator("#p-top_p").fill("0.5")
    page.click("text=Done")
    ask(page, "hello")
    answers(page)
    message = engine.submits[0]
    assert message.params == {"temperature": 0.2, "top_p": 0.5, "top_k": 20, "max_tokens": 12, "seed": 7}
    assert "stopped at the token limit" in page.inner_text(".figures-line")
    assert page.inner_text("#live") == "The answer reached the token limit."
    reload(page)
    page.click("#open-settings")
    assert page.input_value("#p-system") == "Be brief."
    page.click("#reset-settings")
    assert page.input_value("#p-max_tokens") == ""


def test_unset_parameters_show_the_models_defaults(open_page, engine):
    page = open_page()
    page.click("#open-settings")
    assert page.locator(".field output").all_inner_texts() == ["model default, 0.60", "model default, 1.00"]
    assert page.get_attribute("#p-top_k", "placeholder") == "20"
    page.locator("#p-top_p").fill("0.5")
    page.locator("#p-temperature").fill("0.2")
    assert page.locator(".field output").all_inner_texts() == ["0.20", "0.50"]
    page.click("#reset-settings")
    page.locator("#p-top_p").fill("0.9")
    page.click("text=Done")
    ask(page, "hello")
    answers(page)
    assert engine.submits[0].params == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}


def test_the_system_prompt_reaches_the_template(open_page, engine):
    page = open_page()
    page.click("#open-settings")
    page.fill("#p-system", "Be brief.")
    page.keyboard.press("Escape")
    ask(page, "hello")
    answers(page)
    prompt = engine.tokenizer.decode([*memoryview(engine.submits[0].prompt).cast("I")], True)
    assert prompt == "<system>Be brief.\n<user>hello\n<assistant>"


def test_markdown_is_drawn_and_markup_stays_text(open_page):
    page = open_page()
    ask(page, "markdown")
    answers(page)
    body = page.locator(".message.assistant .body")
    assert body.locator("h1").inner_text() == "A title"
    assert body.locator("strong").inner_text() == "bold"
    assert body.locator("ul > li").count() == 3
    assert body.locator("ol > li").all_inner_texts() == ["one", "two"]
    assert body.locator("td").all_inner_texts() == ["a", "1"]
    assert body.locator("blockquote").inner_text() == "quoted"
    assert "<b>not bold</b>" in body.locator("pre code").inner_text()
    assert body.locator("a").evaluate_all("links => links.map(link => link.href)") == ["https://example.com/"]
    assert body.locator("script, img, b").count() == 0
    assert "<script>" in body.inner_text()
    assert page.evaluate("window.hacked") is None


def test_streamed_markdown_equals_markdown_drawn_at_once(open_page):
    page = open_page()
    ask(page, "markdown")
    answers(page)
    streamed = page.inner_html(".message.assistant .body")
    reload(page)
    page.wait_for_selector(".message.assistant .body h1")
    assert page.inner_html(".message.assistant .body") == streamed


COPIED = "async text => await navigator.clipboard.readText() === text"


def test_copy_puts_the_answer_and_the_code_on_the_clipboard(open_page):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    ask(page, "markdown")
    answers(page)
    page.click("[aria-label='Copy code']")
    page.wait_for_function(COPIED, arg='def hello():\n    return "<b>not bold</b>"')
    page.click("[aria-label='Copy answer']")
    page.wait_for_function(COPIED, arg=MARKDOWN)


def test_copying_works_without_the_clipboard_api(open_page):
    """A page on http:// of another machine has no `navigator.clipboard`."""
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.evaluate(
        """() => {
          const { clipboard } = navigator;
          window.readClipboard = () => clipboard.readText();
          Object.defineProperty(navigator, "clipboard", { value: undefined });
        }"""
    )
    ask(page, "markdown")
    answers(page)
    page.click("[aria-label='Copy code']")
    page.wait_for_selector("#live:has-text('Copied.')", state="attached")
    assert page.evaluate("window.readClipboard()") == 'def hello():\n    return "<b>not bold</b>"'
    assert page.locator("body > textarea").count() == 0


def test_try_again_sends_the_same_and_replaces_the_answer(open_page, engine):
    page = open_page()
    ask(page, "hello")
    answers(page)
    page.click("[aria-label='Try again']")
    assert answers(page) == ["Turn 1: you said “hello”."]
    engine.wait_for(lambda: len(engine.submits) == 2)


def test_an_edited_question_replaces_what_followed(open_page):
    page = open_page()
    for text in ("first", "second"):
        ask(page, text)
        answers(page)
    page.locator(".message.user").first.hover()
    page.locator("[aria-label=Edit]").first.click()
    page.fill(".edit-box textarea", "changed")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant:has-text('changed')")
    assert answers(page) == ["Turn 1: you said “changed”."]


def test_the_page_works_with_the_keyboard_alone(open_page, engine):
    page = open_page()
    assert page.evaluate("document.activeElement.id") == "composer-input"
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    assert page.input_value("#composer-input") == "line one\nline two"
    page.keyboard.press("Enter")
    answers(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") != "composer-input"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "composer-input"
    engine.hold()
    page.keyboard.type("long")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.streaming")
    page.keyboard.type("too early")
    page.keyboard.press("Enter")  # neither sends nor stops
    assert page.input_value("#composer-input") == "too early"
    assert page.locator(".message.streaming").count() == 1
    assert page.locator(".message.user").count() == 2


def test_the_end_of_an_answer_is_announced_to_screen_readers(open_page):
    page = open_page()
    ask(page, "hello")
    answers(page)
    assert page.inner_text("#live") == "Answer complete."
    assert page.get_attribute("#log", "role") == "log"
    unnamed = page.locator(":is(button, input, textarea):not([aria-label])").evaluate_all(
        "items => items.filter(item => !item.textContent.trim() && !item.labels?.length).map(item => item.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_chosen(open_page, scheme):
    page = open_page(color_scheme=scheme)
    ground = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(ground)
    assert before == {"light": "rgb(250, 249, 246)", "dark": "rgb(23, 23, 21)"}[scheme]
    page.click("#toggle-theme")
    chosen = page.evaluate(ground)
    assert chosen != before
    reload(page)
    assert page.evaluate(ground) == chosen


def test_text_has_enough_contrast(open_page, engine):
    """WCAG AA: 4.5 to 1 for every text that is shown, in an answer, an error and the panel."""
    page = open_page(reduced_motion="reduce")  # colours change at once
    ask(page, "markdown")
    answers(page)
    engine.refuse = Reject(b"", 0, "overloaded", "The queue is full.", None, True, 2000)
    ask(page, "again")
    page.wait_for_selector(".failure")
    grounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate(CONTRAST) == []
    assert len(grounds) == 2


def test_the_panel_shows_the_live_figures(open_page, engine):
    page = open_page()
    stream_some(page, engine)
    page.wait_for_selector("#f-running:text-is('1')")
    assert page.inner_text("#f-prefix") == "25 %"
    assert page.inner_text("#f-preempted") == "3"
    page.wait_for_selector("#f-kv:has-text('%')")
    engine.release()
    page.wait_for_selector("#f-running:text-is('0')")
    assert page.inner_text("#a-tokens") != "–"


def test_conversations_are_stored_in_this_browser(open_page):
    page = open_page()
    ask(page, "about foxes")
    answers(page)
    page.click("#new-chat")
    page.wait_for_selector("#empty:visible")
    ask(page, "about owls")
    answers(page)
    reload(page)
    page.wait_for_selector("#engine-dot[data-state=READY]")
    assert page.locator(".conversation .open").all_inner_texts() == ["about owls", "about foxes"]
    page.click(".conversation:has-text('about foxes') .open")
    page.wait_for_selector(".message.assistant:has-text('about foxes')")


def test_an_answer_continues_while_another_conversation_is_open(open_page, engine):
    page = open_page()
    stream_some(page, engine)
    page.click("#new-chat")
    ask(page, "other")
    engine.release()
    assert answers(page) == ["Turn 1: you said “other”."]
    page.click(".conversation:has-text('long') .open")
    assert answers(page) == [LONG.strip()]


def test_a_lost_connection_is_resumed_without_losing_or_repeating_a_word(open_page, engine, server):
    page = open_page()
    stream_some(page, engine)
    server.cut()
    page.wait_for_selector("#engine-dot:not([data-state=READY])")
    engine.release()
    assert answers(page) == [LONG.strip()]
    assert len(engine.submits) == 1


def test_a_reloaded_page_resumes_its_answer(open_page, engine):
    page = open_page()
    stream_some(page, engine)
    reload(page)
    page.wait_for_selector(".message.streaming")
    engine.release()
    assert answers(page) == [LONG.strip()]
    assert len(engine.submits) == 1


def test_a_restarted_front_end_loses_nothing(open_page, engine, server, tmp_path):
    page = open_page()
    stream_some(page, engine)
    server.stop()
    page.wait_for_selector("#notice:has-text('The connection was lost')")
    with serving(engine, port=server.port):
        engine.release()
        assert answers(page) == [LONG.strip()]
        page.wait_for_selector("#notice", state="hidden")


def test_a_refusal_shows_the_remedy_and_offers_to_try_again(open_page, engine):
    page = open_page()
    engine.refuse = Reject(b"", 0, "overloaded", "The queue is full.", None, True, 2000)
    ask(page, "hello")
    failure = page.locator(".failure")
    assert failure.get_attribute("role") == "alert"
    assert "The queue is full. Try again in 2 s." in " ".join(failure.inner_text().split("\n"))
    engine.refuse = None
    page.click(".failure button")
    assert answers(page) == ["Turn 1: you said “hello”."]


def test_a_missing_engine_is_reported_with_the_command_to_start_it(open_page, engine):
    page = open_page()
    engine.__exit__()
    page.wait_for_selector("#notice:has-text('inferengine up')")
    ask(page, "hello")
    page.wait_for_selector(".failure:has-text('engine')")


def test_a_phone_does_not_scroll_sideways(open_page):
    page = open_page(width=320, height=720)
    ask(page, "markdown")
    answers(page)
    check_phone(page, 320)
    for width in (390, 768):
        page.set_viewport_size({"width": width, "height": 720})
        reload(page)  # the answer is kept
        page.wait_for_selector("#engine-dot[data-state=READY]")
        assert "A title" in page.inner_text(".message.assistant .body")
        check_phone(page, width)


def check_phone(page, width):
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click("#toggle-panel")
    page.wait_for_selector("#f-rate:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#panel", state="hidden")
    if width < 780:
        page.click("#open-sidebar")
        page.click(".conversation .open")
        page.wait_for_selector("#sidebar", state="hidden")
    box = page.locator("#send").bounding_box()
    assert box["width"] >= 36
    assert box["height"] >= 36
