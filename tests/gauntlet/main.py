"""The gauntlet: random requests over the whole feature space, each held against the same request alone.

  scripts/gauntlet --seconds 600                    ten minutes, another configuration and model every round
  scripts/gauntlet --seed 7 --rounds 1              the first round of seed 7 again
  scripts/gauntlet --replay found/0.json            a round from a file, as a failure leaves it
  scripts/gauntlet --config speculation.method=auto --model embedded
  scripts/gauntlet --device cuda --dtype bfloat16   teacher-forced margins against fp32

Every failure is shrunk and written to --found as JSON. The exit code is 0 when there was none.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.gauntlet import rounds
from tests.gauntlet.asks import Ask
from tests.gauntlet.checkpoints import ADAPTER, MODELS
from tests.gauntlet.judging import Judge, Verdict
from tests.gauntlet.rounds import Round
from tests.gauntlet.shrinker import shrink

EMBEDDED_SHARE = 0.6  # of the rounds where the model is drawn


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gauntlet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=None, help="of everything that is drawn; another each time without")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no round after so long")
    parser.add_argument("--rounds", type=int, default=0, help="so many rounds at most; 0: as the time allows")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="begin with this round of the seed")
    parser.add_argument("--span", type=float, default=4.0, help="seconds in which a round's requests come")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second")
    parser.add_argument("--model", default="", choices=["", *MODELS], help="of every round; drawn without")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="a setting of every round")
    parser.add_argument("--only", action="append", default=[], metavar="WAY", help="wire, http, http-stream, ws")
    parser.add_argument("--no-kills", action="store_true", help="never kill the engine")
    parser.add_argument(
        "--kills-are-seen", action="store_true", help="requests of a killed engine may end with an error"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--no-transformers", action="store_true", help="hold requests against the plain engine alone")
    parser.add_argument("--longest-gap", type=float, default=5.0, help="seconds between two tokens, before a warning")
    parser.add_argument("--gaps-fail", action="store_true", help="such a gap is a failure")
    parser.add_argument("--shrink-seconds", type=float, default=120.0, help="for each failure; 0: do not shrink")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument("--found", type=Path, default=Path("gauntlet-found"), help="folder for failures")
    parser.add_argument("--replay", type=Path, default=None, help="run this file's round and nothing else")
    parser.add_argument("--shrink", action="store_true", help="shrink a replay that fails")
    parser.add_argument("--tries", type=int, default=1, help="of a replay: until it fails")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the service goes too
    with tempfile.TemporaryDirectory(prefix="gauntlet-") as work:
        judge = Judge(
            Path(work),
            device=options.device,
            dtype=options.dtype,
            longest_gap_s=options.longest_gap,
            kills_are_seen=options.kills_are_seen,
            use_transformers=not options.no_transformers,
        )
        try:
            return replay(options, judge) if options.replay else gauntlet(options, judge)
        finally:
            judge.close()


@dataclass
class Totals:
    """Over all rounds."""

    rounds: int = 0
    requests: int = 0
    judged: int = 0
    tokens: int = 0
    failed: int = 0

    def add(self, verdict: Verdict) -> None:
        self.rounds += 1
        self.requests += verdict.num_requests
        self.judged += verdict.num_judged
        self.tokens += verdict.num_tokens
        self.failed += not verdict.passed

    def line(self, seed: int, seconds: float) -> str:
        return (
            f"gauntlet: {'FAIL' if self.failed else 'PASS'}: seed {seed}, {self.rounds} rounds in {seconds:.0f} s, "
            f"{self.requests} requests ({self.judged} held against the plain engine), {self.tokens} tokens, "
            f"{self.failed} rounds with differences"
        )


def gauntlet(options: argparse.Namespace, judge: Judge) -> int:
    """Run rounds until the time is over."""
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"gauntlet: seed {seed}", flush=True)
    started, totals = time.monotonic(), Totals()
    while time.monotonic() - started < options.seconds and not (options.rounds and totals.rounds >= options.rounds):
        number = totals.rounds + options.first
        one = draw(options, judge, seed, number)
        verdict = judge.run(one)
        if options.gaps_fail and verdict.warnings:
            verdict.differences.setdefault(None, []).extend(f"gap: {line}" for line in verdict.warnings)
        tell(f"round {number}", one, verdict)
        totals.add(verdict)
        if not verdict.passed:
            note = f"seed {seed}, round {number}, found after {time.monotonic() - started:.0f} s"
            print(f"  {note}", flush=True)
            keep(options, judge, one, verdict, note, number)
            if not options.keep_going:
                break
    print(totals.line(seed, time.monotonic() - started), flush=True)
    return 1 if totals.failed else 0


def draw(options: argparse.Namespace, judge: Judge, seed: int, number: int) -> Round:
    """Round `number` of a seed: the same again whatever came before."""
    rng = random.Random(f"{seed}-{number}")
    model = rng.choice(MODELS[1:]) if rng.random() > EMBEDDED_SHARE else "embedded"
    model = options.model or ("embedded" if options.device == "cuda" else model)  # the kernels want heads of 64 or more
    checkpoint = judge.checkpoint(model)
    fixed = dict(_setting(text) for text in options.config)
    one = rounds.draw_round(
        rng, model=model, adapters=(ADAPTER,), vocab_size=checkpoint.vocab_size, device=options.device,
        span_s=options.span, rate=options.rate, fixed=fixed, kills=not options.no_kills,
    )  # fmt: skip
    if options.only:
        one = replace(one, asks=tuple(ask for ask in one.asks if ask.way in options.only))
    return one


def keep(options: argparse.Namespace, judge: Judge, one: Round, verdict: Verdict, note: str, number: int) -> None:
    """Shrink a failure, write it down and show it."""
    options.found.mkdir(parents=True, exist_ok=True)
    whole = options.found / f"{number}-whole.json"
    whole.write_text(replace(one, notes=(note, *lines_of(verdict))).to_json())
    path = whole
    if options.shrink_seconds and verdict.kinds:
        smallest, last = one, verdict

        def runs(candidate: Round) -> set[str]:
            nonlocal last, smallest
            verdict = judge.run(candidate, reuse=not candidate.kills_s)
            if verdict.kinds & kinds and len(candidate.asks) <= len(smallest.asks):
                smallest, last = candidate, verdict
            return verdict.kinds

        kinds = verdict.kinds
        small = shrink(one, kinds, runs, seconds=options.shrink_seconds)
        judge.leave()
        path = options.found / f"{number}.json"
        text = replace(small, notes=(note, *lines_of(last))).to_json()
        path.write_text(text)
        print(f"  shrunk to {len(small.asks)} of {len(one.asks)} requests:\n{text[:6000]}", flush=True)
    print(f"  again: scripts/gauntlet --replay {path} --tries 5", flush=True)


def replay(options: argparse.Namespace, judge: Judge) -> int:
    """Run a round of a file until it fails or has been tried often enough."""
    one = rounds.read(options.replay)
    for number in range(options.tries):
        verdict = judge.run(one, reuse=not one.kills_s)
        tell(f"try {number}", one, verdict)
        if not verdict.passed:
            if options.shrink:
                keep(options, judge, one, verdict, one.notes[0] if one.notes else "", 0)
            return 1
    return 0


def tell(title: str, one: Round, verdict: Verdict) -> None:
    """Print one line of a round, and its differences."""
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in verdict.seconds.items())
    figures = ", ".join(f"{value} {name}" for name, value in verdict.figures.items())
    word = "passed" if verdict.passed else "FAILED"
    kills = f", {len(one.kills_s)} kills" if one.kills_s else ""
    print(
        f"{title}: {word}: {one.model}, {verdict.num_requests} requests, {verdict.num_tokens} tokens, "
        f"{figures}{kills} ({seconds})",
        flush=True,
    )
    for line in verdict.warnings[:5]:
        print(f"  warning: {line}", flush=True)
    if not verdict.passed:
        print(f"  {verdict.command}")
        asks: dict[Any, Ask] = {ask.name: ask for ask in one.asks}
        for name, lines in list(verdict.differences.items())[:8]:
            print(f"  request {name}: {'; '.join(lines)[:1500]}")
            if name in asks:
                print(f"    {str(asks[name].to_map())[:600]}", flush=True)


def lines_of(verdict: Verdict) -> list[str]:
    return [f"request {name}: {line}"[:600] for name, lines in verdict.differences.items() for line in lines][:20]


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    if value in ("true", "false"):
        return key, value == "true"
    for read in (int, float):
        try:
            return key, read(value)
        except ValueError:
            continue
    return key, value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
