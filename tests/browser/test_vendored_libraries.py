"""The libraries of the chat page and of the API pages are the published files, and each comes with its license."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from frontends.http.routes.pages import VENDOR as API_PAGES
from frontends.websocket.app import FOLDER

CHAT_PAGE = FOLDER / "vendor"
MANIFESTS = {folder: json.loads((folder / "manifest.json").read_text()) for folder in (CHAT_PAGE, API_PAGES)}
LIBRARIES = [(folder, library) for folder, manifest in MANIFESTS.items() for library in manifest["libraries"]]
FILES = {folder / path: file["sha256"] for folder, library in LIBRARIES for path, file in library["files"].items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_vendored_file_has_the_listed_hash(path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FILES[path]


def test_every_vendored_file_is_listed() -> None:
    on_disk = {path for folder in MANIFESTS for path in folder.rglob("*") if path.is_file()}
    assert {path for path in on_disk if path.name not in ("manifest.json", "README.md")} == set(FILES)


@pytest.mark.parametrize(
    ("folder", "library"), LIBRARIES, ids=lambda part: part.get("name") if isinstance(part, dict) else ""
)
def test_a_vendored_library_has_its_license_and_is_in_the_readme(folder: Path, library: dict[str, str]) -> None:
    assert library["license_file"] in library["files"]
    text = (folder / library["license_file"]).read_text()
    assert "Copyright" in text or "copyright" in text
    name, version = library["source"].rpartition("/")[2].removesuffix(".tgz").rsplit("-", 1)
    assert (library["name"].rpartition("/")[2], library["version"]) == (name, version)
    assert f"| {version}" in (folder / "README.md").read_text()
    assert library["integrity"].startswith("sha512-")


@pytest.mark.parametrize(("folder", "most"), [(CHAT_PAGE, 900_000), (API_PAGES, 3_200_000)], ids=["chat", "api"])
def test_the_vendored_files_stay_small(folder: Path, most: int) -> None:
    """They are in the wheel, and the websocket front end keeps the chat page's in memory."""
    assert sum(path.stat().st_size for path in FILES if folder in path.parents) < most
