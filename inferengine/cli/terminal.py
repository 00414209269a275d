"""The output of `inferengine up`: its children's lines with prefixes, and one line of start-up progress below them."""

from __future__ import annotations

import json
import re
from typing import TextIO

from inferengine.process import stdio

COLOURS = {"engine": "36", "http": "32", "ws": "35", "up": "1"}
BAR_CELLS = 24
SHARE = re.compile(r"(\d{1,3})\s?%")


class Terminal:
    """Writes to one stream. On a terminal progress is one line that moves; elsewhere a line per new phase or quarter.

    With `json_lines` every line of a child is passed on as it is, for collectors that parse it.
    """

    def __init__(self, stream: TextIO, *, json_lines: bool = False, name_width: int = 6) -> None:
        self._stream = stream
        self._moving = stream.isatty() and not json_lines
        self._json_lines = json_lines
        self._name_width = name_width
        self._progress = ""
        self._last_quarter: dict[str, tuple[str, int]] = {}
        self._last_line: dict[str, str] = {}

    def line(self, name: str, text: str) -> None:
        """Write a line of a child."""
        self._last_line[name] = text
        self._write(text if self._json_lines else self._prefix(name) + text)

    def notice(self, text: str) -> None:
        """Write a message of the supervisor."""
        self._write(json.dumps({"source": "up", "message": text}) if self._json_lines else self._prefix("up") + text)

    def status(self, name: str, text: str) -> None:
        """Show a child's new sd_notify status, such as `loading weights 40 %`."""
        if self._moving:
            self._erase()
            self._progress = self._prefix(name) + with_bar(text)
            self._stream.write(self._progress)
            self._stream.flush()
            return
        if self._last_line.get(name, "").endswith(text):
            return  # the child has just written it to its log
        phase, share = split_share(text)
        quarter = (phase, (share or 0) // 25)
        if self._last_quarter.get(name) != quarter:
            self._last_quarter[name] = quarter
            self._write(json.dumps({"source": name, "status": text}) if self._json_lines else self._prefix(name) + text)

    def retry(self) -> bool:
        """Write the lines that could not be written before. Returns whether some still wait."""
        return stdio.retry()

    def end_progress(self) -> None:
        """Erase the progress line."""
        self._erase()
        self._progress = ""
        self._stream.flush()

    def block(self, text: str) -> None:
        """Write several lines without a prefix, to be read and copied."""
        self.end_progress()
        self._stream.write(text + "\n")
        self._stream.flush()

    def _write(self, text: str) -> None:
        self._erase()
        self._stream.write(text + "\n" + self._progress)
        self._stream.flush()

    def _erase(self) -> None:
        if self._progress:
            self._stream.write("\r\x1b[2K")

    def _prefix(self, name: str) -> str:
        padded = f"{name:<{self._name_width}}"
        return f"\x1b[{COLOURS.get(name, '0')}m{padded} │\x1b[0m " if self._moving else f"{padded} | "


def split_share(text: str) -> tuple[str, int | None]:
    """`loading weights 40 %` → (`loading weights`, 40); without a share (text, None)."""
    found = SHARE.search(text)
    if found is None:
        return text, None
    return (text[: found.start()] + text[found.end() :]).strip(" :,-"), min(100, int(found.group(1)))


def with_bar(text: str) -> str:
    """The text with its share drawn as a bar."""
    phase, share = split_share(text)
    if share is None:
        return text
    filled = BAR_CELLS * share // 100
    return f"{phase:<20} {'█' * filled}{'░' * (BAR_CELLS - filled)} {share:3d} %"
