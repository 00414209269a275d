"""Tools, JSON and thoughts on the chat page, in a real browser."""

from __future__ import annotations

import json

import pytest

from tests.browser.conftest import CALLS, EVIL, JSON_ANSWER
from tests.browser.reading import CONTRAST, answers, ask, finish, reload
from tests.frontends.websocket.builders import serving

pytestmark = pytest.mark.browser

TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture
def server(engine):
    with serving(engine, http={"reasoning_parser": "think"}) as server:
        yield server


def set_form(page, *, tools=None, choice=None, schema=None):
    page.click("#open-settings")
    if tools is not None:
        page.fill("#p-tools", tools if isinstance(tools, str) else json.dumps(tools))
    if choice is not None:
        page.select_option("#p-tool_choice", choice)
    if schema is not None:
        page.select_option("#p-format", "schema" if schema else "json")
        if schema:
            page.fill("#p-schema", schema)
    page.click("text=Done")


def prompt_of(engine):
    return engine.tokenizer.decode([*memoryview(engine.submits[-1].prompt).cast("I")], True)


def arguments(page):
    codes = page.locator(".call pre:has(.code-head:has-text('arguments')) code")
    return [json.loads(text) for text in codes.all_inner_texts()]


def test_calls_are_shown_get_their_results_and_the_model_answers(open_page, engine):
    page = open_page()
    set_form(page, tools=[TOOL])
    assert page.inner_text("#modes") == "1 tool"
    ask(page, "call it")
    assert answers(page) == ["Let me look."]
    assert page.locator(".call-head strong").all_inner_texts() == ["get_weather"] * 2
    assert arguments(page)[0] == {"city": "Lisbon", "unit": "celsius"}
    assert "called tools" in page.inner_text(".figures-line")
    page.locator(".call-result textarea").nth(0).fill('{"sky": "clear"}')
    page.locator(".call-result textarea").nth(1).fill("rain")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.assistant:has-text('The tools say')")
    finish(page)
    assert page.locator(".call-result").count() == 0
    assert "clear" in page.locator(".call").nth(0).inner_text()
    prompt = prompt_of(engine)
    assert '<assistant>Let me look.\n<tool_call>\n{"name": "get_weather"' in prompt
    assert '<user><tool_response>\n{"sky": "clear"}\n</tool_response>' in prompt


def test_calls_and_results_are_stored_in_this_browser(open_page):
    page = open_page()
    set_form(page, tools=[TOOL])
    ask(page, "call it")
    finish(page)
    before = page.inner_html(".tool-calls")
    reload(page)
    page.wait_for_selector(".tool-calls .call")
    assert page.inner_html(".tool-calls") == before
    for place in (0, 1):
        page.locator(".call-result textarea").nth(place).fill("sun")
    page.click("text=Send the results")
    finish(page)
    reload(page)
    page.wait_for_selector(".message.assistant:has-text('The tools say')")
    assert page.locator(".call pre:has-text('sun')").count() == 2


def test_a_question_instead_of_results_drops_the_calls(open_page, engine):
    page = open_page()
    set_form(page, tools=[TOOL])
    ask(page, "call it")
    finish(page)
    ask(page, "never mind")
    page.wait_for_selector(".message.assistant:has-text('never mind')")
    finish(page)
    assert "<tool_call>" not in prompt_of(engine).partition("<user>")[2]
    assert page.locator(".call-result").count() == 0


def test_a_forced_call_is_a_grammar_and_not_forced_again_after_its_results(open_page, engine):
    page = open_page()
    set_form(page, tools=[{"type": "function", "function": TOOL}], choice="get_weather")
    ask(page, "call it")
    finish(page)
    assert engine.submits[0].grammar[0] == "lark"
    for place in (0, 1):
        page.locator(".call-result textarea").nth(place).fill("sun")
    page.click("text=Send the results")
    page.wait_for_selector(".message.assistant:has-text('The tools say')")
    assert engine.submits[1].grammar is None


def test_invalid_tools_are_reported_and_nothing_is_sent(open_page, engine):
    page = open_page()
    page.click("#open-settings")
    for tools in ("[{", '[{"description": "no name"}]', json.dumps([TOOL, TOOL])):
        page.fill("#p-tools", json.dumps([TOOL]))
        assert page.inner_text("#p-tools-error") == ""
        page.fill("#p-tools", tools)
        assert page.inner_text("#p-tools-error")
        assert page.get_attribute("#p-tools", "aria-invalid") == "true"
    page.click("text=Done")
    ask(page, "call it")
    assert "under Parameters" in page.inner_text(".failure")
    assert engine.submits == []
    page.click("#modes button")  # leads to what is to be mended
    assert page.evaluate("document.activeElement.id") == "p-tools"
    page.click("#example-tools button")
    assert page.inner_text("#p-tools-error") == ""
    page.click("text=Done")
    page.click(".failure button")
    page.wait_for_selector(".call")


def test_json_of_a_schema_is_requested_and_drawn(open_page, engine):
    page = open_page()
    schema = '{"type": "object", "properties": {"name": {"type": "string"}}}'
    set_form(page, schema=schema)
    assert page.inner_text("#modes") == "JSON with a schema"
    ask(page, "json")
    finish(page)
    kind, source, *_ = engine.submits[0].grammar
    assert (kind, json.loads(source)) == ("json_schema", json.loads(schema))
    code = page.locator(".message.assistant .body code")
    assert json.loads(code.inner_text()) == json.loads(JSON_ANSWER)
    assert code.inner_text().count("\n") == 5
    assert page.locator(".body .j-key").all_inner_texts() == ['"name"', '"text"', '"age"', '"ok"']


def test_reasoning_is_separate_from_the_answer_and_can_be_opened(open_page):
    page = open_page()
    ask(page, "think")
    assert answers(page) == ["Then I answer."]
    thought = page.locator(".thought")
    assert not thought.is_visible()
    page.click(".reasoning summary")
    assert thought.inner_text() == f"First I consider {EVIL}."


def test_markup_in_calls_results_json_and_reasoning_stays_text(open_page):
    page = open_page()
    set_form(page, tools=[TOOL])
    for question in ("think", "call it"):
        ask(page, question)
        page.wait_for_selector(f".message.user:has-text('{question}') + .message.assistant:not(.streaming)")
    for place in (0, 1):
        page.locator(".call-result textarea").nth(place).fill(EVIL)
    page.click("text=Send the results")
    page.wait_for_selector(".message.assistant:has-text('The tools say')")
    finish(page)
    ask(page, "json")
    page.wait_for_selector(".message.assistant:last-child:not(.streaming) .j-key")
    assert page.locator("#log").locator("script, img").count() == 0
    assert page.inner_text("#log").count("onerror=") >= 5
    assert page.evaluate("window.hacked") is None


def test_a_call_resumes_after_a_lost_connection(open_page, engine, server):
    page = open_page()
    set_form(page, tools=[TOOL])
    engine.hold()
    engine.release(len(engine.tokenizer.encode(CALLS[: CALLS.index("celsius")], False)))
    ask(page, "call it")
    page.wait_for_selector(".message.streaming .call:has-text('Lisbon')")
    server.cut()
    page.wait_for_selector("#engine-dot:not([data-state=READY])")
    engine.release()
    assert answers(page) == ["Let me look."]
    assert arguments(page)[0] == {"city": "Lisbon", "unit": "celsius"}
    assert len(arguments(page)) == 2
    assert len(engine.submits) == 1


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (390, "dark")])
def test_calls_and_json_fit_a_phone_with_enough_contrast(open_page, width, scheme):
    page = open_page(width=width, height=720, color_scheme=scheme)
    set_form(page, tools=[TOOL])
    ask(page, "call it")
    finish(page)
    assert page.evaluate(CONTRAST) == []
    set_form(page, schema="")
    ask(page, "json")
    page.wait_for_selector(".message.assistant:last-child:not(.streaming) .j-key")
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(
        "document.querySelector('#scroll').scrollWidth <= document.querySelector('#scroll').clientWidth"
    )
