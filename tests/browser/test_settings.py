"""What a chat asks for: its own settings, presets, adapters, formats, files, and what the page shows of tokens."""

from __future__ import annotations

import json

import pytest

from tests.browser.conftest import note_problem, script
from tests.browser.reading import CONTRAST, answers, ask, finish, reload
from tests.frontends.scripted_engine import Script
from tests.frontends.websocket.builders import make_engine, serving

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def running(chromium, tmp_path_factory):
    """Yield one page for all tests, and its engine; a script error on it fails the last of them."""
    problems: list[str] = []
    with make_engine(tmp_path_factory.mktemp("engine"), script) as engine:
        engine.info = engine.info.replace(adapters=("pirate",))
        with serving(engine) as server:
            page = chromium.new_page()
            page.set_default_timeout(30_000)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda message: note_problem(message, problems))
            page.goto(server.url)
            yield page, engine
            page.close()
    assert problems == []


@pytest.fixture
def engine(running):
    """Yield the engine, as if nothing had been asked yet."""
    engine, answering = running[1], running[1].script
    engine.submits.clear()
    yield engine
    engine.script = answering


@pytest.fixture
def page(running, engine):
    """Return a new chat with default settings."""
    page = running[0]
    page.set_viewport_size({"width": 1280, "height": 800})
    page.keyboard.press("Escape")  # the drawer of the test before
    page.wait_for_selector("#engine-dot[data-state=READY]")
    page.click("#new-chat")
    page.click("#open-settings")
    page.click("#reset-settings")
    page.click("#settings .primary")
    return page


def fill(page, **values):
    """Set fields of the drawer, and close it."""
    page.click("#open-settings")
    for name, value in values.items():
        field = page.locator(f"#p-{name}")
        if field.evaluate("field => field.closest('details:not([open])') !== null"):
            page.click(".more-fields summary")
        if isinstance(value, bool):
            field.set_checked(value)
        elif field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.click("#settings .primary")


def prompt_of(submit, engine):
    return engine.tokenizer.decode([*memoryview(submit.prompt).cast("I")], True)


def attach(page, **files):
    """Attach files of these contents; `_` in a name is its dot."""
    chosen = [
        {"name": name.replace("_", "."), "mimeType": "application/octet-stream", "buffer": content}
        for name, content in files.items()
    ]
    page.set_input_files("#attach-files", chosen)


def test_each_chat_has_its_own_settings(page, engine):
    fill(page, temperature="0.2")
    ask(page, "first")
    finish(page)
    fill(page, temperature="0.9")
    page.click("#new-chat")
    ask(page, "second")
    finish(page)
    reload(page)
    page.wait_for_selector("#engine-dot[data-state=READY]")
    page.click(".conversation:has-text('first') .open")
    page.wait_for_selector(".message.user:has-text('first')")
    ask(page, "third")
    page.wait_for_selector(".message.user:has-text('third') + .message.assistant:not(.streaming)")
    assert [submit.params["temperature"] for submit in engine.submits] == [0.2, 0.2, 0.9]


def test_every_sampling_parameter_reaches_the_engine(page, engine):
    typed = {
        "top_k": "7", "min_p": "0.1", "max_tokens": "30", "min_tokens": "2", "seed": "-5",
        "repetition_penalty": "1.1", "presence_penalty": "0.5", "frequency_penalty": "-0.5", "stop_token_ids": "3, 4",
        "logit_bias": "5: -2.5\n6: 1", "allowed_token_ids": "1 2 3", "bad_words_ids": "1 2\n3", "logprobs": "0",
        "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    fill(page, **typed)
    ask(page, "hello")
    finish(page)
    assert engine.submits[0].params == {
        "temperature": 0.6, "top_k": 7, "min_p": 0.1, "max_tokens": 30, "min_tokens": 2, "seed": -5,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "stop_token_ids": [3, 4], "logit_bias": [[5, -2.5], [6, 1.0]], "allowed_token_ids": [1, 2, 3],
        "bad_words_ids": [[1, 2], [3]], "logprobs": 0, "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }  # fmt: skip


def test_stop_strings_end_the_answer(page):
    fill(page, stop="never\n you")
    ask(page, "hello")
    assert answers(page) == ["Turn 1:"]


def test_a_parameter_that_cannot_be_read_is_reported_and_not_sent(page, engine):
    fill(page, logit_bias="the: 3")
    assert "is no bias" in page.locator("#p-logit_bias-error").text_content()
    ask(page, "hello")
    assert "logit_bias" in page.inner_text(".failure").lower()
    assert engine.submits == []


def test_a_preset_is_saved_chosen_and_deleted(page):
    page.click("#open-settings")
    page.fill("#p-max_tokens", "77")
    page.click("#save-preset")
    page.fill("#p-preset_name", "Short")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#p-preset').value === 'Short'")
    page.select_option("#p-preset", "Exact: always the likeliest token")
    assert (page.input_value("#p-max_tokens"), page.input_value("#p-temperature")) == ("", "0")
    reload(page)
    page.click("#open-settings")
    page.select_option("#p-preset", "Short")
    assert page.input_value("#p-max_tokens") == "77"
    page.click("#delete-preset")
    page.wait_for_selector("#p-preset option:has-text('Short')", state="detached")
    assert page.input_value("#p-max_tokens") == "77"


def test_an_adapter_is_chosen_by_name(page, engine):
    fill(page, model="pirate")
    page.wait_for_selector("#modes:has-text('pirate')")
    ask(page, "hello")
    finish(page)
    assert engine.submits[0].adapter == "pirate"


@pytest.mark.parametrize(
    ("kind", "text", "sent"),
    [
        ("regex", r"[a-z]+ \d", ("regex", r"[a-z]+ \d")),
        ("choice", "yes\nno\n", ("choice", '["yes","no"]')),
        ("grammar", 'root ::= "yes"', None),
    ],
)
def test_the_answer_can_have_a_format(page, engine, kind, text, sent):
    fill(page, format=kind, **{kind: text})
    ask(page, "hello")
    finish(page)
    grammar = engine.submits[0].grammar
    if sent is None:
        assert "yes" in grammar[1]
    else:
        assert (grammar[0], grammar[1].replace('", "', '","')) == sent


def test_a_format_without_its_text_is_reported(page, engine):
    fill(page, format="regex")
    ask(page, "hello")
    assert "regular expression" in page.inner_text(".failure")
    assert engine.submits == []


def test_text_files_are_a_part_of_the_message(page, engine):
    attach(page, fox_py=b"print('```')\n", notes_txt="größer".encode(), photo_png=b"\x89PNG\x00")
    page.wait_for_selector("#attach-error:has-text('photo.png is no text file')")
    assert page.locator(".chip .file-name").all_inner_texts() == ["fox.py", "notes.txt"]
    page.click("[aria-label='Remove notes.txt']")
    ask(page, "What is it?")
    finish(page)
    assert page.locator(".chip").count() == 0
    sent = "What is it?\n\nFile fox.py:\n````py\nprint('```')\n````"
    assert prompt_of(engine.submits[0], engine) == f"<user>{sent}\n<assistant>"
    page.click(".files summary")
    assert page.inner_text(".files pre code") == "print('```')\n"
    reload(page)
    page.wait_for_selector(".files .file-name:has-text('fox.py')")


def test_unsent_files_survive_a_reload_and_are_sent_once(page, engine):
    attach(page, fox_py=b"print(1)\n", notes_txt=b"a note")
    page.wait_for_selector(".chip:has-text('notes.txt')")
    reload(page)
    page.wait_for_selector("#engine-dot[data-state=READY]")
    page.wait_for_selector(".chip:has-text('notes.txt')")
    page.click("[aria-label='Remove notes.txt']")
    ask(page, "What is it?")
    finish(page)
    assert "File fox.py:\n```py\nprint(1)\n```" in prompt_of(engine.submits[0], engine)
    attach(page, next_txt=b"for this chat")
    page.wait_for_selector(".chip:has-text('next.txt')")
    page.click("#new-chat")
    page.wait_for_selector(".chip", state="detached")
    reload(page)  # of the new chat: what was sent or removed does not come back, and the other chat keeps its own
    page.wait_for_selector("#engine-dot[data-state=READY]")
    page.click(".conversation:has-text('What is it') .open")
    page.wait_for_selector(".chip:has-text('next.txt')")
    assert page.locator(".chip").count() == 1
    page.click("#new-chat")
    page.wait_for_selector("#attached", state="hidden")


def test_too_large_files_are_refused(page):
    attach(page, large_txt=b"x" * 1_000_001)
    page.wait_for_selector("#attach-error:has-text('large.txt has 1.0 MB')")
    assert page.locator(".chip").count() == 0


def test_tokens_show_their_probabilities(page, engine):
    token_ids = engine.tokenizer.encode("the fox", False)
    rows = [[-0.1, 1, [token_id, 40], [-0.1, -2.5]] for token_id in token_ids]
    engine.script = lambda submit, choice: Script(token_ids, logprobs=rows)
    fill(page, logprobs="2")
    ask(page, "hello")
    finish(page)
    page.click("[aria-label='Show the tokens']")
    assert page.locator(".token").count() == len(token_ids)
    assert page.inner_text(".token-text") == "the fox"
    page.locator(".token").last.hover()
    assert page.locator(".token-tip li span").all_inner_texts() == ["90 %", "8.2 %"]
    page.locator(".token").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.index") == "1"
    page.click("[aria-label='Show the text']")
    assert answers(page) == ["the fox"]


def test_the_context_meter_counts_tokens(page, engine):
    ask(page, "hello")
    (answer,) = answers(page)
    used = len(memoryview(engine.submits[0].prompt).cast("I")) + len(engine.tokenizer.encode(answer, False)) + 1
    assert page.inner_text("#context-text") == f"{used} of 4,096 tokens"
    page.fill("#composer-input", "word " * 6000)
    page.wait_for_selector("#context[data-state=full]:has-text('more than the model takes')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_drawer_files_and_tokens_fit_a_small_phone_with_enough_contrast(page, engine, scheme):
    token_ids = engine.tokenizer.encode("the fox", False)
    rows = [[-3.0, 2, [40, 41], [-0.1, -2.5]] for _ in token_ids]
    engine.script = lambda submit, choice: Script(token_ids, logprobs=rows)
    page.set_viewport_size({"width": 320, "height": 480})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    fill(page, logprobs="2", tools=json.dumps([{"name": "x" * 60}]))
    attach(page, **{"a_file_with_a_very_long_name_" * 3 + "txt": b"x" * 40})
    page.wait_for_selector(".chip")
    ask(page, "hello")
    finish(page)
    page.click("[data-tokens]")
    page.click(".files summary")
    assert page.evaluate(CONTRAST) == []
    page.click("#open-settings")
    page.click(".more-fields summary")
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert page.evaluate(
        "[...document.querySelectorAll('#settings, #scroll')].every(e => e.scrollWidth <= e.clientWidth)"
    )


def test_a_function_is_added_and_named_at_once(page, engine):
    page.click("#open-settings")
    page.click("#add-tool")
    page.keyboard.type("look_up")
    page.click("#add-tool")
    assert page.locator("#p-tool_choice option").all_inner_texts()[3:] == ["Always look_up", "Always my_function"]
    page.select_option("#p-tool_choice", "look_up")
    page.check("#p-one_call")
    page.click("#settings .primary")
    ask(page, "call it")
    finish(page)
    assert engine.submits[0].grammar[0] == "lark"
    assert "my_function" in prompt_of(engine.submits[0], engine)
