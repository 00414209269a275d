"""What commands show while something takes time: one live line of progress with an estimate.

`LiveLine` is that line. `Terminal` is the output of `inferengine up`: its children's lines with prefixes, and the live
line below them.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from inferengine.process import stdio

COLOURS = {"engine": "36", "http": "32", "ws": "35", "up": "1"}
BAR_CELLS = 16
SHARE = re.compile(r"(\d{1,3})\s?%")


class LiveLine:
    """One line that moves on a terminal; elsewhere one line for each new phase or quarter of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moving = stream.isatty()
        self._shown = ""
        self._quarter: tuple[str, int] | None = None

    def show(self, text: str) -> None:
        """Replace the line. A share at its end, such as `40 %`, becomes a bar."""
        if self._moving:
            drawn = cut_to_width(with_bar(text), shutil.get_terminal_size().columns)
            if drawn != self._shown:
                self._shown = drawn
                self._stream.write(f"\r\x1b[2K{drawn}")
                self._stream.flush()
            return
        phase, share = split_share(text)
        quarter = (phase.partition(":")[0], (share or 0) // 25)
        if quarter != self._quarter:
            self._quarter = quarter
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self._moving and self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._shown = ""


class Terminal:
    """Writes to one stream. On a terminal progress is one line that moves; elsewhere a line per new phase or quarter.

    With `json_lines` every line of a child is passed on as it is, for collectors that parse it, and every line of the
    supervisor is a JSON object. Elsewhere than on a terminal its messages have their time. `usual_s`: how long the
    start took the last time, for the estimate; 0: not known.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        json_lines: bool = False,
        name_width: int = 6,
        usual_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._moving = stream.isatty() and not json_lines
        self._json_lines = json_lines
        self._name_width = name_width
        self._progress = ""
        self._clock = clock
        self._begun_s: float | None = None  # of the start; None: nothing starts
        self._usual_s = usual_s
        self._phase = ("", "")  # the name of the child that reports, and its status
        self._last_quarter: dict[str, tuple[str, int]] = {}
        self._last_line: dict[str, str] = {}

    def line(self, name: str, text: str) -> None:
        """Write a line of a child."""
        self._last_line[name] = text
        self._write(text if self._json_lines else self._prefix(name) + text)

    def notice(self, text: str) -> None:
        """Write a message of the supervisor."""
        if self._json_lines:
            self._write(_record("up", message=text))
            return
        time = "" if self._moving else f"{datetime.now().isoformat(sep=' ', timespec='milliseconds')} "
        self._write(f"{self._prefix('up')}{time}{text}")

    def begin(self, text: str) -> None:
        """Say at once what starts. On a terminal the live line counts from here until `block` or `end_progress`."""
        self.notice(text)
        if self._moving:
            self._begun_s = self._clock()
            self.status("up", "starting")

    def status(self, name: str, text: str) -> None:
        """Show a child's new sd_notify status, such as `loading weights 40 %`."""
        if self._moving:
            if self._begun_s is not None and not name.startswith(("engine", "up")):
                return  # while all starts the line is about what takes longest
            self._phase = (name, text)
            self._draw()
            return
        if self._last_line.get(name, "").endswith(text):
            return  # the child has just written it to its log
        phase, share = split_share(text)
        quarter = (phase, (share or 0) // 25)
        if self._last_quarter.get(name) != quarter:
            self._last_quarter[name] = quarter
            self._write(_record(name, status=text) if self._json_lines else self._prefix(name) + text)

    def retry(self) -> bool:
        """Write what could not be written before, and the live line anew. Returns whether to call again soon."""
        if self._begun_s is not None:
            self._draw()
        return stdio.retry() or self._begun_s is not None

    def end_progress(self) -> None:
        """Erase the progress line."""
        self._erase()
        self._progress = ""
        self._begun_s = None
        self._stream.flush()

    def block(self, text: str) -> None:
        """Write several lines without a prefix, to be read and copied; as JSON, one message."""
        self.end_progress()
        self._stream.write((_record("up", message=text.strip()) if self._json_lines else text) + "\n")
        self._stream.flush()

    def _write(self, text: str) -> None:
        self._erase()
        self._stream.write(text + "\n" + self._progress)
        self._stream.flush()

    def _draw(self) -> None:
        name, text = self._phase
        drawn = with_bar(text)
        if self._begun_s is not None:
            drawn = f"{drawn}  {estimate(self._clock() - self._begun_s, self._usual_s)}"
        width = shutil.get_terminal_size().columns - self._name_width - 3
        progress = self._prefix(name) + cut_to_width(drawn, width)
        if progress != self._progress:
            self._erase()
            self._progress = progress
            self._stream.write(self._progress)
            self._stream.flush()

    def _erase(self) -> None:
        if self._progress:
            self._stream.write("\r\x1b[2K")

    def _prefix(self, name: str) -> str:
        padded = f"{name:<{self._name_width}}"
        return f"\x1b[{COLOURS.get(name.partition('-')[0], '0')}m{padded} │\x1b[0m " if self._moving else f"{padded} | "


def _record(source: str, **values: str) -> str:
    """Return a line of the log as JSON."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": "info", "source": source, **values}, ensure_ascii=False)


def estimate(elapsed_s: float, usual_s: float) -> str:
    """Return a text such as `1.2 s, about 3 s left`; without a usual time the elapsed time alone."""
    if not usual_s:
        return f"{elapsed_s:.1f} s"
    if elapsed_s > usual_s:
        return f"{elapsed_s:.1f} s, usually {usual_s:.0f} s"
    return f"{elapsed_s:.1f} s, about {max(1.0, usual_s - elapsed_s):.0f} s left"


def cut_to_width(text: str, columns: int) -> str:
    """Return the text on one line of a terminal: a line that wraps could not be erased."""
    return text if len(text) < columns else text[: max(0, columns - 2)] + "…"


def split_share(text: str) -> tuple[str, int | None]:
    """Split `loading weights 40 %` → (`loading weights`, 40); without a share (text, None)."""
    found = SHARE.search(text)
    if found is None:
        return text, None
    return (text[: found.start()] + text[found.end() :]).strip(" :,-"), min(100, int(found.group(1)))


def with_bar(text: str) -> str:
    """Return the text with its share drawn as a bar."""
    phase, share = split_share(text)
    if not share:
        return phase
    filled = BAR_CELLS * share // 100
    return f"{phase:<20} {'█' * filled}{'░' * (BAR_CELLS - filled)} {share:3d} %"
