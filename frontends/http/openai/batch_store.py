"""Files and batches, in an SQLite database that survives the front end and that all workers share.

Each row belongs to a tenant, and nothing is found under another one. A line of a batch has one result: it is written
where there is none yet, together with the batch's counts. Output and error files appear together with the final status.
What ends a batch is therefore seen as a whole or not at all, whenever a process is killed.

Each store has one connection, in a thread of its own, so the event loop never waits for a lock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from frontends.common.json import dumps, parse
from inferengine.config import Config, state_directory
from inferengine.errors import ConfigError, InferEngineError, InvalidRequest

logger = logging.getLogger(__name__)

FILE_NAME = "batches.sqlite3"
LOCK_WAIT_S = 30.0
DAY_S = 24 * 3600
KEEP_S = 30 * DAY_S  # files and ended batches
HALF_DONE_S = 3600.0  # after which an upload that has not ended is removed
CHUNK_BYTES = 1024 * 1024
MIN_FREE_BYTES = 256 * 1024 * 1024  # that are left on the disk
MAX_FILES = 1000  # of a tenant
MAX_OPEN_BATCHES = 100
MAX_BATCHES = 1000
MAX_LINES = 50_000  # OpenAI's limit
MAX_ERRORS = 50  # that a failed batch tells
MAX_STARTS = 20  # of one line: one that ends the front end each time is given up
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
CUSTOM_ID_CHARACTERS = 512

SCHEMA = """
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, purpose TEXT NOT NULL,
    filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL,
    whole INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, number);
CREATE TABLE IF NOT EXISTS chunks (
    file TEXT NOT NULL, place INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, place)
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, key_name TEXT NOT NULL,
    status TEXT NOT NULL, endpoint TEXT NOT NULL, expires_s INTEGER NOT NULL, output_keep_s INTEGER NOT NULL,
    bytes INTEGER NOT NULL, total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL,
    document TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, number);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, place INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL,
    starts INTEGER NOT NULL, failed INTEGER NOT NULL, result BLOB, PRIMARY KEY (batch, place),
    UNIQUE (batch, custom_id)
);
CREATE TABLE IF NOT EXISTS usage (
    batch TEXT PRIMARY KEY, input INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL,
    reasoning INTEGER NOT NULL
);
COMMIT;
"""
FILE_COLUMNS = "id, purpose, filename, bytes, created_s, expires_s"

Result = TypeVar("Result")


class Line(NamedTuple):
    """A request of a batch that has no result yet. `starts`: how often it was begun before."""

    place: int
    custom_id: str
    body: bytes
    starts: int


class OpenBatch(NamedTuple):
    """A batch that has not ended, as its runner sees it."""

    id: str
    tenant: str
    key_name: str
    status: str
    endpoint: str
    expires_s: int


class BatchUsage(NamedTuple):
    """Tokens of the lines that were answered. `cached`: of the input; `reasoning`: of the output."""

    input: int
    cached: int
    output: int
    reasoning: int


class Limits(NamedTuple):
    """Bounds of what is kept: bytes of all that a tenant has, and of one line. Routes bound the size of a file."""

    tenant_bytes: int
    line_bytes: int


def store_folder(config: Config) -> Path:
    """Return where files and batches are kept: `http.files_folder`, else a folder of this engine's name."""
    return Path(config.http.files_folder or state_directory() / f"{config.engine.name}-files")


def check_folder(config: Config) -> None:
    """Raise ConfigError where files cannot be kept in `http.files_folder`; log a warning where it is not set and its
    default cannot be written, as in a container without a volume. Creates nothing."""
    folder = store_folder(config)
    reason = _unwritable(folder)
    if not reason:
        return
    if config.http.files_folder:
        raise ConfigError(
            "http.files_folder",
            f"{folder}: {reason}. Name a folder that this process can write, or leave it empty for the default",
        )
    text = "%s: %s. Uploaded files and batches are refused: set http.files_folder to a folder that can be written"
    logger.warning(text, folder, reason)


def _unwritable(folder: Path) -> str:
    """Return why the database cannot be kept in this folder, which may not exist yet; empty where it can."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not existing.is_dir():
        return f"{existing} is no folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written by this user"
    database = folder / FILE_NAME
    if database.exists() and not os.access(database, os.R_OK | os.W_OK):
        return f"{FILE_NAME} in it cannot be written by this user"
    return ""


def store_limits(config: Config) -> Limits:
    """Return the bounds of what is kept, from the configuration."""
    http = config.http
    return Limits(http.max_stored_bytes, http.max_body_bytes)


class BatchStore:
    """Files and batches by tenant and id. Makes its folder and database when something is kept for the first time."""

    def __init__(self, folder: Path, limits: Limits, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self.limits = limits
        self._path = folder / FILE_NAME
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "batches")
        self._connection: sqlite3.Connection | None = None  # of the thread, made there
        self._is_closed = False

    @property
    def exists(self) -> bool:
        """Whether anything was ever kept here."""
        return self._path.exists()

    def close(self) -> None:
        """Close the database, after what was asked before. Any number of times."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._disconnect)
            self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run `work` in the store's thread and return its result. Errors of the disk are the server's, and are
        retryable."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except sqlite3.Error as error:
            raise InferEngineError("overloaded", f"Files cannot be kept at present: {error}") from error

    # -- files -------------------------------------------------------------------------------------------------------

    async def begin_file(self, tenant: str) -> str:
        """Begin an upload and return its id; it is no file before `finish_file`."""
        return await self._run(self._begin_file, tenant)

    async def add_chunk(self, file_id: str, place: int, data: bytes) -> None:
        """Append to an upload. Raises request_too_large where the tenant's files are too many bytes, and overloaded
        where the disk is full."""
        await self._run(self._add_chunk, file_id, place, data)

    async def finish_file(self, file_id: str, filename: str, purpose: str, keep_s: int) -> dict[str, Any]:
        """Make a file of an upload."""
        return await self._run(self._finish_file, file_id, filename, purpose, keep_s)

    async def drop_upload(self, file_id: str) -> None:
        """Forget an upload that has not become a file."""
        await self._run(self._remove_file, file_id)

    async def file(self, file_id: str, tenant: str) -> dict[str, Any]:
        """Return a file's description. Raises not_found, for another tenant's too."""
        return await self._run(self._file, file_id, tenant)

    async def list_files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of files, and whether there are more."""
        return await self._run(self._list_files, tenant, purpose, after, limit, newest_first)

    async def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file. A batch keeps its lines by itself, once it has been read. Raises not_found."""
        await self._run(self._delete_file, file_id, tenant)

    async def chunk(self, file_id: str, place: int) -> bytes | None:
        """Return a piece of a file's content; None after the last."""
        return await self._run(self._chunk, file_id, place)

    def _begin_file(self, tenant: str) -> str:
        with self._transaction() as database:
            (count,) = database.execute("SELECT COUNT(*) FROM files WHERE tenant = ?", (tenant,)).fetchone()
            if count >= MAX_FILES:
                raise InvalidRequest("file", f"there are {count} files, the most that are kept: delete some")
            return self._new_file(database, tenant)

    def _new_file(self, database: sqlite3.Connection, tenant: str) -> str:
        file_id, now = f"file-{secrets.token_hex(16)}", int(self._clock())
        values = (file_id, tenant, "", "", 0, now, now + KEEP_S, 0)
        database.execute(
            "INSERT INTO files (id, tenant, purpose, filename, bytes, created_s, expires_s, whole) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        return file_id

    def _add_chunk(self, file_id: str, place: int, data: bytes) -> None:
        if shutil.disk_usage(self.folder).free < MIN_FREE_BYTES + len(data):
            raise InferEngineError("overloaded", "The server has no room for files at present.", retry_after_s=60.0)
        with self._transaction() as database:
            (tenant,) = database.execute("SELECT tenant FROM files WHERE id = ?", (file_id,)).fetchone()
            if self._tenant_bytes(database, tenant) + len(data) > self.limits.tenant_bytes:
                raise _no_room(self.limits)
            database.execute("INSERT INTO chunks VALUES (?, ?, ?)", (file_id, place, data))
            database.execute("UPDATE files SET bytes = bytes + ? WHERE id = ?", (len(data), file_id))

    def _tenant_bytes(self, database: sqlite3.Connection, tenant: str) -> int:
        total = 0
        for table in ("files", "batches"):
            (size,) = database.execute(f"SELECT SUM(bytes) FROM {table} WHERE tenant = ?", (tenant,)).fetchone()
            total += size or 0
        return total

    def _finish_file(self, file_id: str, filename: str, purpose: str, keep_s: int) -> dict[str, Any]:
        with self._transaction() as database:
            database.execute(
                "UPDATE files SET filename = ?, purpose = ?, expires_s = created_s + ?, whole = 1 WHERE id = ?",
                (filename, purpose, keep_s, file_id),
            )
            row = database.execute(f"SELECT {FILE_COLUMNS} FROM files WHERE id = ?", (file_id,)).fetchone()
        return _file_object(row)

    def _remove_file(self, file_id: str) -> None:
        with self._transaction() as database:
            database.execute("DELETE FROM chunks WHERE file = ?", (file_id,))
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def _file(self, file_id: str, tenant: str) -> dict[str, Any]:
        if not self.exists:
            raise _no_file()
        row = (
            self._database()
            .execute(
                f"SELECT {FILE_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND whole AND expires_s > ?",
                (file_id, tenant, self._clock()),
            )
            .fetchone()
        )
        if row is None:
            raise _no_file()
        return _file_object(row)

    def _list_files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        if not self.exists:
            return [], False
        rows = self._page(
            f"SELECT {FILE_COLUMNS} FROM files "
            "WHERE tenant = ? AND whole AND expires_s > ? AND (? IS NULL OR purpose = ?)",
            (tenant, int(self._clock()), purpose, purpose),
            "files",
            after,
            limit,
            newest_first,
        )
        return [_file_object(row) for row in rows[:limit]], len(rows) > limit

    def _page(
        self, select: str, values: tuple[Any, ...], table: str, after: str | None, limit: int, newest_first: bool
    ) -> list[Any]:
        """Return the rows after the one of that id, one more than `limit` if there are more."""
        database = self._database()
        if after is not None:
            row = database.execute(
                f"SELECT number FROM {table} WHERE id = ? AND tenant = ?", (after, values[0])
            ).fetchone()
            if row is None:
                raise InvalidRequest("after", "is none of yours", code="not_found")
            select += f" AND number {'<' if newest_first else '>'} ?"
            values = (*values, row[0])
        order = "DESC" if newest_first else "ASC"
        return database.execute(f"{select} ORDER BY number {order} LIMIT ?", (*values, limit + 1)).fetchall()

    def _delete_file(self, file_id: str, tenant: str) -> None:
        self._file(file_id, tenant)
        waiting = self._database().execute(
            "SELECT 1 FROM batches WHERE tenant = ? AND status = 'validating' "
            "AND json_extract(document, '$.input_file_id') = ?",
            (tenant, file_id),
        )
        if waiting.fetchone() is not None:
            raise InferEngineError("conflict", "A batch is about to read this file: try again soon, or cancel it.")
        self._remove_file(file_id)

    def _chunk(self, file_id: str, place: int) -> bytes | None:
        row = self._database().execute("SELECT data FROM chunks WHERE file = ? AND place = ?", (file_id, place))
        found = row.fetchone()
        return None if found is None else bytes(found[0])

    def _chunks(self, file_id: str) -> Iterator[bytes]:
        place = 0
        while (data := self._chunk(file_id, place)) is not None:
            yield data
            place += 1

    # -- batches -----------------------------------------------------------------------------------------------------

    async def create_batch(self, tenant: str, key_name: str, wanted: dict[str, Any], window_s: int) -> dict[str, Any]:
        """Keep a new batch, to be read and run. `wanted`: the fields of the request, checked."""
        return await self._run(self._create_batch, tenant, key_name, wanted, window_s)

    async def batch(self, batch_id: str, tenant: str) -> dict[str, Any]:
        """Return a batch. Raises not_found, for another tenant's too."""
        return await self._run(self._batch, batch_id, tenant)

    async def list_batches(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of batches, the newest first, and whether there are more."""
        return await self._run(self._list_batches, tenant, after, limit)

    async def cancel_batch(self, batch_id: str, tenant: str) -> dict[str, Any]:
        """Have a batch ended by its runner; one that has ended stays as it is."""
        return await self._run(self._cancel_batch, batch_id, tenant)

    def _create_batch(self, tenant: str, key_name: str, wanted: dict[str, Any], window_s: int) -> dict[str, Any]:
        try:
            self._file(wanted["input_file_id"], tenant)
        except InferEngineError as error:
            error.field = "input_file_id"
            raise
        with self._transaction() as database:
            (kept,) = database.execute("SELECT COUNT(*) FROM batches WHERE tenant = ?", (tenant,)).fetchone()
            marks = ", ".join("?" * len(OPEN))
            (unfinished,) = database.execute(
                f"SELECT COUNT(*) FROM batches WHERE tenant = ? AND status IN ({marks})", (tenant, *OPEN)
            ).fetchone()
            if unfinished >= MAX_OPEN_BATCHES or kept >= MAX_BATCHES:
                message = f"There are {unfinished} unfinished batches and {kept} in all, the most that are kept."
                raise InferEngineError("rate_limited", message, retry_after_s=60.0)
            batch_id, now = f"batch_{secrets.token_hex(16)}", int(self._clock())
            expires = int(now + window_s)
            output_keep_s = wanted.pop("output_keep_s")
            times = {f"{name}_at": None for name in _TIMES} | {"created_at": now, "expires_at": expires}
            document = {**wanted, "errors": None, "output_file_id": None, "error_file_id": None, **times}
            values = (
                batch_id,
                tenant,
                key_name,
                wanted["endpoint"],
                expires,
                output_keep_s,
                json.dumps(document),
            )
            database.execute(
                "INSERT INTO batches (id, tenant, key_name, status, endpoint, expires_s, output_keep_s, bytes, total, "
                "completed, failed, document) VALUES (?, ?, ?, 'validating', ?, ?, ?, 0, 0, 0, 0, ?)",
                values,
            )
        return self._batch(batch_id, tenant)

    def _batch(self, batch_id: str, tenant: str) -> dict[str, Any]:
        row = None
        if self.exists:
            query = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE id = ? AND tenant = ?"
            row = self._database().execute(query, (batch_id, tenant)).fetchone()
        if row is None:
            raise InferEngineError("not_found", "There is no such batch: they are kept for 30 days.")
        return self._batch_object(row)

    def _list_batches(self, tenant: str, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        if not self.exists:
            return [], False
        query = f"SELECT {_BATCH_COLUMNS} FROM batches WHERE tenant = ?"
        rows = self._page(query, (tenant,), "batches", after, limit, True)
        return [self._batch_object(row) for row in rows[:limit]], len(rows) > limit

    def _batch_object(self, row: tuple[Any, ...]) -> dict[str, Any]:
        batch_id, status, total, completed, failed, document = row
        query = "SELECT input, cached, output, reasoning FROM usage WHERE batch = ?"
        used = self._database().execute(query, (batch_id,)).fetchone()
        counts = {"total": total, "completed": completed, "failed": failed}
        return {
            "id": batch_id,
            "object": "batch",
            "status": status,
            **json.loads(document),
            "request_counts": counts,
            "usage": _usage_object(BatchUsage(*(used or (0, 0, 0, 0)))),
        }

    def _cancel_batch(self, batch_id: str, tenant: str) -> dict[str, Any]:
        found = self._batch(batch_id, tenant)
        with self._transaction() as database:
            if found["status"] in ("validating", "in_progress"):
                self._set_status(database, batch_id, "cancelling")
        return self._batch(batch_id, tenant)

    def _set_status(self, database: sqlite3.Connection, batch_id: str, status: str, **more: Any) -> None:
        (text,) = database.execute("SELECT document FROM batches WHERE id = ?", (batch_id,)).fetchone()
        document = {**json.loads(text), f"{status}_at": int(self._clock()), **more}
        database.execute(
            "UPDATE batches SET status = ?, document = ? WHERE id = ?", (status, json.dumps(document), batch_id)
        )

    # -- for the runner ----------------------------------------------------------------------------------------------

    async def open_batches(self) -> list[OpenBatch]:
        """Return the batches that have not ended, the oldest first."""
        return await self._run(self._open_batches)

    async def read_input(self, batch_id: str) -> bool:
        """Read a batch's file into its lines. False: the batch has failed, and says why."""
        return await self._run(self._read_input, batch_id)

    async def begin_line(self, batch_id: str, after: int) -> Line | None:
        """Return the next line without a result, and count that it was begun; None after the last."""
        return await self._run(self._begin_line, batch_id, after)

    async def end_line(self, batch_id: str, place: int, result: bytes, *, failed: bool) -> bool:
        """Write the result of a line. False: it has one."""
        return await self._run(self._end_line, batch_id, place, result, failed)

    async def end_batch(self, batch_id: str, status: str) -> None:
        """End the lines that have no result, with what `status` (completed, cancelled, expired) says of them, write
        the output and error files, and set the status: all at once."""
        await self._run(self._end_batch, batch_id, status)

    async def remove_old(self) -> None:
        """Remove what has expired, and uploads that were never finished."""
        await self._run(self._remove_old)

    def _open_batches(self) -> list[OpenBatch]:
        marks = ", ".join("?" * len(OPEN))
        columns = "id, tenant, key_name, status, endpoint, expires_s"
        query = f"SELECT {columns} FROM batches WHERE status IN ({marks}) ORDER BY number"
        return [OpenBatch(*row) for row in self._database().execute(query, OPEN)]

    def _read_input(self, batch_id: str) -> bool:
        database = self._database()
        row = database.execute("SELECT tenant, endpoint, document FROM batches WHERE id = ?", (batch_id,)).fetchone()
        tenant, endpoint, document = row
        errors: list[dict[str, Any]] = []
        with self._transaction():
            room = self.limits.tenant_bytes - self._tenant_bytes(database, tenant)
            total = size = 0
            for number, text in enumerate(_lines(self._chunks(json.loads(document)["input_file_id"])), 1):
                if not text.strip():
                    continue
                problem = None
                if total >= MAX_LINES:
                    problem = _problem("too_many_tasks", f"a batch has at most {MAX_LINES} lines")
                elif len(text) > self.limits.line_bytes:
                    problem = _problem("invalid_request", f"a line has at most {self.limits.line_bytes} bytes")
                elif (size := size + len(text)) > room:
                    problem = _problem("file_too_large", _no_room(self.limits).message)
                if problem is None:
                    problem = self._add_line(database, batch_id, total, endpoint, text)
                    total += problem is None
                if problem is not None:
                    errors.append({**problem, "line": number})
                    if len(errors) == MAX_ERRORS or problem["code"] in ("too_many_tasks", "file_too_large"):
                        break
            if not total and not errors:
                errors.append({**_problem("empty_file", "the file has no lines"), "line": None})
            (status,) = database.execute("SELECT status FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if status == "cancelling":  # meanwhile
                database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
                return True
            if errors:
                database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
                self._set_status(database, batch_id, "failed", errors={"object": "list", "data": errors})
            else:
                database.execute("UPDATE batches SET total = ?, bytes = ? WHERE id = ?", (total, size, batch_id))
                self._set_status(database, batch_id, "in_progress")
        return not errors

    def _add_line(
        self, database: sqlite3.Connection, batch_id: str, place: int, endpoint: str, text: bytes
    ) -> dict[str, Any] | None:
        """Add a line of the file. Returns what is wrong with it, or None."""
        try:
            line = parse(text)
        except (ValueError, RecursionError):
            return _problem("invalid_json_line", "is not valid JSON")
        if not isinstance(line, dict):
            return _problem("invalid_json_line", "must be an object")
        custom_id, body = line.get("custom_id"), line.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARACTERS:
            return _problem(
                "invalid_custom_id", f"must be a text of 1 to {CUSTOM_ID_CHARACTERS} characters", "custom_id"
            )
        if line.get("method") != "POST":
            return _problem("invalid_method", "must be POST", "method")
        if line.get("url") != endpoint:
            return _problem("mismatched_url", f"must be the batch's endpoint, {endpoint}", "url")
        if not isinstance(body, dict):
            return _problem("missing_required_parameter", "must be an object", "body")
        try:
            content = dumps(body)
        except UnicodeEncodeError:
            return _problem("invalid_json_line", "has half of a surrogate pair, which is no character", "body")
        try:
            database.execute("INSERT INTO lines VALUES (?, ?, ?, ?, 0, 0, NULL)", (batch_id, place, custom_id, content))
        except sqlite3.IntegrityError:
            return _problem("duplicate_custom_id", "is that of an earlier line", "custom_id")
        except UnicodeEncodeError:
            return _problem("invalid_custom_id", "has half of a surrogate pair", "custom_id")
        return None

    def _begin_line(self, batch_id: str, after: int) -> Line | None:
        with self._transaction() as database:
            query = (
                "SELECT place, custom_id, body, starts FROM lines "
                "WHERE batch = ? AND place > ? AND result IS NULL ORDER BY place LIMIT 1"
            )
            row = database.execute(query, (batch_id, after)).fetchone()
            if row is None:
                return None
            database.execute("UPDATE lines SET starts = starts + 1 WHERE batch = ? AND place = ?", (batch_id, row[0]))
        return Line(*row)

    def _end_line(self, batch_id: str, place: int, result: bytes, failed: bool) -> bool:
        used = None if failed else _usage_of(result)
        with self._transaction() as database:
            (tenant,) = database.execute("SELECT tenant FROM batches WHERE id = ?", (batch_id,)).fetchone()
            if self._tenant_bytes(database, tenant) + len(result) > self.limits.tenant_bytes:
                result, failed = _without_body(result, _no_room(self.limits).message), True
            if not self._write_result(database, batch_id, place, result, failed):
                return False
            if used is not None:
                sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in BatchUsage._fields)
                database.execute(
                    f"INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT (batch) DO UPDATE SET {sums}",
                    (batch_id, *used),
                )
            return True

    def _write_result(
        self, database: sqlite3.Connection, batch_id: str, place: int, result: bytes, failed: bool
    ) -> bool:
        done = database.execute(
            "UPDATE lines SET result = ?, failed = ? WHERE batch = ? AND place = ? AND result IS NULL",
            (result, failed, batch_id, place),
        )
        if not done.rowcount:
            return False
        column = "failed" if failed else "completed"
        database.execute(
            f"UPDATE batches SET {column} = {column} + 1, bytes = bytes + ? WHERE id = ?", (len(result), batch_id)
        )
        return True

    def _end_batch(self, batch_id: str, status: str) -> None:
        with self._transaction() as database:
            (now,) = database.execute("SELECT status FROM batches WHERE id = ?", (batch_id,)).fetchone()
            status = "cancelled" if now == "cancelling" else status
            query = "SELECT place, custom_id FROM lines WHERE batch = ? AND result IS NULL"
            code, message = _UNSENT[status]
            for place, custom_id in database.execute(query, (batch_id,)).fetchall():
                error = {"code": code, "message": message}
                result = dumps({"id": new_line_id(), "custom_id": custom_id, "response": None, "error": error})
                self._write_result(database, batch_id, place, result, True)
            files = {}
            for failed, name in ((0, "output"), (1, "error")):
                files[f"{name}_file_id"] = self._write_output(database, batch_id, failed, f"{batch_id}_{name}.jsonl")
            database.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
            database.execute("UPDATE batches SET bytes = 0 WHERE id = ?", (batch_id,))
            if status == "completed":
                self._set_status(database, batch_id, "finalizing")
            self._set_status(database, batch_id, status, **files)

    def _write_output(self, database: sqlite3.Connection, batch_id: str, failed: int, filename: str) -> str | None:
        """Write a file of the results, in the order of the lines, and return its id; None where there are none."""
        query = "SELECT tenant, output_keep_s FROM batches WHERE id = ?"
        tenant, keep_s = database.execute(query, (batch_id,)).fetchone()
        file_id, place, size, parts, held = "", 0, 0, list[bytes](), 0
        results = database.execute(
            "SELECT result FROM lines WHERE batch = ? AND failed = ? ORDER BY place", (batch_id, failed)
        )
        for (result,) in results:
            parts += (result, b"\n")
            held += len(result) + 1
            if held >= CHUNK_BYTES:
                file_id = file_id or self._new_file(database, tenant)
                database.execute("INSERT INTO chunks VALUES (?, ?, ?)", (file_id, place, b"".join(parts)))
                place, size, parts, held = place + 1, size + held, [], 0
        if held:
            file_id = file_id or self._new_file(database, tenant)
            database.execute("INSERT INTO chunks VALUES (?, ?, ?)", (file_id, place, b"".join(parts)))
        if not file_id:
            return None
        database.execute(
            "UPDATE files SET bytes = ?, filename = ?, purpose = 'batch_output', expires_s = created_s + ?, whole = 1 "
            "WHERE id = ?",
            (size + held, filename, keep_s, file_id),
        )
        return file_id

    def _remove_old(self) -> None:
        now = self._clock()
        database = self._database()
        old = database.execute(
            "SELECT id FROM files WHERE expires_s <= ? OR (NOT whole AND created_s <= ?)", (now, now - HALF_DONE_S)
        ).fetchall()
        for (file_id,) in old:
            self._remove_file(file_id)
        marks = ", ".join("?" * len(OPEN))
        with self._transaction():
            database.execute(
                f"DELETE FROM batches WHERE expires_s <= ? AND status NOT IN ({marks})", (now - KEEP_S, *OPEN)
            )
            database.execute("DELETE FROM usage WHERE batch NOT IN (SELECT id FROM batches)")

    # -- the database ------------------------------------------------------------------------------------------------

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database())

    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            except OSError:
                message = "This server cannot keep files: its http.files_folder must be a folder that it can write."
                raise InferEngineError("unsupported", message) from None
            connection = sqlite3.connect(self._path, timeout=LOCK_WAIT_S, isolation_level=None)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(SCHEMA)
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


class _Transaction:
    """BEGIN IMMEDIATE, then COMMIT, or ROLLBACK after an exception."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> sqlite3.Connection:
        self._database.execute("BEGIN IMMEDIATE")
        return self._database

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._database.execute("COMMIT")
        elif self._database.in_transaction:
            self._database.execute("ROLLBACK")


_TIMES = (
    "created",
    "in_progress",
    "expires",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)
_BATCH_COLUMNS = "id, status, total, completed, failed, document"
_UNSENT = {
    "completed": ("server_error", "This request was not executed."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}


def new_line_id() -> str:
    """Return the id of a line of an output or error file."""
    return f"batch_req_{secrets.token_hex(12)}"


def _file_object(row: tuple[Any, ...]) -> dict[str, Any]:
    file_id, purpose, filename, size, created_s, expires_s = row
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": created_s,
        "expires_at": expires_s,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
    }


def _usage_of(result: bytes) -> BatchUsage:
    """Return the tokens of an answered line, under the names of its route: zeros where it tells none."""
    usage = json.loads(result)["response"]["body"].get("usage") or {}

    def number(*names: str) -> int:
        return next((int(usage[name]) for name in names if usage.get(name) is not None), 0)

    def detail(part: str, *names: str) -> int:
        return next((int(found[part]) for name in names if (found := usage.get(name) or {}).get(part)), 0)

    return BatchUsage(
        number("input_tokens", "prompt_tokens"),
        detail("cached_tokens", "input_tokens_details", "prompt_tokens_details"),
        number("output_tokens", "completion_tokens"),
        detail("reasoning_tokens", "output_tokens_details", "completion_tokens_details"),
    )


def _usage_object(used: BatchUsage) -> dict[str, Any]:
    return {
        "input_tokens": used.input,
        "input_tokens_details": {"cached_tokens": used.cached},
        "output_tokens": used.output,
        "output_tokens_details": {"reasoning_tokens": used.reasoning},
        "total_tokens": used.input + used.output,
    }


def _problem(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param}


def _without_body(result: bytes, message: str) -> bytes:
    """Return the result of a line whose answer there is no room for."""
    head = json.loads(result)
    error = {"code": "request_too_large", "message": message}
    return dumps({"id": head["id"], "custom_id": head["custom_id"], "response": None, "error": error})


def _no_room(limits: Limits) -> InferEngineError:
    message = f"Files and batches may have {limits.tenant_bytes} bytes in all: delete files that are not needed."
    return InferEngineError("request_too_large", message, field="file")


def _no_file() -> InferEngineError:
    return InferEngineError("not_found", "There is no such file: it was deleted, or has expired.")


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, whatever the pieces it is kept in."""
    parts: list[bytes] = []  # of a line that has not ended: joined once, so that a long one takes linear time
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        parts.append(first)
        for begun in others:
            yield b"".join(parts)
            parts = [begun]
    if rest := b"".join(parts):
        yield rest
