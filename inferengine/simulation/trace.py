"""TraceWorkload: recorded requests, one JSON object a line.

Two forms, told apart by their keys, which may carry more keys than these:
- `{"arrival_s": 0.25, "prompt_tokens": 128, "output_tokens": 40}`, with `tenant`, `priority`, `prefix` (any string:
  lines with the same one share their first `prefix_tokens` tokens) where known;
- Mooncake's (Qin et al., "Mooncake: a KVCache-centric disaggregated architecture", 2024):
  `{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`, timestamps in
  milliseconds, each hash id naming the content of 512 tokens.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inferengine.errors import ConfigError
from inferengine.simulation.workload import Arrival

HASH_ID_TOKENS = 512
_MASK = 0x7FFFFFFF


class TraceWorkload:
    """Implements `Workload`. The file is read line by line: it may be larger than memory."""

    def __init__(self, path: Path, *, speed: float = 1.0, max_tokens: int = 1 << 31, limit: int = 0) -> None:
        """`speed` 2 lets everything arrive twice as fast; `limit` stops after so many requests (0: never). Prompts and
        outputs over `max_tokens` together are cut, as the engine would refuse them."""
        if speed <= 0:
            raise ConfigError("--speed", "must be above 0")
        if not path.is_file():
            raise ConfigError("--trace", f"no such file: {path}")
        self._path, self._speed, self._max_tokens, self._limit = path, speed, max_tokens, limit
        self.num_cut = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Raises ConfigError naming the line that is no request, or goes back in time."""
        uid, last = 0, 0.0
        with self._path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                uid += 1
                if self._limit and uid > self._limit:
                    return
                arrival = self._read(line, number, uid)
                if arrival.arrival_s < last:
                    raise ConfigError("--trace", f"line {number} arrives before the line above it: sort the file")
                last = arrival.arrival_s
                yield arrival

    def follow_up(self, arrival: Arrival, now: float) -> Arrival | None:
        """A recorded trace knows its own times."""
        return None

    def _read(self, line: str, number: int, uid: int) -> Arrival:
        try:
            item = json.loads(line)
            if "hash_ids" in item or "timestamp" in item:
                time_s, num_prompt = float(item["timestamp"]) / 1e3, int(item["input_length"])
                num_output = int(item["output_length"])
                prompt = _from_hash_ids(item.get("hash_ids", []), num_prompt, uid)
            else:
                time_s, num_prompt = float(item["arrival_s"]), int(item["prompt_tokens"])
                num_output = int(item["output_tokens"])
                prompt = _with_prefix(item, num_prompt, uid)
            if num_prompt < 1 or num_output < 1 or time_s < 0:
                raise ValueError("lengths must be at least 1 and times at least 0")
        except (ValueError, KeyError, TypeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError("--trace", f"line {number} is no request: {what}") from None
        if num_prompt + num_output > self._max_tokens:
            self.num_cut += 1
            prompt = prompt[: self._max_tokens - 1]
            num_output = min(num_output, self._max_tokens - len(prompt))
        return Arrival(
            uid=uid,
            arrival_s=time_s / self._speed,
            prompt_ids=prompt,
            num_output=num_output,
            seed=uid & _MASK,
            tenant=str(item.get("tenant", "")),
            priority=int(item.get("priority", 0)),
        )


def _from_hash_ids(hash_ids: list[int], length: int, uid: int) -> array[int]:
    ids = array("I")
    for hash_id in hash_ids:
        begin = (int(hash_id) * HASH_ID_TOKENS) & _MASK
        ids.extend(range(begin, begin + HASH_ID_TOKENS))
    return ids[:length] + _own(length - len(ids), uid)


def _with_prefix(item: Mapping[str, Any], length: int, uid: int) -> array[int]:
    shared = min(length, int(item.get("prefix_tokens", 0))) if "prefix" in item else 0
    return _own(shared, zlib.crc32(str(item.get("prefix", "")).encode()) | 1 << 32) + _own(length - shared, uid)


def _own(length: int, name: int) -> array[int]:
    """`length` tokens that only this name has."""
    if length <= 0:
        return array("I")
    begin = (name * 2654435761) & _MASK
    return array("I", range(begin, begin + length))
