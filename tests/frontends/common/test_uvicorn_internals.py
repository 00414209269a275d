"""What `frontends.common` uses of uvicorn beyond its public API. pyproject.toml bounds the versions that have it."""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.server import ServerProtocol

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
CALLBACKS = ("on_message_begin", "on_headers_complete", "on_body", "on_message_complete", "on_response_complete")


def test_the_installed_version_is_within_an_upper_bound() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    named = project["optional-dependencies"]["server"]
    (found,) = (one for one in map(Requirement, named) if one.name == "uvicorn")
    assert any(one.operator == "<" for one in found.specifier)
    assert version("uvicorn") in found.specifier


@pytest.mark.parametrize("name", [*CALLBACKS, "connection_made", "connection_lost", "send_400_response"])
def test_the_protocol_has_the_callbacks_that_tell_what_a_connection_does(name: str) -> None:
    assert inspect.isfunction(getattr(HttpToolsProtocol, name))


def test_the_protocol_is_made_of_config_server_state_and_lifespan_state() -> None:
    assert {"config", "server_state", "app_state"} <= set(inspect.signature(HttpToolsProtocol).parameters)
    source = inspect.getsource(HttpToolsProtocol.__init__)
    assert all(f"self.{name}" in source for name in ("app", "cycle", "transport", "headers"))
    assert "self.url" in inspect.getsource(HttpToolsProtocol.on_message_begin)


def test_the_protocol_has_what_is_dropped_when_its_connection_has_ended() -> None:
    source = inspect.getsource(HttpToolsProtocol.__init__)
    assert all(f"self.{name}" in source for name in ("parser", "cycle", "pipeline"))
    assert inspect.isfunction(HttpToolsProtocol._unset_keepalive_if_required)
    assert "self.conn = ServerProtocol(" in inspect.getsource(WebSocketsSansIOProtocol.__init__)
    assert inspect.isgenerator(ServerProtocol().parser)


def test_the_protocol_has_what_its_handling_of_upgrades_uses() -> None:
    names = ("_should_upgrade", "handle_websocket_upgrade", "data_received")
    assert all(inspect.isfunction(getattr(HttpToolsProtocol, name)) for name in names)
    assert "self.parser = httptools.HttpRequestParser(self)" in inspect.getsource(HttpToolsProtocol.__init__)


def test_an_answer_knows_whether_it_has_begun_and_ended() -> None:
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert "self.response_started" in source
    assert "self.disconnected" in source
    assert "self.message_event" in source
    assert "self.response_complete" in source


def test_the_server_closes_what_stands_in_its_list_of_servers_and_counts_ticks() -> None:
    source = inspect.getsource(uvicorn.Server.shutdown)
    assert "in self.servers" in source
    assert {"on_tick", "startup", "handle_exit"} <= set(dir(uvicorn.Server))
    assert list(inspect.signature(uvicorn.Server.on_tick).parameters) == ["self", "counter"]
