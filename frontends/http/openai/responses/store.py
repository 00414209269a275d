"""Responses that may be asked for again: in this worker's memory, and where there are several workers on their shelf.
Bounded in number, size and time.

Stored responses that all workers of one front end see: a file each, in a folder made before the first worker.

In memory where the machine lets us (/dev/shm), for its owner alone, and removed with the process; what a killed one
left is removed by the next. A file is replaced as a whole, so a reader has the old one or the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferengine.errors import InferEngineError

logger = logging.getLogger(__name__)

PREFIX = "inferengine-responses-"
MEMORY = Path("/dev/shm")
PRUNE_EVERY_S = 5.0
DELETED = ".deleted"  # an empty file of this suffix: the record must not be written again


class ResponseShelf:
    """Records by tenant and id, bounded in bytes, number and age over all workers."""

    def __init__(
        self, folder: Path, *, max_bytes: int, max_records: int, keep_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`max_bytes`: at most half of what is free there now. `clock`: Unix time, as files carry it."""
        self._folder = folder
        self._max_bytes = min(max_bytes, shutil.disk_usage(folder).free // 2)
        self._max_records = max_records
        self._keep_s = keep_s
        self._clock = clock
        self._next_prune_s = 0.0
        self._unpruned_bytes = 0

    def put(self, tenant: str, response_id: str, record: dict[str, Any]) -> None:
        """In place of what is there under that id; what was deleted does not come back. Where there is no room it is
        not kept, and whoever asked for the response still gets it."""
        content = json.dumps(record).encode()
        path = self._path(tenant, response_id)
        fresh = path.with_suffix(f".{os.getpid()}")
        try:
            fresh.write_bytes(content)
            fresh.replace(path)
            if path.with_suffix(DELETED).exists():  # looked for afterwards: another worker may have deleted it just now
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.error("a response cannot be kept", extra={"fields": {"error": error.strerror}})
            fresh.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        self._unpruned_bytes += len(content)
        if self._clock() >= self._next_prune_s or self._unpruned_bytes > self._max_bytes // 8:
            self._prune()

    def get(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        try:
            content = self._path(tenant, response_id).read_bytes()
        except FileNotFoundError:
            return None
        record: dict[str, Any] = json.loads(content)
        return record

    def delete(self, tenant: str, response_id: str) -> None:
        """For good: ids are not used again."""
        path = self._path(tenant, response_id)
        with contextlib.suppress(OSError):  # a full disk
            path.with_suffix(DELETED).touch()
        path.unlink(missing_ok=True)

    def _path(self, tenant: str, response_id: str) -> Path:
        """Named by a digest: no word of a request becomes part of a path."""
        return self._folder / hashlib.sha256(f"{tenant}\0{response_id}".encode()).hexdigest()

    def _prune(self) -> None:
        """The oldest go first."""
        now = self._clock()
        self._next_prune_s, self._unpruned_bytes = now + PRUNE_EVERY_S, 0
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another worker was first
                    status = entry.stat()
                    found.append((status.st_mtime, status.st_size, Path(entry.path)))
        found.sort(reverse=True)
        num_bytes = 0
        for place, (written_s, size, path) in enumerate(found):
            num_bytes += size
            if num_bytes > self._max_bytes or place >= self._max_records or now - written_s > self._keep_s:
                path.unlink(missing_ok=True)


def make_folder(parent: Path | None = None) -> Path:
    """A folder of this process for `ResponseShelf`. Removes those of processes that are gone."""
    if parent is None:
        parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    mine = f"{PREFIX}{os.getuid()}-"
    for path in parent.glob(f"{mine}*"):
        process = path.name.removeprefix(mine).partition("-")[0]
        if process.isdigit() and not is_alive(int(process)):
            remove_folder(path)
    return Path(tempfile.mkdtemp(prefix=f"{mine}{os.getpid()}-", dir=parent))  # mode 0700


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def is_alive(process: int) -> bool:
    """Whether a process of this user runs under that id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's by now
        return False
    return True


MAX_RESPONSES = 10_000
MAX_BYTES = 64 * 1024 * 1024
KEEP_S = 3600.0
UNFINISHED = ("queued", "in_progress")


@dataclass
class Stored:
    """One response. `messages`: the conversation that led to it. While it is made in the background: `task` in the
    worker that makes it, and `request_id`, the engine's, by which any worker can end it."""

    tenant: str
    messages: list[dict[str, Any]]
    document: dict[str, Any]
    created_s: float = 0.0
    num_bytes: int = 0
    request_id: bytes = b""
    task: asyncio.Task[None] | None = None
    cancel: Callable[[], None] = field(default=lambda: None)

    @property
    def unfinished(self) -> bool:
        return self.document.get("status") in UNFINISHED


class ResponseStore:
    """By tenant and id, the oldest forgotten first. One that is still being made is kept."""

    def __init__(
        self,
        shelf: ResponseShelf | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shelf`: what the workers share; None where there is one worker."""
        self._shelf = shelf
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._max_bytes = max_bytes
        self._clock = clock
        self._num_bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep a response, in place of what was kept under its id."""
        name = (stored.tenant, stored.document["id"])
        self._forget(name)
        stored.created_s = self._clock()
        stored.num_bytes = len(json.dumps([stored.messages, stored.document]))
        self._stored[name] = stored
        self._num_bytes += stored.num_bytes
        if self._shelf is not None:
            self._shelf.put(*name, _record(stored))
        for old_name, old in list(self._stored.items()):
            fresh = stored.created_s - old.created_s < KEEP_S
            if fresh and self._num_bytes <= self._max_bytes and len(self._stored) <= MAX_RESPONSES:
                break
            if old.task is None or old.task.done():
                self._forget(old_name)

    def get(self, response_id: str, tenant: str) -> Stored:
        """Raises not_found, for another tenant's too. What another worker keeps comes without its task."""
        name = (tenant, response_id)
        if self._shelf is None:
            stored = self._stored.get(name)
        elif (record := self._shelf.get(*name)) is None:  # deleted, by whichever worker
            self._forget(name)
            stored = None
        else:
            stored = self._stored.get(name) or _from_record(tenant, record)
        if stored is None:
            raise InferEngineError("not_found", "There is no such response: they are kept for an hour.")
        return stored

    def delete(self, response_id: str, tenant: str) -> None:
        stored = self.get(response_id, tenant)
        self._forget((tenant, response_id))
        if self._shelf is not None:  # first: whoever makes it keeps what it has when the cancel ends it, unless deleted
            self._shelf.delete(tenant, response_id)
        stored.cancel()

    def was_deleted(self, stored: Stored) -> bool:
        """While it was being made."""
        try:
            self.get(stored.document["id"], stored.tenant)
        except InferEngineError:
            return True
        return False

    def close(self) -> None:
        """End what is being made in the background."""
        for stored in self._stored.values():
            stored.cancel()
            if stored.task is not None:
                stored.task.cancel()

    def _forget(self, name: tuple[str, str]) -> None:
        old = self._stored.pop(name, None)
        if old is not None:
            self._num_bytes -= old.num_bytes


def _record(stored: Stored) -> dict[str, Any]:
    return {
        "messages": stored.messages,
        "document": stored.document,
        "request_id": stored.request_id.hex(),
        "process": os.getpid(),
    }


def _from_record(tenant: str, record: dict[str, Any]) -> Stored:
    """One whose worker died while it was made has failed with it."""
    stored = Stored(tenant, record["messages"], record["document"], request_id=bytes.fromhex(record["request_id"]))
    if stored.unfinished and not is_alive(record["process"]):
        error = {"code": "server_error", "message": "The server stopped while it made this response."}
        stored.document = {**stored.document, "status": "failed", "error": error}
    return stored
