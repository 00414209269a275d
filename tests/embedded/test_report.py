"""docs/embedded_model.md is what the training reported, and nothing else."""

from __future__ import annotations

from pathlib import Path

from scripts.embedded import report

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "inferengine" / "assets"


def test_the_page_is_the_evaluation_of_the_shipped_model() -> None:
    assert (ROOT / "docs" / "embedded_model.md").read_text() == report.render(ASSETS).rstrip("\n") + "\n"


def test_the_shipped_files_are_as_small_as_promised() -> None:
    sizes = [(ASSETS / name / "model.safetensors").stat().st_size for name in ("embedded", "embedded-draft")]
    assert sizes[0] <= 24_000_000
    assert sizes[1] <= 4_000_000
    tokenizers = [(ASSETS / name / "tokenizer.json").read_bytes() for name in ("embedded", "embedded-draft")]
    assert tokenizers[0] == tokenizers[1]
