"""The documents as a site: every page has its place, every link its goal, and what is made of the code is up to date.

`scripts/docs` builds it with mkdocs, which CI's other workflow does; here is what that would find most often.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from inferengine.errors import KINDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = {  # as scripts/docs_site.py has them
    "wire.md": ROOT / "inferengine" / "wire" / "PROTOCOL.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "security.md": ROOT / "SECURITY.md",
    "changelog.md": ROOT / "CHANGELOG.md",
}
PAGES = [ROOT / "README.md", *OUTSIDE.values(), *sorted(DOCS.rglob("*.md"))]
_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)")


def script(name: str) -> ModuleType:
    """Return a program of scripts/ as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def leaves(nav: Any) -> Iterator[str]:
    """Yield the pages of the navigation."""
    for item in nav.values() if isinstance(nav, dict) else nav:
        yield from [item] if isinstance(item, str) else leaves(item)


def without_code(text: str) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as both GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_page_has_its_place_in_the_navigation() -> None:
    placed = list(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(OUTSIDE)
    assert sorted(placed) == sorted(there)


def test_the_pages_from_outside_are_those_of_the_site() -> None:
    text = (ROOT / "scripts" / "docs_site.py").read_text(encoding="utf-8")
    listed = dict(re.findall(r'^    "(\w+\.md)": ROOT / (.*),$', text, re.MULTILINE))
    expected = {name: path.relative_to(ROOT).as_posix() for name, path in OUTSIDE.items()}
    assert {name: path.replace('"', "").replace(" / ", "/") for name, path in listed.items()} == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_link_into_a_page_leads_to_a_heading(page: Path) -> None:
    links = _LINK.findall(without_code(page.read_text(encoding="utf-8")))
    goals = [(Path(os.path.normpath(page.parent / path)) if path else page, anchor) for path, anchor in links]
    assert [(goal.name, anchor) for goal, anchor in goals if anchor not in anchors(goal)] == []


def test_what_is_made_of_the_code_is_up_to_date() -> None:
    made = script("reference").PAGES
    stale = [name for name, make in made.items() if (DOCS / name).read_text(encoding="utf-8") != make()]
    assert stale == [], "run scripts/reference"


def test_troubleshooting_has_a_section_for_each_error_code() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `(\w+)`$", text, re.MULTILINE) == list(KINDS)


def test_every_block_of_the_first_pages_is_run_or_says_why_not() -> None:
    runner = script("run_documents")
    blocks = [block for path in runner.PAGES for block in runner.blocks_of(path)]
    assert [block for block in blocks if block.language not in ("sh", "python", "text", "")] == []
    assert len([block for block in blocks if not block.mark.startswith("not run:")]) > 20
