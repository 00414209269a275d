"""The held-out loss of a checkpoint in every number format that the engine offers, through the engine itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional

from inferengine.config import Config
from inferengine.engine.process import build_executor
from inferengine.executor.tools.compare_hf import Probe
from inferengine.quantization.schemes import MADE

from .example import Split
from .packing import packed_chunk

HELD_OUT_CHUNK = 0
BUDGET = 512  # tokens of a chunk
FORMATS: dict[str, dict[str, dict[str, str]]] = {
    "float32": {},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    **{scheme: {"model": {"quantization": scheme}} for scheme in MADE},
    "KV cache fp8": {"cache": {"dtype": "fp8"}},
    "int8, KV cache fp8": {"model": {"quantization": "int8"}, "cache": {"dtype": "fp8"}},
    "onnx float32": {"engine": {"executor": "onnx"}},
    "onnx int8_w8a8": {"engine": {"executor": "onnx"}, "model": {"quantization": "int8_w8a8"}},
}


def losses(folder: Path, documents: int, formats: dict[str, dict[str, dict[str, str]]] | None = None) -> dict[str, Any]:
    """Measure the nats per learned token of the first `documents` held-out documents, by number format (FORMATS), on
    the CPU."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids, learned = packed_chunk(tokenizer, HELD_OUT_CHUNK, Split.HELD_OUT, documents)
    rows = [torch.from_numpy(row.astype("int64")) for row in ids]
    marks = [torch.from_numpy(row[1:].astype("bool")) for row in learned]
    report = {name: _loss(folder, rows, marks, sections) for name, sections in (formats or FORMATS).items()}
    return {"documents": documents, "tokens": int(sum(mark.sum() for mark in marks)), "nats_per_token": report}


def _loss(
    folder: Path, rows: list[torch.Tensor], marks: list[torch.Tensor], sections: dict[str, dict[str, str]]
) -> float:
    config = Config().with_values(
        model={"path": str(folder), **sections.get("model", {})},
        engine={"device": "cpu", "max_num_seqs": 1, "max_num_batched_tokens": BUDGET, **sections.get("engine", {})},
        cache={"num_blocks": 160, **sections.get("cache", {})},
    )
    executor = build_executor(config)
    executor.load(lambda phase, share: None)
    probe, total, tokens = Probe(executor), 0.0, 0
    for row, mark in zip(rows, marks, strict=True):
        logits = probe.logits(row[:-1].tolist())
        nats = functional.cross_entropy(logits, row[1:], reduction="none")
        total += float(nats[mark].sum())
        tokens += int(mark.sum())
    executor.close()
    return total / tokens
