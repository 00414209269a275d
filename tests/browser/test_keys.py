"""A page before a server that asks for keys."""

from __future__ import annotations

import pytest

from frontends.common.auth import entry, new_key
from tests.frontends.websocket.builders import serving

pytestmark = pytest.mark.browser


def test_a_page_under_another_name_says_why_and_how_to_allow_it(chromium, engine, tmp_path):
    (tmp_path / "keys.toml").write_text(entry("anna", new_key()))  # with keys every host name is answered
    with serving(engine, auth={"keys_file": str(tmp_path / "keys.toml")}) as server:
        page = chromium.new_page()
        page.goto(f"http://chat.example:{server.port}")
        page.wait_for_selector(f"#notice-text:has-text('--ws.origins http://chat.example:{server.port}')")
        page.close()


def test_without_keys_another_host_name_is_refused_with_the_option_that_allows_it(chromium, engine):
    with serving(engine) as server:
        page = chromium.new_page()
        page.goto(f"http://chat.example:{server.port}")
        assert "--ws.allowed_hosts chat.example" in page.inner_text("p")
        page.close()


def test_a_page_under_an_allowed_name_works_without_tls(chromium, engine):
    """Such a page is no secure context: it has neither a clipboard nor a storage estimate."""
    with serving(engine, ws={"allowed_hosts": "chat.example"}) as server:
        page = chromium.new_page()
        page.set_default_timeout(30_000)
        page.goto(f"http://chat.example:{server.port}")
        page.wait_for_selector("#engine-dot[data-state=READY]")
        assert not page.evaluate("isSecureContext || navigator.clipboard || navigator.storage")
        page.fill("#composer-input", "hello there")
        page.keyboard.press("Enter")
        page.click("[aria-label='Copy answer']")
        page.wait_for_selector("#live:has-text('Copied.')", state="attached")
        page.click("#open-storage")
        page.wait_for_selector("#usage-text:has-text('1 conversation,')")
        page.reload()
        page.wait_for_selector(".message.assistant:has-text('hello there')")
        page.close()


def test_the_page_asks_for_a_missing_key_and_works_with_one(chromium, engine, tmp_path):
    key = new_key()
    (tmp_path / "keys.toml").write_text(entry("anna", key))
    with serving(engine, auth={"keys_file": str(tmp_path / "keys.toml")}) as server:
        page = chromium.new_page()
        page.set_default_timeout(30_000)
        page.goto(server.url)
        page.wait_for_selector("#notice-text:has-text('API key')")
        page.click("#open-settings")
        page.fill("#p-key", key)
        page.click("text=Done")
        page.wait_for_selector("#engine-dot[data-state=READY]")
        page.fill("#composer-input", "hello there")
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant:last-child:not(.streaming)")
        assert "hello there" in page.locator(".message.assistant .body").last.inner_text()
        page.reload()  # it is remembered
        page.wait_for_selector("#engine-dot[data-state=READY]")
        page.close()
