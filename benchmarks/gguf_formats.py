"""The embedded model as GGUF in several formats: held-out loss, size, and what a decode step costs on the CPU.

python -m benchmarks.gguf_formats [--formats F16 Q8_0 Q4_K_M] [--loss 120] [--rounds 30] [--json FILE]

Files are written with the package `gguf`. It has no quantizers for the K formats; those here round to nearest, where
llama.cpp's search for better scales. Where rows are no multiple of 256 the K formats do not fit, and the types that
llama.cpp falls back to are taken: Q5_0 for Q4_K, Q8_0 for Q6_K. `types` in the result says of what each file is made.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from benchmarks.int8_cpu import Timed
from inferengine.bench.environment import version, write_result
from inferengine.config import load
from inferengine.config.model_path import EMBEDDED
from inferengine.gguf.reader import read_gguf
from scripts.embedded.quantized import losses

FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
SUPERBLOCK = 256


def type_of(name: str, columns: int, mix: str) -> str:
    """Return the type of a matrix in a mix, as llama.cpp's tool chooses it; half of the layers are not told apart."""
    if mix != "Q4_K_M":
        return mix
    wanted = "Q6_K" if "attn_v" in name or "ffn_down" in name or "token_embd" in name else "Q4_K"
    return FALLBACK[wanted] if columns % SUPERBLOCK else wanted


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """Quantize to the bytes [N, bytes of a row] of a type."""
    if kind not in FALLBACK:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    blocks = values.reshape(len(values), -1, SUPERBLOCK)
    return (_q4_k if kind == "Q4_K" else _q6_k)(blocks).reshape(len(values), -1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Quantize to codes of 4 bits with a scale and a min of 6 bits for each 32 weights."""
    groups = blocks.reshape(*blocks.shape[:2], 8, 32)
    least = np.minimum(groups.min(-1), 0.0)
    wide, low = (groups.max(-1) - least) / 15.0, -least
    scale, least_scale = ((part.max(-1, keepdims=True) / 63.0).astype(np.float16) for part in (wide, low))
    scales, mins = (
        np.rint(part / np.maximum(whole.astype(np.float32), 1e-12)).clip(0, 63).astype(np.uint8)
        for part, whole in ((wide, scale), (low, least_scale))
    )
    step = scale.astype(np.float32) * scales
    offset = least_scale.astype(np.float32) * mins
    codes = np.rint((groups + offset[..., None]) / np.maximum(step, 1e-12)[..., None]).clip(0, 15).astype(np.uint8)
    pairs = codes.reshape(*blocks.shape[:2], 4, 2, 32)
    packed = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*blocks.shape[:2], 128)
    first = [part[..., :4] & 63 | part[..., 4:] >> 4 << 6 for part in (scales, mins)]
    rest = scales[..., 4:] & 15 | (mins[..., 4:] & 15) << 4
    return np.concatenate([scale.view(np.uint8), least_scale.view(np.uint8), *first, rest, packed], -1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Quantize to codes of 6 bits with a scale of 8 bits for each 16 weights."""
    groups = blocks.reshape(*blocks.shape[:2], 16, 16)
    wide = np.abs(groups).max(-1) / 31.0
    scale = (wide.max(-1, keepdims=True) / 127.0).astype(np.float16)
    scales = np.rint(wide / np.maximum(scale.astype(np.float32), 1e-12)).clip(0, 127).astype(np.int8)
    step = np.maximum(scale.astype(np.float32) * scales, 1e-12)[..., None]
    codes = (np.rint(groups / step).clip(-32, 31) + 32).astype(np.uint8)
    halves = codes.reshape(*blocks.shape[:2], 2, 4, 32)
    low, high = halves & 15, halves >> 4
    nibbles = np.concatenate([low[..., 0, :] | low[..., 2, :] << 4, low[..., 1, :] | low[..., 3, :] << 4], -1)
    pairs = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    flat = (*blocks.shape[:2], -1)
    return np.concatenate([nibbles.reshape(flat), pairs.reshape(flat), scales.view(np.uint8), scale.view(np.uint8)], -1)


def export(folder: Path, path: Path, mix: str) -> Counter[str]:
    """Write a Llama checkpoint folder as GGUF, and return how many weights are of which type."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_string("tokenizer.huggingface.json", json.dumps(tokenizer))
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    counts: Counter[str] = Counter()
    for name, tensor in load_file(folder / "model.safetensors").items():
        there, values = names.get_name(name, try_suffixes=(".weight",)), tensor.float().numpy()
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        if count := heads.get(name.split(".")[-2]):  # the halves of each head in turn
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = "F32" if values.ndim == 1 else type_of(there, values.shape[1], mix)
        counts[kind] += values.size
        writer.add_tensor(there, quantize(values, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return counts


def decode_ms(path: str, rounds: int, threads: int) -> dict[str, float]:
    """Return the median milliseconds of a decode step of one sequence, and of this thread's CPU time."""
    config = load().with_values(
        model={"path": path},
        engine={"device": "cpu", "threads": threads, "max_num_seqs": 1},
        cache={"num_blocks": 40},
        speculation={"method": "none"},
    )
    timed = Timed(config, 1, prompt=32, num_tokens=200)
    for _ in range(rounds):
        timed.run(10)
    wall, cpu = statistics.median(timed.wall_ms), statistics.median(timed.cpu_ms)
    return {"wall_ms": round(wall, 3), "cpu_ms": round(cpu, 3), "tokens_per_cpu_s": round(1e3 / cpu, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["F16", "Q8_0", "Q5_0", "Q4_0", "Q4_K_M"])
    parser.add_argument("--loss", type=int, default=120, metavar="DOCUMENTS")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows: list[dict[str, Any]] = [
            {"format": "safetensors, fp32", **decode_ms("", arguments.rounds, arguments.threads)}
        ]
        formats: dict[str, dict[str, dict[str, str]]] = {"safetensors, fp32": {}}
        for mix in arguments.formats:
            path = Path(scratch) / f"{mix}.gguf"
            counts = export(EMBEDDED, path, mix)
            weights = sum(info.num_bytes for info in read_gguf(path).tensors.values())
            row = {"format": mix, "types": dict(counts), "weight_bytes": weights}
            rows.append({**row, **decode_ms(str(path), arguments.rounds, arguments.threads)})
            formats[mix] = {"model": {"path": str(path)}}
        for row in rows:
            print(json.dumps(row), flush=True)
        loss = losses(EMBEDDED, arguments.loss, formats)
        print(json.dumps(loss), flush=True)
    if arguments.json:
        about = {"machine": platform.machine(), "threads": arguments.threads, "gguf": version("gguf")}
        document = {"benchmark": "gguf_formats", "rows": rows, "held_out_loss": loss, "environment": about}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
