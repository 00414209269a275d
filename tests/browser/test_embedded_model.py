"""The whole service as a person meets it: `inferengine up`, the embedded model, a browser."""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.service import Service

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
ANSWER = ".message.assistant:last-child:not(.streaming)"
STORY = "Tell me a story about a fox"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    running = Service(tmp_path_factory.mktemp("service"))
    try:
        yield running.wait_ready()
    finally:
        running.stop()


@pytest.fixture
def page(chromium, service):
    page = chromium.new_page()
    page.set_default_timeout(60_000)
    page.goto(service.chat_page)
    page.wait_for_selector("#engine-dot[data-state=READY]")
    yield page
    page.close()


def test_answers_are_whole_sentences_over_several_turns(page):
    for question in ("Who are you?", "What is 2 + 3?"):
        page.fill("#composer-input", question)
        page.keyboard.press("Enter")
        page.wait_for_selector(f".message.user:has-text('{question}') + {ANSWER}")
    first, second = page.locator(".message.assistant .body").all_inner_texts()
    assert re.search(r"\w+ \w+ \w+.*\.$", first)
    assert second
    page.wait_for_selector("#f-running:text-is('0')")
    assert page.inner_text("#model-name") == "inferengine-embedded"


def test_an_answer_is_resumed_word_for_word_after_a_kill(page, service):
    page.click("#open-settings")
    page.click(".more-fields summary")
    page.fill("#p-seed", "11")
    page.fill("#p-min_tokens", "400")  # seconds: it must still run when it has been seen
    page.fill("#p-max_tokens", "400")
    page.click("text=Done")
    texts = []
    for killed in ("ws", "engine", None):
        page.click("#new-chat")
        page.fill("#composer-input", STORY)
        page.keyboard.press("Enter")
        if killed:
            page.wait_for_function("() => document.querySelector('.message.streaming .body')?.textContent.length > 40")
            service.kill(killed)
            page.wait_for_selector("#engine-dot:not([data-state=READY])")
        page.wait_for_selector(ANSWER)
        texts.append(page.locator(".message.assistant .body").last.inner_text())
    assert len(texts[0]) > 100
    assert texts[0] == texts[1] == texts[2]


def test_json_mode_answers_in_json_and_nothing_else(page):
    page.click("#open-settings")
    page.select_option("#p-format", "json")
    page.fill("#p-max_tokens", "200")
    page.click("text=Done")
    page.fill("#composer-input", "Extract the name and city as JSON: My name is Anna and I live in Lisbon.")
    page.keyboard.press("Enter")
    page.wait_for_selector(ANSWER)
    shown = page.locator(".message.assistant .body code").last.inner_text()
    assert isinstance(json.loads(shown), dict)


def test_the_example_tool_is_called_once_and_its_result_is_answered(page):
    page.click("#open-settings")
    page.click("#example-tools button")
    page.click("text=Done")
    page.fill("#composer-input", "Read my newest message.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".call .call-result")
    assert page.locator(".call-head strong").all_inner_texts() == ["read_message"]
    assert json.loads(page.inner_text(".call code")) == {}
    page.fill(".call-result textarea", "Extract the name and city as JSON: My name is Anna and I live in Lisbon.")
    page.keyboard.press("Enter")
    page.wait_for_selector(f".message.assistant:has(.call) + {ANSWER}")
    shown = page.locator(".message.assistant .body code").last.inner_text()
    assert json.loads(shown) == {"name": "Anna", "city": "Lisbon"}
