"""What the masks of a step cost the host: rows under one grammar, with a vocabulary of 128,000 tokens of words.

python -m benchmarks.masks [--rows 64] [--threads 1 2] [--json FILE]

Threads 1: one lexer for all rows, one after the other. More: so many lexers at most, followed at the same time.
`mask_ms` is the time of all masks of a step without a device beside it, `busiest_ms` the processor time of the thread
that had most of it: what a step takes where every thread has a core. `other_ms` is what follows the draws: taking the
token, asking for the end and for forced tokens. Tokens are drawn at random from those that the mask allows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import string
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.structured import GRAMMARS
from inferengine.bench.environment import write_result
from inferengine.core.constraints import MaskThreads
from inferengine.structured_output.compiler import GrammarCompiler
from inferengine.structured_output.matcher import TokenMatcher
from inferengine.structured_output.spec import GrammarSpec

VOCABULARY = 128_000
SPECS = {
    "[a-z ]+": GrammarSpec("regex", "[a-z ]+"),
    "[a-z ]{1,500}": GrammarSpec("regex", "[a-z ]{1,500}"),
    "([a-z]{1,9}[ ,]){1000}": GRAMMARS["regex"],
    "JSON schema": GRAMMARS["schema"],
    "any JSON": GRAMMARS["json"],
}


def tokenizer_json() -> str:
    """Return a tokenizer of 256 bytes, and words of three and four letters with a space before them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = (chr(256 + place) for place in itertools.count())
    letters = [chr(byte) if byte in plain else next(other) for byte in range(256)]
    vocab = {letter: index for index, letter in enumerate(letters)}
    words = (word for length in (3, 4) for word in itertools.product(string.ascii_lowercase, repeat=length))
    vocab |= {"Ġ" + "".join(word): 256 + place for place, word in enumerate(itertools.islice(words, VOCABULARY - 257))}
    end = {"content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": VOCABULARY - 1, "special": True, **end}],
            "normalizer": None,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False},
        }
    )


def measure(spec: GrammarSpec, tokenizer: str, rows: int, num_threads: int, steps: int) -> dict[str, Any]:
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCABULARY, eos_token_ids=[VOCABULARY - 1], max_lexers=num_threads)
    draw = random.Random(0)
    matchers = [compiler.compile(spec) for _ in range(rows)]
    threads = MaskThreads(time.thread_time, num_threads)
    words = VOCABULARY // 32
    masks = memoryview(bytearray(4 * words * rows))
    groups: dict[object, list[int]] = {}
    for row, matcher in enumerate(matchers):
        groups.setdefault(matcher.lexer, []).append(row)

    busy_s: Counter[int] = Counter()  # by thread

    def fill(group: list[int]) -> None:
        begin = time.thread_time()
        for row in group:
            matchers[row].fill_bitmask(masks[4 * words * row : 4 * words * (row + 1)])
        busy_s[threading.get_ident()] += time.thread_time() - begin

    mask_s: list[float] = []
    busiest_s: list[float] = []
    other_s: list[float] = []
    for _ in range(steps):
        busy_s.clear()
        mask_s.append(timed(lambda: threads.run(fill, list(groups.values()))))
        busiest_s.append(max(busy_s.values()))
        tokens = [some_token(masks[4 * words * row : 4 * words * (row + 1)], draw) for row in range(rows)]
        other_s.append(timed(lambda tokens=tokens: follow(matchers, tokens)))  # type: ignore[misc]
    compiler.close()
    return {
        "lexers": len(groups),
        "mask_ms_first": round(1e3 * mask_s[0], 3),
        "mask_ms_p50": round(1e3 * statistics.median(mask_s), 3),
        "mask_ms_max": round(1e3 * max(mask_s), 3),
        "busiest_ms_p50": round(1e3 * statistics.median(busiest_s), 3),
        "other_ms_p50": round(1e3 * statistics.median(other_s), 3),
    }


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def follow(matchers: list[TokenMatcher], tokens: list[int]) -> None:
    for matcher, token in zip(matchers, tokens, strict=True):
        if not matcher.accept(token):
            raise SystemExit("a token that the mask allows was refused")
        if not matcher.is_terminated():
            for forced in matcher.forced():
                matcher.accept(forced)


def some_token(mask: memoryview, draw: random.Random) -> int:
    allowed = int.from_bytes(mask, "little") & ~(1 << (VOCABULARY - 1))
    place = draw.randrange(allowed.bit_length())
    rest = (allowed >> place) << place or allowed
    return (rest & -rest).bit_length() - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = tokenizer_json()
    rows: list[dict[str, Any]] = []
    for name, spec in SPECS.items():
        for num_threads in arguments.threads:
            figures = measure(spec, tokenizer, arguments.rows, num_threads, arguments.steps)
            rows.append({"grammar": name, "rows": arguments.rows, "threads": num_threads, **figures})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()}
        document = {"benchmark": "masks", "machine": machine, "vocabulary": VOCABULARY, "rows": rows}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
