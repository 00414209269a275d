"""Store responses, chat completions and conversations for later requests, in an SQLite database.

All workers of a front end share the database. With several workers it is a file in a folder that is made before the
first of them: in memory if the machine allows that (/dev/shm), readable by its owner only, and removed with the
process. What a killed process left is removed by the next one. With one worker the database has no file. It is bounded
in number, bytes and age; the oldest records are dropped first.

Each worker has one connection, in a thread of its own. Its statements run in the order of the calls, so a worker reads
what it has written, and the event loop never waits for another worker's lock.

The events of a response that is made in the background are stored, too, so that readers may begin anywhere. The worker
that makes the response holds them in memory meanwhile, and writes them to the store in batches. Other workers find them
there, and later itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from frontends.common.json import event
from inferengine.errors import InferEngineError

logger = logging.getLogger(__name__)

MAX_RESPONSES = 10_000
MAX_BYTES = 64 * 1024 * 1024
KEEP_S = 3600.0  # age beyond which records are removed
UNFINISHED = ("queued", "in_progress")
FOLDER_PREFIX = "inferengine-responses-"
FILE_NAME = "responses.sqlite3"
MEMORY = Path("/dev/shm")
LOCK_WAIT_S = 30.0
EVENT_END = b"\n\n"
PAGE_BYTES = 4096
MIN_PAGES = 64

# A record that is NULL was deleted. It stays until it is too old, so that the worker that makes the response does not
# write it again.
SCHEMA = """
BEGIN;
CREATE TABLE responses (
    number INTEGER PRIMARY KEY,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    record TEXT,
    num_bytes INTEGER NOT NULL,
    written_s REAL NOT NULL,
    UNIQUE (tenant, id)
);
CREATE TABLE events (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    first INTEGER NOT NULL,
    num_events INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (tenant, id, first)
);
CREATE INDEX by_age ON responses (written_s, number);
CREATE TABLE totals (num_records INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER added AFTER INSERT ON responses BEGIN
    UPDATE totals SET num_records = num_records + 1, num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER replaced AFTER UPDATE OF num_bytes ON responses BEGIN
    UPDATE totals SET num_bytes = num_bytes + new.num_bytes - old.num_bytes;
END;
CREATE TRIGGER removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET num_records = num_records - 1, num_bytes = num_bytes - old.num_bytes;
    DELETE FROM events WHERE tenant = old.tenant AND id = old.id;
END;
CREATE TRIGGER deleted AFTER UPDATE OF record ON responses WHEN new.record IS NULL BEGIN
    DELETE FROM events WHERE tenant = new.tenant AND id = new.id;
END;
CREATE TRIGGER events_added AFTER INSERT ON events BEGIN
    UPDATE totals SET num_bytes = num_bytes + length(new.data);
END;
CREATE TRIGGER events_removed AFTER DELETE ON events BEGIN
    UPDATE totals SET num_bytes = num_bytes - length(old.data);
END;
COMMIT;
"""
WRITE = """
INSERT INTO responses (tenant, id, record, num_bytes, written_s) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (tenant, id) DO UPDATE
SET record = excluded.record, num_bytes = excluded.num_bytes, written_s = excluded.written_s
WHERE record IS NOT NULL
"""
READ = "SELECT record FROM responses WHERE tenant = ? AND id = ?"
READ_ALL = "SELECT record FROM responses WHERE tenant = ? AND id GLOB ? AND record IS NOT NULL ORDER BY number"
REMOVE = "DELETE FROM responses WHERE tenant = ? AND id = ?"
REMOVE_OLD = "DELETE FROM responses WHERE written_s <= ?"
REMOVE_OLDEST = "DELETE FROM responses WHERE number = (SELECT number FROM responses ORDER BY written_s, number LIMIT 1)"
WRITE_EVENTS = """
INSERT INTO events (tenant, id, first, num_events, data) SELECT tenant, id, ?, ?, ? FROM responses
WHERE tenant = ? AND id = ? AND record IS NOT NULL
"""
READ_EVENTS = "SELECT first, data FROM events WHERE tenant = ? AND id = ? AND first + num_events > ? ORDER BY first"
TOTALS = "SELECT num_records, num_bytes FROM totals"

Result = TypeVar("Result")


@dataclass
class StoredResponse:
    """One response with its input `items`, or a chat completion with its messages, or a conversation.

    While a response is made in the background, the worker that makes it has `task` and `log` (its events), and all have
    `request_id`, the engine's, by which any worker can cancel it.
    """

    tenant: str
    items: list[dict[str, Any]]
    document: dict[str, Any]
    request_id: bytes = b""
    has_events: bool = False  # its events are kept too
    task: asyncio.Task[None] | None = None
    log: object | None = None
    cancel: Callable[[], None] = field(default=lambda: None)

    @property
    def name(self) -> tuple[str, str]:
        """Tenant and id: the key in the store."""
        return self.tenant, self.document["id"]

    @property
    def unfinished(self) -> bool:
        """Whether it is queued or being made."""
        return self.document.get("status") in UNFINISHED


class ResponseStore:
    """Stores records by tenant and id, and drops the oldest. Those that this worker is still making stay."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        max_records: int = MAX_RESPONSES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`path`: of `make_database`; None with one worker. `max_bytes`: limited to half of the space that is free
        there now. `clock`: Unix time, the same for all workers."""
        self._path = path
        self._max_bytes = max_bytes if path is None else min(max_bytes, shutil.disk_usage(path.parent).free // 2)
        self._max_records = max_records
        self._clock = clock
        self._making: dict[tuple[str, str], StoredResponse] = {}
        self._thread = ThreadPoolExecutor(1, "responses")
        self._connection: sqlite3.Connection | None = None  # of the thread, made there
        self._is_closed = False

    def put(self, stored: StoredResponse) -> None:
        """Store a response, in place of an earlier record of its id. Returns at once.

        A response that was deleted is not stored again. Without room it is not stored, but its request is still
        answered. Does nothing after `close`.
        """
        if self._is_closed:
            return
        if stored.task is None or stored.task.done():
            self._making.pop(stored.name, None)
        else:
            self._making[stored.name] = stored
        self._thread.submit(self._write, stored.name, _to_record(stored))

    def append(self, name: tuple[str, str], items: list[dict[str, Any]]) -> None:
        """Add items to a conversation, whichever worker has added to it before. Returns at once."""
        if not self._is_closed:
            self._thread.submit(self._append, name, items)

    def put_events(self, name: tuple[str, str], first: int, events: Sequence[bytes]) -> None:
        """Store events of a response, numbered from `first`, for as long as the response itself. Returns at once."""
        if not self._is_closed:
            self._thread.submit(self._write_events, name, first, events)

    async def events(self, name: tuple[str, str], first: int) -> list[bytes]:
        """Return the stored events of a response, from number `first` on."""
        return await self._run(self._read_events, name, first)

    async def saved(self) -> None:
        """Wait until all workers see what this one has put."""
        await self._run(lambda: None)

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a record. Raises not_found, also for another tenant's. If another worker makes it, it has no task."""
        name = (tenant, response_id)
        making = self._making.get(name)
        row = await self._run(self._read, name)
        if row is not None and row[0] is None:  # deleted, by whichever worker
            self._making.pop(name, None)
        elif making is not None:
            return making
        elif row is not None:
            return _from_record(tenant, json.loads(row[0] or "null"))
        raise InferEngineError("not_found", "There is no such response or chat completion: they are kept for an hour.")

    async def of_tenant(self, tenant: str, prefix: str) -> list[StoredResponse]:
        """Return the records of a tenant whose ids begin with `prefix`, the oldest first."""
        rows = await self._run(self._read_all, tenant, prefix)
        return [_from_record(tenant, json.loads(record)) for record in rows]

    async def delete(self, response_id: str, tenant: str) -> StoredResponse:
        """Delete a record, and cancel it if this worker makes it. Returns the record. Raises not_found."""
        stored = await self.get(response_id, tenant)
        await self._run(
            self._mark_deleted, stored.name
        )  # first: a response that ends is written by the worker that makes it
        self._making.pop(stored.name, None)
        stored.cancel()
        return stored

    def close(self) -> None:
        """Cancel what this worker makes in the background, and close the database. May be called repeatedly."""
        if self._is_closed:
            return
        self._is_closed = True
        for stored in list(self._making.values()):
            stored.cancel()
            if stored.task is not None:
                stored.task.cancel()
        self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result of `work`, run in the store's thread after all earlier calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _connect(":memory:" if self._path is None else str(self._path))
            if self._path is None:
                self._connection.executescript(SCHEMA)
            # twice the bound, for what lies between two removals: pages that are free are used again
            self._connection.execute(f"PRAGMA max_page_count = {MIN_PAGES + 2 * self._max_bytes // PAGE_BYTES}")
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _read(self, name: tuple[str, str]) -> tuple[str | None] | None:
        """Return the row of a response, or None."""
        row: tuple[str | None] | None = self._database().execute(READ, name).fetchone()
        return row

    def _read_all(self, tenant: str, prefix: str) -> list[str]:
        """Return the records of a tenant whose ids begin with `prefix`, the oldest first."""
        return [record for (record,) in self._database().execute(READ_ALL, (tenant, f"{prefix}*"))]

    def _append(self, name: tuple[str, str], items: list[dict[str, Any]]) -> None:
        """Append to a conversation: read, add and write in one transaction."""

        def add(database: sqlite3.Connection) -> None:
            row = database.execute(READ, name).fetchone()
            if row is None or row[0] is None:
                return
            record = json.loads(row[0])
            record["items"] += items
            content = json.dumps(record)
            database.execute(WRITE, (*name, content, len(content), self._clock()))

        try:
            self._transact(add)
        except sqlite3.Error as error:
            logger.error("a conversation cannot be kept", extra={"fields": {"error": str(error)}})

    def _write_events(self, name: tuple[str, str], first: int, events: Sequence[bytes]) -> None:
        try:
            self._change(WRITE_EVENTS, (first, len(events), b"".join(events), *name))
        except sqlite3.Error as error:
            logger.error("the events of a response cannot be kept", extra={"fields": {"error": str(error)}})

    def _read_events(self, name: tuple[str, str], first: int) -> list[bytes]:
        events: list[bytes] = []
        for begin, data in self._database().execute(READ_EVENTS, (*name, first)):
            batch = [part + EVENT_END for part in data.split(EVENT_END)[:-1]]
            events += batch[max(0, first - begin) :]
        return events

    def _write(self, name: tuple[str, str], record: dict[str, Any]) -> None:
        try:
            database = self._database()
            content = json.dumps(record)
            try:
                self._change(WRITE, (*name, content, len(content), self._clock()))
            except sqlite3.Error:
                database.execute(REMOVE, name)  # what is there is not what the response is now
                raise
        except sqlite3.Error as error:
            logger.error("a response cannot be kept", extra={"fields": {"error": str(error)}})
        except Exception:
            logger.exception("a response cannot be kept")

    def _mark_deleted(self, name: tuple[str, str]) -> None:
        self._change("UPDATE responses SET record = NULL, num_bytes = 0 WHERE tenant = ? AND id = ?", name)

    def _change(self, statement: str, values: tuple[Any, ...]) -> None:
        self._transact(lambda database: database.execute(statement, values))

    def _transact(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """Run `work`, then remove what exceeds the bounds, in one transaction."""
        database = self._database()
        database.execute("BEGIN IMMEDIATE")
        try:
            work(database)
            database.execute(REMOVE_OLD, (self._clock() - KEEP_S,))
            while True:
                num_records, num_bytes = database.execute(TOTALS).fetchone()
                if num_records <= self._max_records and num_bytes <= self._max_bytes:
                    break
                database.execute(REMOVE_OLDEST)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:  # a full disk has rolled it back already
                database.execute("ROLLBACK")
            raise


def _connect(path: str) -> sqlite3.Connection:
    """Open the database so that no write waits for a disk: nothing has to survive a crash of the machine."""
    database = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None)
    database.execute("PRAGMA synchronous = OFF")
    return database


def _to_record(stored: StoredResponse) -> dict[str, Any]:
    return {
        "items": stored.items,
        "document": stored.document,
        "request_id": stored.request_id.hex(),
        "process": os.getpid(),
        "has_events": stored.has_events,
    }


def _from_record(tenant: str, record: dict[str, Any]) -> StoredResponse:
    """Convert a stored record. A response counts as failed if the worker that made it has died."""
    request_id = bytes.fromhex(record["request_id"])
    stored = StoredResponse(tenant, record["items"], record["document"], request_id, record["has_events"])
    if stored.unfinished and not is_alive(record["process"]):
        error = {"code": "server_error", "message": "The server stopped while it made this response."}
        stored.document = {**stored.document, "status": "failed", "error": error}
    return stored


def make_database(parent: Path | None = None) -> Path:
    """Make an empty database for this process's workers, in a folder of mode 0700, and return its path.

    Removes the databases of processes that are gone.
    """
    if parent is None:
        parent = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    own_prefix = f"{FOLDER_PREFIX}{os.getuid()}-"
    for folder in parent.glob(f"{own_prefix}*"):
        process = folder.name.removeprefix(own_prefix).partition("-")[0]
        if process.isdigit() and not is_alive(int(process)):
            shutil.rmtree(folder, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{own_prefix}{os.getpid()}-", dir=parent)) / FILE_NAME
    database = _connect(str(path))
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(SCHEMA)
    database.close()
    return path


def remove_database(path: Path) -> None:
    """Remove a database with its folder."""
    shutil.rmtree(path.parent, ignore_errors=True)


def is_alive(process: int) -> bool:
    """Return whether a process of this user has that id."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process by now
        return False
    return True


# -- events ------------------------------------------------------------------------------------------------------------


WRITE_EVERY_S = 0.1
POLL_S = 0.05
IDLE_POLLS = (
    20  # reads in vain of a response that has ended before a reader gives up: its last events may be on the way
)
LAST = tuple(f"event: response.{status}\n".encode() for status in ("completed", "incomplete", "failed", "cancelled"))


class EventLog:
    """The events of one response, in the worker that makes it."""

    def __init__(self, store: ResponseStore, name: tuple[str, str]) -> None:
        self._store = store
        self._name = name
        self._events: list[bytes] = []
        self._num_written = 0
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    def add(self, event: bytes) -> None:
        """Append the next event. Its number is its index."""
        self._events.append(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if event.startswith(LAST):
            self.close()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._write)

    def close(self) -> None:
        """Write the events that are not in the store yet."""
        if self._timer is not None:
            self._timer.cancel()
        self._write()

    async def read(self, first: int) -> AsyncIterator[bytes]:
        """Yield the events from number `first` to the last one, as they are made."""
        while True:
            changed, events = self._changed, self._events[first:]
            first += len(events)
            for written in events:
                yield written
            if events and events[-1].startswith(LAST):
                return
            if self._events and self._events[-1].startswith(LAST) and first >= len(self._events):
                return
            await changed.wait()

    def _write(self) -> None:
        self._timer = None
        if events := self._events[self._num_written :]:
            self._store.put_events(self._name, self._num_written, events)
            self._num_written += len(events)


async def read_events(store: ResponseStore, stored: StoredResponse, first: int) -> AsyncIterator[bytes]:
    """Yield the events of a stored response from number `first` to the last one, whichever worker makes it.

    Where that worker has died, the last one says that the response has failed.
    """
    if isinstance(stored.log, EventLog):
        async for written in stored.log.read(first):
            yield written
        return
    idle = 0
    while idle < IDLE_POLLS:
        events = await store.events(stored.name, first)
        for written in events:
            yield written
            if written.startswith(LAST):
                return
        first += len(events)
        if not events:
            stored = await store.get(stored.name[1], stored.tenant)
            idle = 0 if stored.unfinished else idle + 1
            await asyncio.sleep(POLL_S)
    events = await store.events(stored.name, 0)
    if not events or not events[-1].startswith(LAST):
        kind = f"response.{stored.document['status']}"
        number = max(first, len(events))
        yield event({"type": kind, "sequence_number": number, "response": stored.document}, kind)
