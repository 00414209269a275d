"""`inferengine bench`: send a load to any OpenAI-compatible server and report latencies and throughput.

`bench sweep`, `arrivals`, `batch`, `pressure`, `fragmentation`, `ladder`, `features` and `paired` measure series of
loads, `bench sanity` whether the answers are right (bench/suites.py). `bench compare` measures this engine and vLLM in
process (bench/compare.py). `evidence` runs what this machine can (bench/evidence.py).
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TextIO

from inferengine.bench import compare as compare_engines
from inferengine.bench import evidence as evidence_files
from inferengine.bench import load_generator, plots, services, suites
from inferengine.bench.environment import environment, write_result
from inferengine.bench.gpu_trace import GpuTrace
from inferengine.bench.load_options import WORKLOADS, LoadOptions, request_bodies
from inferengine.bench.report import details, report, standard_fields, table
from inferengine.cli.command import Arguments, Option, command, output_file
from inferengine.cli.plan_memory import bytes_of_model
from inferengine.cli.terminal import with_bar
from inferengine.config.environment import variables, visible_cards
from inferengine.errors import ConfigError, ExitCode

OPTIONS = {
    "the server": (
        Option("--url URL", "it may end in /v1", LoadOptions.url),
        Option("--api-key KEY", "sent as a bearer token"),
        Option("--model NAME", "default: the first of /v1/models"),
        Option("--chat", "/v1/chat/completions instead of /v1/completions"),
    ),
    "the load": (
        Option("--concurrency N", "closed loop: requests in flight", LoadOptions.concurrency),
        Option("--rate R", "open loop instead: requests per second, Poisson arrivals", LoadOptions.rate),
        Option("--burstiness B", "gaps of the open loop: 1 Poisson, below 1 clumped", LoadOptions.burstiness),
        Option("--requests N", "how many", LoadOptions.requests),
        Option(
            "--input SPEC",
            "prompt length in words, or tokens with --prompt ids: 128, 64:512 (uniform) or lognormal:200:0.6, median "
            "and sigma",
            LoadOptions.input,
        ),
        Option("--workload NAME", "instead of drawn lengths one of " + ", ".join(WORKLOADS), choices=("", *WORKLOADS)),
        Option(
            "--context N",
            "tokens of the model's context, by which --workload is sized; 0: as the server says",
            LoadOptions.context,
        ),
        Option("--output SPEC", "max_tokens likewise, with ignore_eos", LoadOptions.output),
        Option("--prompt text|ids", "words, or random token ids of --first-id to --last-id", LoadOptions.prompt),
        Option("--first-id N", "least token id of --prompt ids", LoadOptions.first_id),
        Option("--last-id N", "largest token id of --prompt ids", LoadOptions.last_id),
        Option("--shared-prefix N", "words or tokens that all prompts begin with", LoadOptions.shared_prefix),
        Option("--temperature T", "sampling temperature; 0 is greedy", LoadOptions.temperature),
        Option("--warm-up N", "requests before the clock starts", LoadOptions.warm_up),
        Option("--seed N", "seed of lengths, words and arrivals", LoadOptions.seed),
    ),
    "the report": (
        Option(
            "--goodput NAME:MS",
            "count requests that met these limits: ttft:500 tpot:50 e2e:5000, one or more",
            (),
            repeated=True,
        ),
        Option(
            "--json [FILE]",
            "all figures, with NVML's trace of this machine's devices; without FILE they are printed instead",
        ),
        Option("--detailed", "in the JSON also each request's lengths and times"),
    ),
}


@command(OPTIONS, takes_configuration=False)
def run(arguments: Arguments) -> int:
    """Send a load to any OpenAI-compatible server and report what a client sees.

    The report has time to first token, time between events and per output token, time of whole requests, throughput and
    goodput. It needs no engine on this machine. The exit code is 1 when no request completed.
    """
    options, file = load_options(arguments)
    written = output_file("--json", file) if file not in ("", "-") else None
    found = measure(options, sys.stderr)
    text = json.dumps(found, indent=2)
    if written is not None:
        written.write_text(text + "\n")
    print(text if file == "-" else table(found))
    return ExitCode.OK if found["completed"] else ExitCode.CRASH


def _without(*flags: str) -> dict[str, tuple[Option, ...]]:
    """Return OPTIONS without these, which a series of loads decides by itself: a flag that is taken must count."""
    return {
        group: tuple(option for option in options if option.spec.split()[0] not in flags)
        for group, options in OPTIONS.items()
    }


SERIES_REPORT = (
    Option("--json FILE", "all figures of every load, with the environment"),
    Option("--markdown FILE", "the table that is printed"),
    Option("--html FILE", "a page with the table and the plots"),
    Option("--plots FOLDER", "the plots as SVG; needs inferengine[plots]"),
)
SWEEP = _without("--concurrency", "--rate", "--burstiness") | {
    "the sweep": (Option("--concurrencies LIST", "requests in flight, one load each", "1,2,4,8,16,32,64,128"),),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}
ARRIVALS = _without("--rate", "--burstiness") | {
    "the arrivals": (
        Option("--shares LIST", "rates of steady and Poisson arrivals, of the saturated one", "0.25,0.5,0.75,1"),
    ),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}
PRESSURE = _without("--concurrency", "--rate", "--burstiness") | {
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT)
}
REPEATS = Option("--repeats N", "runs of each load; the median counts", 3, minimum=1)
SERVE = Option("--serve [FLAGS]", "start `inferengine up FLAGS` for each row instead of --url; --serve='--key value'")
BATCH = _without("--concurrency", "--rate", "--burstiness", "--requests") | {
    "the batches": (
        Option("--batches LIST", "requests of a batch, all sent at once", "1,2,4,8,16,32,64"),
        REPEATS,
        Option("--parameters N", "weights of the model, for MFU", 0.0),
        Option("--peak-operations R", "operations per second of the device, for MFU; 0: as the server says", 0.0),
    ),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}
FRAGMENTATION = OPTIONS | {
    "the blocks": (Option("--block-sizes LIST", "tokens of a block", "8,16,32,64,128"), SERVE),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}
LADDER = OPTIONS | {
    "the ladder": (
        Option(
            "--rung NAME=URL",
            "a server of its own for a rung, in the order of climbing; none: --url",
            (),
            repeated=True,
        ),
        SERVE._replace(help="start `inferengine up FLAGS` for each of this project's rungs instead"),
        REPEATS,
    ),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}
SANITY = {
    "the server": OPTIONS["the server"][:3],
    "the report": SERIES_REPORT[:2],
}
FEATURES = OPTIONS | {
    "the features": (
        Option("--features LIST", "what is measured beside the plain load", ",".join(suites.FEATURES)),
        Option("--theirs URL", "another server to measure in turn; none: --url alone"),
        Option("--theirs-model NAME", "default: the first of its /v1/models"),
    ),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}
PAIRED = _without("--url") | {
    "the pair": (
        Option("--ours URL", "the server whose throughput is held against the other's", LoadOptions.url),
        Option("--theirs URL", "the other server", "http://127.0.0.1:8001"),
        Option("--theirs-model NAME", "default: the first of its /v1/models"),
        Option("--runs N", "pairs of loads; each server is first in every other one", 5, minimum=1),
        Option("--gate RATIO", "least ratio of output tokens per second that passes", suites.GATE),
        Option("--raw FOLDER", "each load's JSON as a file of its own, and verdict.json: what a verifier reads"),
    ),
    "the report": (OPTIONS["the report"][0], *SERIES_REPORT),
}


COMPARE = {
    "both sides": (
        Option(
            "--model FOLDER",
            "a folder with a config.json; without weights there each side makes random ones. One or more",
            (),
            repeated=True,
        ),
        Option("--cards LIST", "CUDA devices; each measures one model at a time. Default: the first of them", ""),
        Option("--tensor-parallel N", "cards of --cards that share each model, on both sides", 1, minimum=1),
        Option("--sides LIST", "peer, ours or both", "peer,ours"),
        Option("--peer-python FILE", "a Python that has vllm; default: this one"),
        Option("--peer-path FOLDER", "put before PYTHONPATH of the peer"),
        Option(
            "--workloads LIST",
            f"of {', '.join(compare_engines.WORKLOADS)}",
            ",".join(compare_engines.DEFAULT_WORKLOADS),
        ),
        Option("--rows LIST", "rows of the decode steps", ",".join(map(str, compare_engines.ROWS))),
        Option("--limit S", "seconds for one side of one model", compare_engines.LIMIT_S),
        Option("--load-together", "load at once what a card holds; each side still measures alone"),
        Option("--card-gib N", "memory of a card that processes share with --load-together", 130.0),
        Option(
            "--context N", f"most tokens of a sequence; default: {compare_engines.MOST_CONTEXT:,}, or the model's", 0
        ),
        Option(
            "--kv-tokens N", "room in each side's cache; default: the rest of the card, with --load-together 212,992", 0
        ),
        Option("--batched-tokens N", "most tokens of a step on both sides; default: each side's own", 0),
        Option("--sequences N", "most rows of a step, likewise", 0),
        Option("--quick", "decodes and prefills are measured once instead of two or three times"),
    ),
    "the report": (
        Option("--json FILE", "all figures of both sides, with settings, environment and the cards' clocks and power"),
        Option("--markdown FILE", "the table that is printed"),
    ),
}


@command(COMPARE, takes_configuration=False)
def compare(arguments: Arguments) -> int:
    """Measure this engine and vLLM in process on the same cards, any shape; without its weights, with random ones.

    The exit code is 1 when a side of a model failed.
    """
    values = arguments.values
    folders = [Path(name).resolve() for name in values["model"]]
    if not folders:
        raise ConfigError("--model", "name at least one folder with a config.json")
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise ConfigError("--model", f"{folder} has no config.json")
        if [other.name for other in folders].count(folder.name) > 1:
            raise ConfigError("--model", f"several folders are named {folder.name}, which is how rows name a model")
    lists = {
        "sides": compare_engines.SIDES,
        "workloads": compare_engines.WORKLOADS,
    }
    chosen = {name: values[name].split(",") for name in lists}
    for name, known in lists.items():
        if unknown := set(chosen[name]) - set(known):
            raise ConfigError(f"--{name}", f"knows {', '.join(known)}; got '{min(unknown)}'")
    written = {name: output_file(f"--{name}", values[name]) for name in ("json", "markdown") if values[name]}
    ranks = values["tensor_parallel"]
    cards = values["cards"].split(",") if values["cards"] else visible_cards()[:ranks] or ["0"]
    if len(cards) % ranks:
        raise ConfigError("--cards", f"{len(cards)} cards are no multiple of --tensor-parallel {ranks}")
    kv_tokens = values["kv_tokens"] or (compare_engines.KV_TOKENS if values["load_together"] else 0)
    needs = {folder: _need(folder, kv_tokens, ranks) for folder in folders} if kv_tokens else {}

    plan = compare_engines.Plan(
        folders,
        cards=[",".join(cards[first : first + ranks]) for first in range(0, len(cards), ranks)],
        sides=chosen["sides"],
        workloads=chosen["workloads"],
        rows=numbers(arguments, "rows", int),
        peer_python=values["peer_python"] or sys.executable,
        peer_path=values["peer_path"],
        limit_s=values["limit"],
        environment=variables(),
        needs=needs if values["load_together"] else None,
        card_bytes=int(values["card_gib"] * 2**30),
        sizes=compare_engines.EngineSizes(
            values["context"],
            kv_tokens=kv_tokens,
            ranks=ranks,
            batched_tokens=values["batched_tokens"],
            sequences=values["sequences"],
        ),
        kv_bytes={folder: need.kv for folder, need in needs.items()},
        quick=values["quick"],
    )

    def report_of(comparison: compare_engines.Comparison) -> dict[str, Any]:
        return {
            "benchmark": "compare",
            "settings": compare_engines.SETTINGS,
            "loaded_together": values["load_together"],
            "tensor_parallel": ranks,
            "weights": {folder.name: compare_engines.load_format(folder) for folder in folders},
            "rows": compare_engines.joined(comparison.rows),
            "failures": comparison.failures,
            "gpu": gpus.summary(),
        }

    def write(comparison: compare_engines.Comparison) -> None:
        """Write what has been measured so far: the whole may take an hour."""
        found = report_of(comparison)
        if "json" in written:
            devices = [one["name"] for one in found["gpu"].get("devices", [])]
            write_result(written["json"], {"environment": environment(devices=devices), **found})
        if "markdown" in written:
            written["markdown"].write_text(compare_engines.markdown(found) + "\n")

    with GpuTrace() as gpus:
        comparison = compare_engines.Comparison(
            plan, progress=lambda line: print(line, file=sys.stderr), measured=write
        )
        comparison.run()
    print(compare_engines.markdown(report_of(comparison)))
    return ExitCode.CRASH if comparison.failures else ExitCode.OK


def _need(folder: Path, kv_tokens: int, ranks: int) -> compare_engines.Need:
    """Return the bytes that a process of either side takes of each of its cards."""
    weights, per_token = bytes_of_model(folder)
    kv_bytes = kv_tokens * per_token // ranks
    return compare_engines.Need(weights // ranks + kv_bytes + compare_engines.OTHER_BYTES, kv_bytes)


@command(SWEEP, takes_configuration=False)
def sweep(arguments: Arguments) -> int:
    """Measure a server at 1 to 128 requests in flight, and find where its throughput stops growing.

    The exit code is 1 when a request failed.
    """
    concurrencies = numbers(arguments, "concurrencies", int)
    return _series(arguments, lambda load, measured: suites.sweep(measured, load, concurrencies))


@command(ARRIVALS, takes_configuration=False)
def arrivals(arguments: Arguments) -> int:
    """Measure a server under a burst, steady and Poisson arrivals, at rates up to its saturation.

    The exit code is 1 when a request failed.
    """
    shares = numbers(arguments, "shares", float)
    return _series(arguments, lambda load, measured: suites.arrivals(measured, load, shares))


@command(PRESSURE, takes_configuration=False)
def pressure(arguments: Arguments) -> int:
    """Send --requests at once, far more than the server's KV cache holds: nothing may be lost.

    Preemptions are read from the server's /metrics, where it has vLLM's names. The exit code is 1 when a request
    failed.
    """
    return _series(arguments, lambda load, measured: suites.pressure(measured, load))


@command(BATCH, takes_configuration=False)
def batch(arguments: Arguments) -> int:
    """Send batches of several sizes, all requests of one at once: throughput, latency, share of the roofline, MFU.

    The exit code is 1 when a request failed.
    """
    values, sizes = arguments.values, numbers(arguments, "batches", int)
    return _series(
        arguments,
        lambda load, measured: suites.batch(
            measured,
            load,
            sizes,
            values["repeats"],
            parameters=values["parameters"],
            peak_operations_per_s=values["peak_operations"],
        ),
    )


@command(FRAGMENTATION, takes_configuration=False)
def fragmentation(arguments: Arguments) -> int:
    """Tell how much of the KV cache's blocks holds nothing, by block size, and beside one block a request.

    The exit code is 1 when a request failed.
    """
    sizes, flags = numbers(arguments, "block-sizes", int), _flags(arguments)
    served = None
    if flags is not None:
        served = lambda size: services.local_service(*flags, "--cache.block_size", str(size))  # noqa: E731
    return _series(arguments, lambda load, measured: suites.fragmentation(measured, load, sizes, served))


@command(LADDER, takes_configuration=False)
def ladder(arguments: Arguments) -> int:
    """Measure five workloads, each of which makes one optimisation matter, on one server or on one for each rung.

    Their sizes follow from the model's context. The exit code is 1 when a request failed.
    """
    values, flags = arguments.values, _flags(arguments)
    rungs: list[tuple[str, AbstractContextManager[str]]] = []
    for text in values["rung"]:
        name, found, url = text.partition("=")
        if not (name and found and url):
            raise ConfigError("--rung", f"'{text}' is not like NAME=http://host:8000")
        rungs.append((name, nullcontext(url)))
    if flags is not None:
        rungs += [(name, services.local_service(*flags, *own)) for name, own in suites.rung_flags().items()]
    return _series(
        arguments,
        lambda load, measured: suites.ladder(
            measured, load, rungs or [("server", nullcontext(load.url))], values["repeats"]
        ),
    )


@command(SANITY, takes_configuration=False)
def sanity(arguments: Arguments) -> int:
    """Ask a server what has one right answer: determinism, streams, lengths, stop strings, refusals.

    The exit code is 1 when one is wrong.
    """
    return _series(arguments, lambda load, _: suites.sanity(*load_generator.asker(load)))


@command(FEATURES, takes_configuration=False)
def features(arguments: Arguments) -> int:
    """Measure a load with and without each sampling feature and grammar, on one server or on two in turn.

    The report says how many of the plain load's tokens per second are left. The exit code is 1 when a request failed.
    """
    values = arguments.values
    chosen = values["features"].split(",")
    if unknown := set(chosen) - set(suites.FEATURES):
        raise ConfigError("--features", f"knows {', '.join(suites.FEATURES)}; got '{min(unknown)}'")

    def series(load: LoadOptions, measured: suites.Measure) -> dict[str, Any]:
        other = replace(load, url=values["theirs"], model=values["theirs_model"]) if values["theirs"] else None
        return suites.features(measured, load, other, chosen)

    return _series(arguments, series)


@command(PAIRED, takes_configuration=False)
def paired(arguments: Arguments) -> int:
    """Measure two servers in turn with the same load, and compare their output tokens per second.

    The exit code is 0 when the median ratio of the pairs reaches the gate and no request failed, else 1.
    """
    values = arguments.values
    other = {"url": values["theirs"], "model": values["theirs_model"]}

    def series(load: LoadOptions, measured: suites.Measure) -> dict[str, Any]:
        ours, theirs = replace(load, url=values["ours"]), replace(load, **other)
        found = suites.paired(measured, ours, theirs, values["runs"], gate=values["gate"], seed=load.seed)
        if values["raw"]:
            write_raw(Path(values["raw"]), found)
        return found

    return _series(arguments, series)


def write_raw(folder: Path, found: dict[str, Any]) -> None:
    """Write each load of a pair as N-ours.json and N-theirs.json, and verdict.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, pair in enumerate(found["pairs"], 1):
        for name, row in pair.items():
            write_result(folder / f"{number}-{name}.json", row)
    verdict = {name: value for name, value in found.items() if name not in ("pairs", "benchmark")}
    write_result(folder / "verdict.json", verdict)


def numbers(arguments: Arguments, name: str, kind: type[int] | type[float]) -> list[Any]:
    """Return the numbers above zero of a list with commas. Raises ConfigError that names the flag."""
    option = Option(f"--{name} LIST", "", kind(0), minimum=None)
    text = arguments.values[option.name]
    found = [option.convert(part) for part in text.split(",")]
    if min(found) <= 0:
        raise ConfigError(option.flag, f"must be numbers above 0 with commas between them; got '{text}'")
    return found


def _flags(arguments: Arguments) -> list[str] | None:
    """Return the words of --serve; None without it."""
    text = arguments.values["serve"]
    if not text:
        return None
    return [] if text == "-" else shlex.split(text)


def _series(arguments: Arguments, series: Callable[[LoadOptions, suites.Measure], dict[str, Any]]) -> int:
    """Measure a series of loads, write its reports and print its table.

    Until it ends the file of --json has the loads measured so far, under `unfinished`: what was measured is not lost
    with a series that is ended early.
    """
    files = {name: arguments.values.get(name) for name in ("json", "markdown", "html")}
    written = {name: output_file(f"--{name}", file) for name, file in files.items() if file}
    folder = arguments.values.get("plots")
    if folder:
        plots.require_matplotlib()
    load, _ = load_options(arguments)
    about = environment(seed=load.seed)
    loads: list[dict[str, Any]] = []

    def measured(options: LoadOptions) -> dict[str, Any]:
        found = measure(options, sys.stderr)
        loads.append({"url": options.url, "fields": options.body, **found})
        if "json" in written:
            write_result(written["json"], {"environment": about, "unfinished": loads})
        return found

    found = series(load, measured)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, svg in suites.plots(found).items():
            (Path(folder) / name).write_text(svg)
    for name, path in written.items():
        match name:
            case "json":
                write_result(path, {"environment": about, **found})
            case "markdown":
                path.write_text(suites.markdown(found))
            case _:
                path.write_text(suites.html(found, about))
    print(suites.markdown(found))
    return ExitCode.OK if found.get("passed", not found["failed"]) else ExitCode.CRASH


def load_options(arguments: Arguments) -> tuple[LoadOptions, str]:
    """Return the load, and where the JSON goes: a file, `-` or nowhere (""). Raises ConfigError."""
    names = {field.name for field in fields(LoadOptions)}
    values = {name: value for name, value in arguments.values.items() if name in names}
    file = arguments.values["json"]
    limits = Option("--goodput NAME:MS", "", 0.0)
    values["goodput"] = {}
    for text in arguments.values.get("goodput", ()):
        name, colon, limit = text.partition(":")
        if not colon:
            raise ConfigError("--goodput", f"{text!r} is not like ttft:500")
        values["goodput"][name] = limits.convert(limit)
    return LoadOptions(**values), file


def measure(options: LoadOptions, stream: TextIO) -> dict[str, Any]:
    """Measure one load and return its report; progress goes to `stream` where that is a terminal. Raises
    InferEngineError."""
    model = load_generator.served_model(options)
    options = replace(options, context=options.context or model.context)
    bodies = request_bodies(options, model.name)
    progress = Progress(stream, len(bodies))
    with GpuTrace() as gpus:
        outcome = asyncio.run(load_generator.run(options, bodies, gpus, ended=progress.step))
    progress.clear()
    load = {name: value for name, value in asdict(options).items() if name not in ("api_key", "model")}
    return {
        "benchmark": "serving",
        "environment": environment(seed=options.seed, devices=[one["name"] for one in outcome.gpu.get("devices", [])]),
        "model": model.name,
        "load": load,
        **standard_fields(outcome.replies, outcome.seconds, load, model.name),
        **report(outcome.replies, outcome.seconds, options.goodput),
        **(details(outcome.replies) if options.detailed else {}),
        "gpu": outcome.gpu,
    }


EVIDENCE = {
    "what": (
        Option("--check", "run nothing: say what is wrong with results and documents; the exit code is 1 then"),
        Option("--write", "run nothing: write the list and the quoted figures from the results that are there"),
        Option("--only NAME", "runs of these names; none: all that this machine can", (), repeated=True),
        Option("--results FOLDER", "where results go; default: benchmarks/results of the checkout"),
        Option("--seconds S", "begin no run that could take longer than what is left of these; 0: no limit", 0.0),
        Option("--resume", "skip runs that have a result of this revision in the folder of results"),
        Option("--peer-python FILE", "a Python that has vllm; default: this one"),
        Option("--peer-path FOLDER", "put before PYTHONPATH of vllm"),
        Option("--json", "print what failed and what is wrong as JSON"),
    ),
}


@command(EVIDENCE, takes_configuration=False)
def evidence(arguments: Arguments) -> int:
    """Run the benchmarks that this machine can, in a checkout, and write the results and docs/evidence.

    Numbers in documents that are followed by `<!-- figure: FILE PATH -->` are set to what the results say. The exit
    code is 1 where a run failed or was not begun, or where a figure has no source or another value.
    """
    values = arguments.values
    if not evidence_files.RESULTS.is_dir():
        raise ConfigError("evidence", "needs a checkout: there is no benchmarks/results here")
    outcome = evidence_files.RunsReport([], [])
    if not values["check"]:
        if not values["write"]:
            with GpuTrace() as gpus:
                devices = [one["name"] for one in gpus.lap().get("devices", [])]
            machine = evidence_files.machine_name(devices)
            runs = evidence_files.possible_runs(values["only"], devices)
            folder = Path(values["results"] or evidence_files.RESULTS)
            stream = sys.stderr if values["json"] else sys.stdout
            outcome = evidence_files.run_all(
                runs,
                machine,
                folder,
                lambda text: print(text, file=stream, flush=True),
                seconds=values["seconds"] or math.inf,
                resume=values["resume"],
                peer=services.PeerPlace(values["peer_python"], values["peer_path"]),
            )
        evidence_files.write_documents()
    wrong = evidence_files.problems()
    if values["json"]:
        print(json.dumps({**outcome._asdict(), "wrong": wrong}, indent=2))
    else:
        print("\n".join(wrong), end="\n" if wrong else "")
    return ExitCode.CRASH if outcome.failed or outcome.left or wrong else ExitCode.OK


class Progress:
    """A bar of the requests that have ended. Writes only to a terminal."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._total = total
        self._ended = 0
        self._moving = stream.isatty()
        self._share = -1

    def step(self) -> None:
        """Count one more request that has ended."""
        self._ended += 1
        share = 100 * self._ended // self._total
        if self._moving and share != self._share:  # at most a hundred writes: drawing must not disturb the measurement
            self._share = share
            self._stream.write(f"\r\x1b[2K{with_bar(f'{self._ended} of {self._total} requests {share} %')}")
            self._stream.flush()

    def clear(self) -> None:
        """Erase the bar."""
        if self._moving:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
