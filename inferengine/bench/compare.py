"""Compare this engine with vLLM in process: decode, prefill, first token and loads, on the same cards, random weights.

`inferengine bench compare` runs one process for each model and side, the peer first, then ours, on one card. Models are
spread over the cards, so that all cards measure at once. This file is also the program of those processes: it imports
nothing of this package unless it measures it, so that the peer may have a Python of its own.

With `--load-together` as many processes of a card start at once as its memory holds: loading and compiling, which take
most of the time, overlap. A process measures when all of them have loaded and those before it have ended, so each
measures alone. Both sides then have the same room for KV_TOKENS tokens instead of the rest of the card, and ours takes
kernels from tables that exist (`engine.tune 0`). `--kv-tokens` sets that room, also for one process at a time: where
weights leave little of a card, each side's own choice would be another workload.

With `--tensor-parallel N` each process has N cards. NVLink multicast stays off on both sides.

Workloads, for both sides the same token ids of the same seeds, without prefix cache:

- `decode R`: milliseconds of a step of R sequences; prompts of 128 tokens; (median of 192 output tokens - median of 1)
  / 191, so that neither prompts nor set-up count
- `decode drawn R`: the same at temperature 1. Greedy output of random weights soon repeats one token, the same one in
  every sequence, so that all sequences of a mixture of experts take the same few experts; drawn tokens differ
- `prefill`: prompt tokens per second of 8 prompts of 4,096; where the model's context allows
- `first token`: milliseconds to the only token of one prompt of 1,024
- `short`, `short sampled`: output tokens per second of 400 requests at once, 128 to 384 in, 32 to 96 out, greedy and
  with temperature 1 and top_p 0.95; `short-greedy` is the first of them alone. Each load runs once before it is timed:
  vLLM compiles its sampler's kernel for numbers of rows that are multiples of 16 and for others, when it meets them
- `long`: output tokens per second of 4 prompts of 30,000 at once, 65 out each; where the model's context allows
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Row = dict[str, Any]
Report = Callable[[str, str, float], None]  # workload, unit, value

SIDES = ("peer", "ours")  # in this order: the card is as warm for the peer as it gets
ROWS = (1, 16, 64, 128, 256)
OUTPUT = 192
PREFILL_INPUT = 4096
LONG_INPUT, LONG_OUTPUT = 30_000, 65
MARK = "ROW "
LIMIT_S = 300.0
LOWER_IS_BETTER = ("s", "ms", "ms per step")
WORKLOADS = ("decode", "decode-drawn", "prefill", "first-token", "short", "short-greedy", "long")
DEFAULT_WORKLOADS = ("decode", "prefill", "first-token", "short", "long")
MOST_CONTEXT = LONG_INPUT + 2768
KV_TOKENS = 212_992  # room of each side where several processes share a card: 400 short requests, 4 long ones
OTHER_BYTES = 8 << 30  # of a process besides weights and keys and values: activations, graphs, libraries
POLL_S = 0.05
# Of processes with several cards, where the environment does not say otherwise.
SEVERAL_CARDS = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_SKIP_P2P_CHECK": "1",
}
# Of vLLM, where the environment does not say otherwise: nothing can be downloaded or compiled by nvcc, so torch samples
# in place of FlashInfer.
PEER_VARIABLES = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
SETTINGS = {
    "peer": "vllm.LLM: bfloat16, enable_prefix_caching False, all else default (compiled, CUDA graphs, asynchronous "
    "scheduling)",
    "ours": "inferengine.LLM: bfloat16, cache.prefix_caching false, all else default",
    "weights": "of the model's folder on both sides, where it has some; else load_format dummy: each side its own",
}


# -- one side, in a process of its own -------------------------------------------------------------------------------


class Drawing(NamedTuple):
    """How tokens are drawn."""

    temperature: float = 0.0
    top_p: float = 1.0


GREEDY, DRAWN, NUCLEUS = Drawing(), Drawing(1.0), Drawing(1.0, 0.95)


class EngineSizes(NamedTuple):
    """What both sides are given. 0: each side's own default. `kv_tokens`: room in the cache, of which `kv_bytes` are on
    each card; `batched_tokens` and `sequences`: the most of a step."""

    context: int
    kv_tokens: int = 0
    kv_bytes: int = 0
    ranks: int = 1
    batched_tokens: int = 0
    sequences: int = 0


class Side(Protocol):
    """An engine that completes token ids."""

    def generate_s(self, prompts: Sequence[list[int]], outputs: Sequence[int], drawing: Drawing = GREEDY) -> float:
        """Return the seconds for these requests, submitted at once; each gives exactly its number of output tokens."""
        ...


def load_format(folder: str | Path) -> str:
    """Return how both sides get weights: "auto", from the folder where it has some, else "dummy", each its own."""
    return "auto" if any(Path(folder).glob("*.safetensors")) else "dummy"


class Ours:
    """inferengine.LLM."""

    def __init__(self, folder: str, sizes: EngineSizes) -> None:
        from inferengine import LLM, SamplingParams

        self._params: Callable[..., Any] = SamplingParams
        model = {"load_format": load_format(folder), "max_model_len": sizes.context}
        cache: dict[str, Any] = {"prefix_caching": False}
        engine: dict[str, Any] = {"tensor_parallel": sizes.ranks}
        engine |= {"max_num_batched_tokens": sizes.batched_tokens, "max_num_seqs": sizes.sequences}
        if sizes.kv_tokens:
            cache |= {"block_size": 64, "num_blocks": sizes.kv_tokens // 64}
            engine["tune"] = "0"  # beside others that load, measuring kernels would mislead: tables choose them
        self._llm = LLM(folder, model=model, cache=cache, engine=engine)

    def generate_s(self, prompts: Sequence[list[int]], outputs: Sequence[int], drawing: Drawing = GREEDY) -> float:
        """Return the seconds of LLM.generate."""
        params = [self._params(max_tokens=output, ignore_eos=True, **drawing._asdict()) for output in outputs]
        begin = time.perf_counter()
        found = self._llm.generate(list(prompts), params, progress=False)
        seconds = time.perf_counter() - begin
        require_lengths([len(one.choices[0].token_ids) for one in found], outputs)
        return seconds


class Peer:
    """vllm.LLM."""

    def __init__(self, folder: str, sizes: EngineSizes) -> None:
        vllm: Any = importlib.import_module("vllm")
        self._params: Callable[..., Any] = vllm.SamplingParams
        more: dict[str, Any] = {}
        if sizes.kv_bytes:
            # The share is what vLLM wants to see free at its start; with kv_cache_memory_bytes it takes no more.
            more |= {"kv_cache_memory_bytes": sizes.kv_bytes, "gpu_memory_utilization": 0.05}
        if sizes.ranks > 1:
            more["tensor_parallel_size"] = sizes.ranks
        if sizes.batched_tokens:
            more["max_num_batched_tokens"] = sizes.batched_tokens
        if sizes.sequences:
            more["max_num_seqs"] = sizes.sequences
        self._llm = vllm.LLM(
            model=folder,
            load_format=load_format(folder),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=sizes.context,
            enable_prefix_caching=False,
            seed=0,
            **more,
        )

    def generate_s(self, prompts: Sequence[list[int]], outputs: Sequence[int], drawing: Drawing = GREEDY) -> float:
        """Return the seconds of LLM.generate."""
        more = {"ignore_eos": True, "detokenize": False, **drawing._asdict()}
        params = [self._params(max_tokens=output, **more) for output in outputs]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        begin = time.perf_counter()
        found = self._llm.generate(requests, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        require_lengths([len(one.outputs[0].token_ids) for one in found], outputs)
        return seconds


def require_lengths(lengths: Sequence[int], outputs: Sequence[int]) -> None:
    """Raise RuntimeError where an output is shorter or longer than was asked for: its time would mean nothing."""
    if list(lengths) != list(outputs):
        raise RuntimeError(f"outputs of {lengths[:4]}... tokens instead of {list(outputs)[:4]}...")


def measure(
    side: Side,
    vocab_size: int,
    workloads: Sequence[str],
    rows: Sequence[int],
    context: int,
    tell: Report,
    *,
    quick: bool = False,
) -> None:
    """Measure the workloads one after the other. `context`: tokens that the model can hold. `quick`: decodes and
    prefills once instead of two or three times."""
    rng = random.Random(9)
    most = min(vocab_size, 120_000) - 1

    def prompts(lengths: Sequence[int]) -> list[list[int]]:
        return [[rng.randint(10, most) for _ in range(length)] for length in lengths]

    for lengths, output in (([128] * 4, 16), ([64] * 200, 8), ([min(2048, context // 2)] * 2, 4)):
        side.generate_s(prompts(lengths), [output] * len(lengths))
    for workload, name, drawing in (("decode", "decode", GREEDY), ("decode-drawn", "decode drawn", DRAWN)):
        for count in rows if workload in workloads else ():
            batch = prompts([128] * count)
            side.generate_s(batch, [8] * count, drawing)
            one_s = statistics.median(side.generate_s(batch, [1] * count, drawing) for _ in range(1 if quick else 3))
            all_s = statistics.median(
                side.generate_s(batch, [OUTPUT] * count, drawing) for _ in range(1 if quick else 2)
            )
            tell(f"{name} {count}", "ms per step", 1e3 * (all_s - one_s) / (OUTPUT - 1))
    if "prefill" in workloads and context > PREFILL_INPUT:
        batch = prompts([PREFILL_INPUT] * 8)
        side.generate_s(batch, [1] * 8)
        seconds = statistics.median(side.generate_s(batch, [1] * 8) for _ in range(1 if quick else 2))
        tell("prefill", "prompt tokens/s", 8 * PREFILL_INPUT / seconds)
    if "first-token" in workloads:
        batch = prompts([1024])
        side.generate_s(batch, [1])
        tell("first token", "ms", 1e3 * statistics.median(side.generate_s(batch, [1]) for _ in range(5)))
    if "short" in workloads or "short-greedy" in workloads:
        lengths, outputs = [rng.randint(128, 384) for _ in range(400)], [rng.randint(32, 96) for _ in range(400)]
        batch = prompts(lengths)
        for name, drawing in (("short", GREEDY), ("short sampled", NUCLEUS))[: 2 if "short" in workloads else 1]:
            side.generate_s(batch, outputs, drawing)
            tell(name, "output tokens/s", sum(outputs) / side.generate_s(batch, outputs, drawing))
    if "long" in workloads and context > LONG_INPUT + LONG_OUTPUT:
        batch = prompts([LONG_INPUT] * 4)
        side.generate_s(prompts([LONG_INPUT]), [2])
        tell("long", "output tokens/s", 4 * LONG_OUTPUT / side.generate_s(batch, [LONG_OUTPUT] * 4))


def run_side(arguments: argparse.Namespace) -> None:
    """Be the process of one side: print a line for each figure."""
    config = json.loads((Path(arguments.folder) / "config.json").read_text())
    rows = [int(number) for number in arguments.rows.split(",")]

    def tell(workload: str, unit: str, value: float) -> None:
        print(MARK + json.dumps({"workload": workload, "unit": unit, "value": round(value, 4)}), flush=True)

    longest = int(config.get("max_position_embeddings", 16_384))
    sizes = EngineSizes(*json.loads(arguments.sizes))
    sizes = sizes._replace(context=min(longest, sizes.context or MOST_CONTEXT))
    begin = time.perf_counter()
    side: Side = (Ours if arguments.side == "ours" else Peer)(arguments.folder, sizes)
    if arguments.group:
        await_turn(Path(arguments.group), arguments.place, arguments.of)
    else:  # beside others that load, it would say little
        tell("load and warm-up", "s", time.perf_counter() - begin)
    workloads, vocab_size = arguments.workloads.split(","), int(config["vocab_size"])
    measure(side, vocab_size, workloads, rows, sizes.context, tell, quick=arguments.quick)


def await_turn(group: Path, place: int, of: int) -> None:
    """Say that this process has loaded; return when all `of` have, or have ended, and those before this one have ended.
    `group`: a folder; a process that ended has its file there from the one that started it."""
    (group / f"loaded-{place}").touch()

    def is_turn() -> bool:
        ended = [(group / f"ended-{other}").exists() for other in range(of)]
        return all(ended[:place]) and all(ended[other] or (group / f"loaded-{other}").exists() for other in range(of))

    while not is_turn():
        time.sleep(POLL_S)


# -- both sides --------------------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """Bytes of one process on a card: all of them, and those of keys and values among them."""

    whole: int
    kv: int


class Plan(NamedTuple):
    """What is measured, and how. `cards`: values of CUDA_VISIBLE_DEVICES. `peer_path`: folders for the peer's
    PYTHONPATH. `limit_s`: seconds for one side of one model. `environment`: variables of the processes. `needs`: of
    each folder, where processes are to load together on cards of `card_bytes`. `sizes`: of each process; its `kv_bytes`
    are in `kv_bytes` of each folder. `quick` as of `measure`."""

    folders: Sequence[Path]
    cards: Sequence[str]
    sides: Sequence[str]
    workloads: Sequence[str]
    rows: Sequence[int]
    peer_python: str
    peer_path: str
    limit_s: float
    environment: Mapping[str, str]
    needs: Mapping[Path, Need] | None = None
    card_bytes: int = 0
    sizes: EngineSizes = EngineSizes(0)
    kv_bytes: Mapping[Path, int] = {}
    quick: bool = False

    def sizes_of(self, folder: Path) -> EngineSizes:
        """Return the sizes that the engines of a model are started with."""
        return self.sizes._replace(kv_bytes=self.kv_bytes.get(folder, 0))


class Job(NamedTuple):
    """One side of one model. `usable`: the folder that it loads."""

    folder: Path
    side: str
    usable: Path


def groups(jobs: Sequence[Job], plan: Plan) -> list[list[Job]]:
    """Return what runs one after the other on a card: single jobs, or with `needs` as many as the card holds, first
    fit."""
    if plan.needs is None:
        return [[job] for job in jobs]
    found: list[list[Job]] = []
    left: list[int] = []
    for job in jobs:
        need = plan.needs[job.folder].whole
        place = next((index for index, room in enumerate(left) if need <= room), len(found))
        if place == len(found):
            found.append([])
            left.append(plan.card_bytes)
        found[place].append(job)
        left[place] -= need
    return found


class Comparison:
    """Runs the processes of both sides: each model on one card, as many models at once as there are cards."""

    def __init__(self, plan: Plan, *, progress: Callable[[str], None], measured: Callable[[Comparison], None]) -> None:
        """`progress` takes a line for each figure; `measured` is called after each side of each model, one call at a
        time."""
        self._plan = plan
        self._waiting = list(plan.folders)
        # Of each card: as many models as of any other, where all of them are to load together.
        self._shares = [list(plan.folders[index :: len(plan.cards)]) for index in range(len(plan.cards))]
        self._children: set[int] = set()  # groups of processes
        self._errors: list[BaseException] = []
        self._progress = progress
        self._measured = measured
        self._lock = threading.Lock()
        self.rows: list[Row] = []
        self.failures: list[Row] = []

    def run(self) -> None:
        """Measure everything: into `rows` and `failures`."""
        lanes = [
            threading.Thread(target=self._keeping_errors, args=(self._lane, index))
            for index in range(len(self._plan.cards))
        ]
        for lane in lanes:
            lane.start()
        try:
            for lane in lanes:
                lane.join()
        except BaseException as error:  # Ctrl-C does not reach the processes: each leads a group of its own
            self._stop(error)
            raise
        if self._errors:
            raise self._errors[0]

    def _keeping_errors(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call it in a thread. What it raises ends the comparison."""
        try:
            function(*arguments)
        except BaseException as error:
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """End all processes and start no more."""
        with self._lock:
            self._errors.append(error)
            for group in self._children:
                _kill(group)

    def _next_folders(self, index: int) -> list[Path]:
        """Return the folders that a card measures next: all of its models where they load together, else one."""
        with self._lock:
            if self._plan.needs is not None:
                share, self._shares[index] = self._shares[index], []
                return share
            return [self._waiting.pop(0)] if self._waiting else []

    def _lane(self, index: int) -> None:
        while folders := self._next_folders(index):
            with tempfile.TemporaryDirectory() as scratch:
                jobs = [
                    Job(folder, side, with_tokenizer(folder, Path(scratch, str(place))))
                    for place, folder in enumerate(folders)
                    for side in SIDES
                    if side in self._plan.sides
                ]
                for place, group in enumerate(groups(jobs, self._plan)):
                    turns = Path(scratch, f"turns-{place}")
                    turns.mkdir()
                    self._run_group(group, turns, index)

    def _run_group(self, group: Sequence[Job], turns: Path, index: int) -> None:
        """Run these jobs at once; each measures in its turn. `turns`: an empty folder."""

        def run(place: int) -> None:
            try:
                self._measure(group[place], index, turns if len(group) > 1 else None, place, len(group))
            finally:
                (turns / f"ended-{place}").touch()
            with self._lock:
                self._measured(self)

        threads = [threading.Thread(target=self._keeping_errors, args=(run, place)) for place in range(len(group))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _measure(self, job: Job, index: int, turns: Path | None, place: int, of: int) -> None:
        plan, model, side = self._plan, job.folder.name, job.side
        python = plan.peer_python if side == "peer" else sys.executable
        command = [*_bound(index, len(plan.cards)), python, __file__, side, str(job.usable)]
        command += ["--workloads", ",".join(plan.workloads), "--rows", ",".join(map(str, plan.rows))]
        command += ["--sizes", json.dumps(plan.sizes_of(job.folder)), *(["--quick"] if plan.quick else [])]
        if turns is not None:
            command += ["--group", str(turns), "--place", str(place), "--of", str(of)]
        own = PEER_VARIABLES if side == "peer" else {}
        environment = {**own, **plan.environment, "CUDA_VISIBLE_DEVICES": plan.cards[index]}
        if plan.sizes.ranks > 1:
            environment = {**SEVERAL_CARDS, **environment}
        path = plan.peer_path if side == "peer" else str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environment.get("PYTHONPATH", "")]))
        with self._lock:
            if self._errors:
                return
            try:
                child = subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                self.failures.append({"model": model, "side": side, "code": 127, "output": str(error)})
                self._progress(f"{model}, {side}: {error}")
                return
            self._children.add(child.pid)
        loaded = turns and turns / f"loaded-{place}"
        with child:
            timers = [threading.Timer(plan.limit_s * of, _kill_unless, (child.pid, loaded))]
            if loaded is not None:  # a process that hangs while it loads takes no time from those that wait for it
                timers.append(threading.Timer(plan.limit_s * (of + place + 1), _kill, (child.pid,)))
            for timer in timers:
                timer.start()
            try:
                last = self._read(child, model, side, index)
                code = child.wait()
            except BaseException:
                _kill(child.pid)
                raise
            finally:
                for timer in timers:
                    timer.cancel()
        with self._lock:
            self._children.discard(child.pid)
        if code:
            self._progress(f"{model}, {side}: ended with {code}\n{''.join(last)}")
            with self._lock:
                self.failures.append({"model": model, "side": side, "code": code, "output": "".join(last)[-2000:]})

    def _read(self, child: subprocess.Popen[str], model: str, side: str, index: int) -> list[str]:
        """Take the rows that a side prints until it ends; returns the last of its other lines."""
        assert child.stdout is not None
        last: list[str] = []
        for line in child.stdout:
            if line.startswith(MARK):
                row = {
                    "model": model,
                    "side": side,
                    "card": self._plan.cards[index],
                    **json.loads(line.removeprefix(MARK)),
                }
                self._progress(f"{model}, {row['workload']}, {side}: {row['value']:,} {row['unit']}")
                with self._lock:
                    self.rows.append(row)
            else:
                last = [*last[-30:], line]
        return last


def _kill(group: int) -> None:
    """End a group of processes, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _kill_unless(group: int, mark: Path | None) -> None:
    """End a group of processes, unless this file is there."""
    if mark is None or not mark.exists():
        _kill(group)


def _bound(index: int, lanes: int) -> list[str]:
    """Return the command that binds a lane to its part of the processors; an empty list where there is none."""
    processors = sorted(os.sched_getaffinity(0))
    share = len(processors) // lanes
    if lanes == 1 or share == 0 or shutil.which("taskset") is None:
        return []
    return ["taskset", "-c", ",".join(map(str, processors[index * share : (index + 1) * share]))]


def with_tokenizer(folder: Path, scratch: Path) -> Path:
    """Return a folder with this model's config.json and a tokenizer: its own folder, or `scratch` with one of 256
    bytes; `scratch` may be its own."""
    if (folder / "tokenizer.json").exists():
        return folder
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + index) for index in range(256 - len(letters))]
    model = {"type": "BPE", "vocab": {letter: index for index, letter in enumerate(letters)}, "merges": []}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {"version": "1.0", "pre_tokenizer": bytes_of, "decoder": bytes_of, "model": model}
    scratch.mkdir(exist_ok=True)
    (scratch / "tokenizer.json").write_text(json.dumps(document))
    (scratch / "tokenizer_config.json").write_text("{}")
    if scratch != folder:
        shutil.copy(folder / "config.json", scratch / "config.json")
    return scratch


def joined(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each model and workload: `ours`, `peer` and `ratio`, above 1 where ours is better."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        both = found.setdefault(
            (row["model"], row["workload"]), {name: row[name] for name in ("model", "workload", "unit")}
        )
        both[row["side"]] = row["value"]
    for both in found.values():
        if both.get("ours") and both.get("peer"):
            less = both["unit"] in LOWER_IS_BETTER
            both["ratio"] = round(both["peer"] / both["ours"] if less else both["ours"] / both["peer"], 3)
    return list(found.values())


def markdown(document: Mapping[str, Any]) -> str:
    """Return the comparison as a table: a line for each model, a column for each workload, `ours (ratio)` in each
    cell."""
    workloads = list(dict.fromkeys(row["workload"] for row in document["rows"]))
    models = list(dict.fromkeys(row["model"] for row in document["rows"]))
    cells = {(row["model"], row["workload"]): _cell(row) for row in document["rows"]}
    units = {row["workload"]: row["unit"] for row in document["rows"]}
    lines = [["model", *(f"{name}, {units[name]}" for name in workloads)], ["---"] * (len(workloads) + 1)]
    lines += [[model, *(cells.get((model, name), "") for name in workloads)] for model in models]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row) -> str:
    value = next((row[side] for side in ("ours", "peer") if side in row), None)
    if value is None:
        return ""
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    if "ours" not in row:
        return f"(peer {text})"
    return f"{text} ({row['ratio']:.2f})" if "ratio" in row else text


def main() -> None:
    """Be one side's process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("folder")
    parser.add_argument("--workloads", required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--sizes", default="[0]")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--group", default="")
    parser.add_argument("--place", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    run_side(parser.parse_args())


if __name__ == "__main__":
    main()
