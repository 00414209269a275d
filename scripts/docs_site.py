"""What mkdocs does beside its own work: pages from outside docs/, links to them, and Markdown as GitHub reads it.

The same files are read on GitHub and on the site. So links stay relative to the files in the repository: a link to a
page of the site is made one, and a link to any other file becomes that file's name. A list may follow a paragraph
without an empty line, and is nested by two spaces.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # of the site, and the files that they are
    "wire.md": ROOT / "inferengine" / "wire" / "PROTOCOL.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "security.md": ROOT / "SECURITY.md",
    "changelog.md": ROOT / "CHANGELOG.md",
}
_FENCE = re.compile(r"^( *)(```|~~~)")
_ITEM = re.compile(r"^( *)([-*+]|\d+\.) ")
_LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^][]*\])+)\]\((?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for name, path in PAGES.items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return a page's Markdown as mkdocs reads it."""
    docs = Path(config["docs_dir"])
    name = page.file.src_uri
    source = PAGES.get(name, docs / name)
    text = "\n".join(_lists(markdown.split("\n")))
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)  # text and blocks by turns
    parts[::2] = [_LINK.sub(lambda link: _relinked(link, source, name, docs), part) for part in parts[::2]]
    return "".join(parts)


def _relinked(link: re.Match[str], source: Path, page: str, docs: Path) -> str:
    text, path, anchor = link[1], link[2], link[3] or ""
    target = (source.parent / path).resolve()
    outside = {str(file): name for name, file in PAGES.items()}
    if str(target) in outside:
        goal = outside[str(target)]
    elif target.is_relative_to(docs):
        goal = target.relative_to(docs).as_posix()
    elif target == ROOT / "README.md":
        goal = "index.md"
    elif target.exists():
        name = target.relative_to(ROOT).as_posix()
        return text if name in text else f"{text} (`{name}`)"
    else:
        return link[0]  # mkdocs warns
    return f"[{text}]({os.path.relpath(goal, os.path.dirname(page) or '.')}{anchor})"


def _lists(lines: list[str]) -> list[str]:
    """Put an empty line before lists, and nest them by four spaces."""
    made: list[str] = []
    fenced, in_list = False, False
    for line in lines:
        if _FENCE.match(line):
            fenced = not fenced
        item = None if fenced else _ITEM.match(line)
        if item is not None and not in_list and made and made[-1].strip():
            made.append("")
        if item is not None:
            in_list = True
        elif not line.strip() or (not fenced and not line.startswith(" ")):
            in_list = in_list and not line.strip()
        if in_list and line.startswith(" ") and not fenced:
            line = " " * (2 * (len(line) - len(line.lstrip()))) + line.lstrip()
        made.append(line)
    return made
