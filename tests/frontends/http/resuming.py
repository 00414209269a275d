"""A client that loses its connection and reads its stream on elsewhere."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import httpx


class Event(NamedTuple):
    """One event as it came. `id` is None where it had none; `data` is JSON, or the text [DONE]."""

    id: str | None
    data: Any


class Reader:
    """Everything that one client got of one stream, over any number of connections."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path, self.body = path, {**body, "stream": True, "detached": True}
        self.events: list[Event] = []
        self.stream_id = ""
        self.last_event_id: str | None = None

    @property
    def finished(self) -> bool:
        return bool(self.events) and self.events[-1].data == "[DONE]"

    def texts(self) -> dict[int, str]:
        """Return the text of each choice."""
        texts: dict[int, str] = {}
        for event in self.events:
            for choice in event.data["choices"] if isinstance(event.data, dict) else ():
                new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                texts[choice["index"]] = texts.get(choice["index"], "") + new
        return texts

    def finish_reasons(self) -> list[tuple[int, str]]:
        return sorted(
            (choice["index"], choice["finish_reason"])
            for event in self.events
            for choice in (event.data["choices"] if isinstance(event.data, dict) else ())
            if choice["finish_reason"]
        )

    async def read(self, http: httpx.AsyncClient, most_events: int | None = None) -> None:
        """Read by POST, or GET from the last id on, until the end, `most_events` further ones, or the connection's
        loss."""
        if self.last_event_id is None:
            request = http.stream("POST", self.path, content=json.dumps(self.body), headers=_JSON)
        else:
            headers = {"last-event-id": self.last_event_id}
            request = http.stream("GET", f"/v1/streams/{self.stream_id}", headers=headers)
        limit = None if most_events is None else len(self.events) + most_events
        try:
            async with request as response:
                assert response.status_code == 200, (await response.aread()).decode()
                self.stream_id = response.headers["x-stream-id"]
                await self._take(response, limit)
        except (httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError):
            return

    async def _take(self, response: httpx.Response, limit: int | None) -> None:
        rest = ""
        async for text in response.aiter_text():
            *whole, rest = (rest + text).split("\n\n")
            for block in whole:
                if block.startswith(":"):
                    continue
                fields = dict(line.split(": ", 1) for line in block.split("\n"))
                data = fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])
                self.events.append(Event(fields.get("id"), data))
                self.last_event_id = fields.get("id", self.last_event_id)
                if limit is not None and len(self.events) >= limit:
                    return


_JSON = {"content-type": "application/json"}
