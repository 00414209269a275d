"""The bytes of every message, as they were when the protocol was written down. They never change within a major."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import inferengine.wire
from inferengine.wire import messages
from inferengine.wire.messages import Kind
from tests.wire.messages import EXAMPLES, GOLDEN


def golden_frames(name: str) -> list[bytes]:
    lines = (GOLDEN / f"{name}.hex").read_text(encoding="ascii").splitlines()
    return [bytes.fromhex(line) for line in lines]


@pytest.mark.parametrize("name", EXAMPLES)
def test_encoding_gives_the_golden_bytes(name: str) -> None:
    assert messages.encode(EXAMPLES[name]) == golden_frames(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_decoding_golden_bytes_gives_the_message(name: str) -> None:
    assert messages.decode(golden_frames(name)) == EXAMPLES[name]


def test_every_kind_has_an_example_and_every_file_is_used() -> None:
    kinds = {value for key, value in vars(Kind).items() if not key.startswith("_")}
    assert {messages.encode(message)[0][3] for message in EXAMPLES.values()} == kinds
    assert {path.stem for path in GOLDEN.glob("*.hex")} == set(EXAMPLES)


def test_the_page_names_every_kind_with_its_number() -> None:
    page = (Path(inferengine.wire.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")
    listed = {(int(number), name) for number, name in re.findall(r"^\| (\d+) \| (\w+) \|", page, re.MULTILINE)}
    named = {(value, key.removesuffix("_FILES")) for key, value in vars(Kind).items() if not key.startswith("_")}
    assert listed == named
