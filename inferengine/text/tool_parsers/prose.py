"""The text around the calls of an output, as it is shown: white space next to a call belongs to the call's format."""

from __future__ import annotations

from inferengine.text.tool_parsers.base import Content, Part


class Prose:
    """Holds white space back until it is known whether a call follows it."""

    def __init__(self) -> None:
        self._space = ""
        self._after_call = False

    def show(self, text: str, parts: list[Part]) -> None:
        """Take text outside of calls."""
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._after_call = False
            parts.append(Content(shown))

    def begin_call(self) -> None:
        """Drop the white space before a call."""
        self._space = ""

    def end_call(self) -> None:
        """Drop the white space after a call."""
        self._after_call = True

    def finish(self, parts: list[Part]) -> None:
        """Nothing follows: what was held back is shown."""
        if self._space:
            parts.append(Content(self._space))
        self._space = ""
