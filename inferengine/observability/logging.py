"""Log lines: text for people, one JSON object a line for collectors. Fields travel as `extra={"fields": {...}}`."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from inferengine.config import LogConfig

# Libraries that report every connection at the level where we report every request.
QUIET = ("uvicorn.access", "uvicorn.error", "asyncio", "sse_starlette.sse")


def configure(config: LogConfig) -> None:
    """Log to standard error, in the configured format and from the configured level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(config.level)


def set_level(level: str) -> None:
    """Set the least level that is written from now on."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of text, with its fields and its traceback."""
        time = datetime.fromtimestamp(record.created).isoformat(sep=" ", timespec="milliseconds")
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{time} {record.levelname.lower():7} {record.getMessage()}{' ' if fields else ''}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}
