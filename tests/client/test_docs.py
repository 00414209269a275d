"""docs/clients.md: every block runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferengine.client.requests import SubmitOptions
from inferengine.engine.service import EngineService
from tests.engine.builders import address_of, check_idle
from tests.engine.test_tokenization import run_script

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TEXT = "the quick brown fox jumps over the lazy dog "


@pytest.fixture
def engine() -> Iterator[EngineService]:
    with run_script(TEXT, step_s=0.002) as engine:
        yield engine


@pytest.mark.parametrize(("place", "printed"), [(0, TEXT[:20]), (1, f"['{TEXT[:20]}"), (2, TEXT[:20])])
def test_a_block_prints_what_the_engine_says(
    engine: EngineService, capsys: pytest.CaptureFixture[str], place: int, printed: str
) -> None:
    program = compile(BLOCKS[place], f"docs/clients.md block {place}", "exec")
    exec(program, {"address": address_of(engine), "__name__": "example"})  # the page's own words  # noqa: S102
    assert capsys.readouterr().out.startswith(printed)
    check_idle(engine)


def test_every_keyword_of_submit_is_on_the_page() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.partition("## What submit takes")[2].partition("## Reading on")[0]))
    assert set(SubmitOptions.__annotations__) - {"text", "messages"} <= named
