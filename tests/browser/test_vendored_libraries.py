"""The chat page's libraries are the published files, and each comes with its license."""

from __future__ import annotations

import hashlib
import json

import pytest

from frontends.websocket.static_files import FOLDER

VENDOR = FOLDER / "vendor"
LIBRARIES = json.loads((VENDOR / "manifest.json").read_text())["libraries"]
FILES = {path: file["sha256"] for library in LIBRARIES for path, file in library["files"].items()}


@pytest.mark.parametrize("path", FILES)
def test_a_vendored_file_has_the_listed_hash(path):
    assert hashlib.sha256((VENDOR / path).read_bytes()).hexdigest() == FILES[path]


def test_every_vendored_file_is_listed():
    on_disk = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    assert on_disk - {"manifest.json", "README.md"} == set(FILES)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library["name"])
def test_a_vendored_library_has_its_license_and_is_in_the_readme(library):
    assert library["license_file"] in library["files"]
    text = (VENDOR / library["license_file"]).read_text()
    assert "Copyright" in text or "copyright" in text
    name, version = library["source"].rpartition("/")[2].removesuffix(".tgz").rsplit("-", 1)
    assert (library["name"].rpartition("/")[2], library["version"]) == (name, version)
    assert f"| {version}" in (VENDOR / "README.md").read_text()
    assert library["integrity"].startswith("sha512-")


def test_the_vendored_files_stay_small():
    """900 kB: they are in the wheel, and the front end keeps them in memory."""
    assert sum((VENDOR / path).stat().st_size for path in FILES) < 900_000
