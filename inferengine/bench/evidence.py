"""Evidence: results in benchmarks/results, the documents that quote them, and the runs that make them.

Each file there is one result: JSON whose `environment` names at least `revision` and `date`. A document quotes it so:

    41,492 <!-- figure: compare-h200.json rows/6/ours -->      the number before the comment, rounded as it is written
    3.91 / 5.03 <!-- figure: FILE rows/0/ours rows/3/ours -->  the last numbers before it, in order
    12 % <!-- figure: FILE rows/name=two+words/share *100 -->  an entry of a list by a key; a scale for the numbers

A section of a document in DOCUMENTS with measured figures has such a comment, or names a file of benchmarks/results, or
says `no raw file was kept`; one whose figures are settings or limits says `<!-- no measurement -->`. `problems` finds
what is missing or differs; a test calls it. `inferengine evidence` runs what this machine can, writes the results and
docs/evidence/index.md, their list, and corrects the numbers before comments.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.bench.environment import ROOT, git, revision
from inferengine.bench.services import HERE, NOTHING, PeerPlace, local_service, peer_service, python_path
from inferengine.config.environment import variables, visible_cards
from inferengine.errors import InferEngineError

RESULTS = ROOT / "benchmarks" / "results"
EVIDENCE = ROOT / "docs" / "evidence"
INDEX = EVIDENCE / "index.md"
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
GENERATED = ("docs/reference/", "docs/models.md", "docs/parameters.md", "docs/configuration.md")
MEASURED = re.compile(
    r"\d[\d,.]*\s?(?:(?:output |prompt |of )?tokens/s|tokens per second|tok/s|(?:ms|us|µs|TFLOP/s|TB/s)\b"
    r"|(?:GB|events|requests|messages)/s)"
)
FIGURE = re.compile(r"<!-- figure: (?P<file>\S+) (?P<paths>[^>]+?) -->")
TABLE = re.compile(r"<!-- [\w.-]+ -->\n\|")  # of benchmarks.published
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
NO_FILE, NO_MEASUREMENT = "no raw file was kept", "<!-- no measurement -->"
NOT_RECORDED = "not recorded"
OLD_COMMITS = 100  # of the code, since a result was measured
CODE = ("inferengine", "frontends")
END_S = 20.0  # for a run to clean up after its limit


# -- results ----------------------------------------------------------------------------------------------------------


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return every result by the name of its file."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def value_at(document: Any, path: str) -> float:
    """Return the number at a path of keys, indices and `key=value`, with `+` for a space. Raises LookupError."""
    for part in path.split("/"):
        name = part.replace("+", " ")
        if isinstance(document, list) and "=" in name:
            key, _, wanted = name.partition("=")
            found = [entry for entry in document if str(entry.get(key)) == wanted]
            if len(found) != 1:
                raise LookupError(f"{len(found)} entries have {name}")
            document = found[0]
        elif isinstance(document, list):
            document = document[int(name)]
        else:
            document = document[name]
    if isinstance(document, bool) or not isinstance(document, int | float):
        raise LookupError(f"{path} is no number")
    return float(document)


def rounded(value: float, written: str) -> str:
    """Return the value with as many decimals, and separators where `written` has them."""
    decimals = len(written.partition(".")[2])
    return f"{value:,.{decimals}f}" if "," in written or abs(value) < 1000 else f"{value:.{decimals}f}"


def problems_of_results(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a sentence for each result that does not say what it was measured with: revision, date, command and seed,
    which is null where nothing is random. Results from before they were written say so under `recorded`."""
    missing = []
    for name, result in results.items():
        about = result.get("environment")
        about = about if isinstance(about, dict) else {}
        absent = [key for key in ("revision", "date") if not about.get(key)]
        if not about.get("recorded"):
            absent += [key for key in ("command",) if not about.get(key)]
            absent += [key for key in ("seed",) if key not in about]
        missing += [f"benchmarks/results/{name} has no environment.{key}" for key in absent]
    return missing


# -- documents --------------------------------------------------------------------------------------------------------


def problems_of_document(name: str, text: str, results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return a sentence for each figure that differs from its result, and each section whose figures have none."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [f"{name}:{number}: {complaint}" for complaint in _differences(line, results)]
    for section in re.split(r"(?m)^(?=#{1,6} )", text):
        if MEASURED.search(section) and not _has_source(section, results):
            title = section.partition("\n")[0]
            found.append(f"{name}: '{title}' has measured figures and names neither a result nor that none was kept")
    return found


def _quotes(line: str) -> Iterator[tuple[str, list[str], float, list[re.Match[str]]]]:
    """Yield, for each comment of a line, its file, its paths, the scale, and the numbers that it is about."""
    end = 0
    for match in FIGURE.finditer(line):
        *paths, last = match["paths"].split()
        scale = 1.0
        if last[0] in "*/" and last[1:].replace(".", "").isdigit():
            scale = float(last[1:]) if last[0] == "*" else 1.0 / float(last[1:])
        else:
            paths.append(last)
        yield match["file"], paths, scale, list(NUMBER.finditer(line, end, match.start()))[-len(paths) :]
        end = match.end()


def _differences(line: str, results: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    for file, paths, scale, numbers in _quotes(line):
        if file not in results:
            yield f"there is no benchmarks/results/{file}"
        elif len(numbers) < len(paths):
            yield f"{len(paths)} paths and {len(numbers)} numbers before them"
        else:
            for number, path in zip(numbers, paths, strict=True):
                try:
                    right = rounded(scale * value_at(results[file], path), number[0])
                except (LookupError, ValueError, TypeError, AttributeError) as error:
                    yield f"{file} has no number at {path}: {error}"
                    continue
                if right != number[0]:
                    yield f"{number[0]} is {right} in {file} at {path}"


def corrected(text: str, results: Mapping[str, dict[str, Any]]) -> str:
    """Return a document with every number before a comment as its result has it, with as many decimals as it had.

    Raises LookupError for a path that leads nowhere.
    """
    lines = []
    for line in text.splitlines(keepends=True):
        for file, paths, scale, numbers in reversed(list(_quotes(line))):
            for number, path in reversed(list(zip(numbers, paths, strict=True))):
                right = rounded(scale * value_at(results[file], path), number[0])
                line = line[: number.start()] + right + line[number.end() :]
        lines.append(line)
    return "".join(lines)


def _has_source(section: str, results: Mapping[str, dict[str, Any]]) -> bool:
    if NO_MEASUREMENT in section or NO_FILE in " ".join(section.split()) or FIGURE.search(section):
        return True
    return bool(TABLE.search(section)) or any(f"{name}" in section for name in results)


def documents() -> dict[str, str]:
    """Return the text of every document that is not made from code, by its path in the checkout."""
    paths = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}
    names = sorted(str(path.relative_to(ROOT)) for path in paths)
    return {name: (ROOT / name).read_text() for name in names if not name.startswith(GENERATED)}


def problems() -> list[str]:
    """Return everything that is wrong with results and documents, a sentence each."""
    results = read_results()
    found = problems_of_results(results)
    for name, text in documents().items():
        found += problems_of_document(name, text, results)
    page = INDEX.read_text()
    listed = {name: result for name, result in results.items() if f"[{name}]" in page}  # --write lists new ones
    if not problems_of_results(results) and page != index(listed, known_ages(page)):
        found.append(f"{INDEX.relative_to(ROOT)} is not what the results say: inferengine evidence --write")
    return found


# -- the index --------------------------------------------------------------------------------------------------------


def index(results: Mapping[str, dict[str, Any]], age: Callable[[str, str], str]) -> str:
    """Return docs/evidence/index.md. `age`: of a file and its revision, how old it is in words."""
    lines = [
        "# Evidence",
        "",
        "Every result in benchmarks/results, made by `inferengine evidence --write`. *Old*: more than "
        f"{OLD_COMMITS} commits have changed the code since, counted when this page was made. What each row of the "
        "audit shows today is in [audit](audit.md).",
        "",
        "| result | benchmark | date | revision | age | machine | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        about = result["environment"]
        cells = (
            f"[{name}](../../benchmarks/results/{name})",
            str(result.get("benchmark", "")),
            str(about["date"])[:10],
            f"{about['revision']}{' (of the file)' if about.get('recorded') else ''}",
            age(name, str(about["revision"])),
            _machine(about),
            f"`{about['command']}`" if about.get("command", NOT_RECORDED) != NOT_RECORDED else NOT_RECORDED,
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    for plot in sorted(EVIDENCE.glob("*.svg")):
        lines += ["", f"![{plot.stem}]({plot.name})"]
    return "\n".join(lines) + "\n"


def _machine(about: Mapping[str, Any]) -> str:
    devices = about.get("devices") or [about[key] for key in ("device", "gpu") if about.get(key)]
    cores = about.get("cpus") or about.get("cores")
    return ", ".join([*map(str, devices), *([f"{cores} CPU cores"] if cores else [])]) or NOT_RECORDED


def known_ages(page: str) -> Callable[[str, str], str]:
    """Return the ages that a page has: they change with each commit, so only a new page has new ones."""
    rows = re.findall(r"(?m)^\| \[(\S+)\]\S+ \| [^|]* \| [^|]* \| [^|]* \| ([^|]*) \|", page)
    found = dict(rows)
    return lambda name, revision: found.get(name, "")


def age(name: str, revision: str) -> str:
    """Return how many commits have changed the code since a result's revision, in words: since the commit that brought
    its file, where its revision is not in this history, as that of a commit that was rebased since."""
    since = revision.removesuffix("-dirty")
    count = git("rev-list", "--count", f"{since}..HEAD", "--", *CODE)
    if not count.isdigit() and (since := git("log", "-1", "--format=%H", "--", f"benchmarks/results/{name}")):
        count = git("rev-list", "--count", f"{since}..HEAD", "--", *CODE)
    if not count.isdigit():
        return "unknown"
    return f"**old**, {count} commits" if int(count) > OLD_COMMITS else f"{count} commits"


def write_documents() -> None:
    """Write docs/evidence/index.md, and correct the figures of all documents. Raises LookupError."""
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    results = read_results()
    INDEX.write_text(index(results, age))
    for name, text in documents().items():
        if (right := corrected(text, results)) != text:
            (ROOT / name).write_text(right)


# -- runs -------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A command that makes one result: a module, or a file of scripts/, and its arguments. In it and in the flags of
    servers stand `{json}`, `{plots}` and `{folder}` for where it writes, `{shapes}` for a folder that has each of
    `shapes` (names of benchmarks/shapes.py) with a tokenizer and, where `has_weights`, random weights, `{peer}` for
    flags that say where vLLM is, `{url}` and `{theirs}` for addresses of servers.

    `service`: flags of the `inferengine up` at `{url}`; None: none. `theirs`: those of the `vllm serve` at `{theirs}`,
    its model first. `cards`: how many devices it needs. `packages`: what has to be installed for it. `limit_s`: it is
    ended after this long. `is_timed`: others would disturb its figures, so it runs alone; one that only passes or fails
    runs beside others of its kind.
    """

    name: str
    command: str
    service: str | None = None
    theirs: str | None = None
    shapes: tuple[str, ...] = ()
    has_weights: bool = False
    cards: int = 0
    packages: tuple[str, ...] = ()
    limit_s: float = 1800.0
    is_timed: bool = True


TOGETHER = "--load-together --card-gib 70 --json {json} {peer}"  # on a card of 80 GB
DRAWN = "--rows 1,16,64,128 --workloads decode-drawn,prefill,first-token,short"
EIGHT, SMALL = "{shapes}/llama-3.1-8b", "{shapes}/qwen3-0.6b"
COMPARED = (  # one run each, beside vLLM
    "qwen2.5-0.5b", "qwen3-0.6b", "gemma-3-1b", "llama-3.2-1b", "qwen2.5-1.5b", "llama-3.2-3b", "stablelm-3b",
    "phi-3-mini", "qwen3-4b", "olmo-2-7b", "qwen2.5-7b", "llama-3.1-8b", "granite-3.3-8b", "gemma-2-9b", "glm-4-9b",
    "qwen3-14b",
)  # fmt: skip
LOAD = "--url {url} --input 32 --output 32 --plots {plots} --json {json}"
RUNS = (
    Run("s1", "inferengine.cli simulate s1 --clock cpu --json {json}"),
    Run("s1-16000", "inferengine.cli simulate s1 --clock cpu --rounds 16 --json {json}"),
    Run("scheduler", "benchmarks.scheduler --json {json}"),
    Run("embeddings", "benchmarks.embeddings --encoder bge-small --threads 1 --rounds 5 --json {json}"),
    Run("sanity", "inferengine.cli bench sanity --url {url} --json {json}", ""),
    Run("sweep", f"inferengine.cli bench sweep {LOAD} --requests 64", ""),
    Run("arrivals", f"inferengine.cli bench arrivals {LOAD} --requests 96 --concurrency 32", ""),
    Run("batch", f"inferengine.cli bench batch {LOAD}", ""),
    Run(
        "pressure",
        "inferengine.cli bench pressure --url {url} --requests 128 --input 100:300 --output 64:128 --goodput e2e:60000 "
        "--plots {plots} --json {json}",
        "--cache.num_blocks 128",
    ),
    Run(
        "fragmentation",
        "inferengine.cli bench fragmentation --serve --requests 64 --input 16:200 --output 16:64 --plots {plots} "
        "--json {json}",
    ),
    Run("ladder-http", 'inferengine.cli bench ladder --serve="--cache.num_blocks 512" --plots {plots} --json {json}'),
    Run("upstream", "benchmarks.upstream --cores 0 1 --rounds 5 --events 160 --json {json}"),
    Run("kernels", "benchmarks.kernels --out {json}", cards=1, limit_s=600.0),
    Run("quantized", "benchmarks.quantized --json {json}", cards=1, limit_s=600.0),
    Run("ladder", "benchmarks.ladder --shape llama-3.1-8b --device cuda --json {json}", cards=1, limit_s=600.0),
    Run(
        "deepseek-v2-lite",
        "benchmarks.offline --shape deepseek-v2-lite --batches 1 16 64 128 --output-tokens 48 --prefill 8x4096 "
        "--temperature 1 --json {json}",
        cards=1,
        limit_s=150.0,
    ),
    Run(
        "offline-onnx",
        "benchmarks.offline --model inferengine/assets/embedded --batches 1 16 64 --temperature 1 "
        "--engine.executor onnx --engine.device cuda --json {json}",
        cards=1,
        packages=("onnxruntime",),
        limit_s=120.0,
    ),
    Run(
        "first-token",
        "benchmarks.first_token --shape llama-3.1-8b --prompts 256 1024 --json {json}",
        cards=1,
        limit_s=180.0,
    ),
    Run("first-token-hops", "benchmarks.first_token_hops --shape llama-3.1-8b --json {json}", cards=1, limit_s=120.0),
    Run(
        "startup",
        "benchmarks.startup --shape qwen3-0.6b llama-3.1-8b --fresh --engine-only --runs 3 --model.load_format dummy "
        "--json {json}",
        cards=1,
        limit_s=240.0,
    ),
    Run(
        "codes-dense",
        "benchmarks.codes --experts --dense int4 int8 --seconds 90 --json {json}",
        cards=1,
        limit_s=150.0,
    ),
    Run(
        "codes-experts",
        "benchmarks.codes --dense --experts qwen3-30b-a3b:int4 --expert-rows 1 16 64 --seconds 90 --json {json}",
        cards=1,
        limit_s=150.0,
    ),
    Run(
        "shared-prefix",
        "benchmarks.shared_prefix --device cuda --rows 64x8000 64x1000 --json {json}",
        cards=1,
        limit_s=150.0,
    ),
    Run(
        "tuned",
        "benchmarks.tuned --shapes llama-3.1-8b gpt-oss-20b qwen3-30b-a3b phi-3-mini gemma-2-9b --tables {folder} "
        "--json {json}",
        cards=1,
        limit_s=900.0,
    ),
    Run(
        "compare-loaded",
        "inferengine.cli bench compare --model {shapes}/qwen2.5-0.5b --model {shapes}/llama-3.2-1b "
        f"--model {{shapes}}/qwen3-0.6b {TOGETHER}",
        shapes=("qwen2.5-0.5b", "llama-3.2-1b", "qwen3-0.6b"),
        cards=1,
        packages=("vllm",),
        limit_s=500.0,
    ),
    Run(
        "compare-moe",
        f"inferengine.cli bench compare --model {{shapes}}/gpt-oss-20b {TOGETHER} {DRAWN}",
        shapes=("gpt-oss-20b",),
        has_weights=True,  # so that both sides route alike
        cards=1,
        packages=("vllm",),
        limit_s=400.0,
    ),
    Run(
        "compare-qwen-moe",
        f"inferengine.cli bench compare --model {{shapes}}/qwen3-30b-a3b --json {{json}} {{peer}} {DRAWN}",
        shapes=("qwen3-30b-a3b",),
        cards=1,
        packages=("vllm",),
        limit_s=600.0,
    ),
    Run(
        "compare-long",
        f"inferengine.cli bench compare --model {{shapes}}/llama-3.1-8b {TOGETHER} --workloads long,prefill",
        shapes=("llama-3.1-8b",),
        cards=1,
        packages=("vllm",),
        limit_s=400.0,
    ),
    Run(
        "features",
        "inferengine.cli bench features --url {url} --theirs {theirs} --prompt ids --first-id 300 --last-id 127000 "
        "--concurrency 64 --requests 128 --input 128 --output 128 --json {json} "
        "--features 'greedy,filters,penalties,logprobs,n,regex,schema,shared prefix'",  # a counted regex: 1.8 s a step
        service=f"{EIGHT} --model.load_format dummy --model.max_model_len 8192 --cache.num_blocks 2400",
        theirs=f"{EIGHT} --load-format dummy --dtype bfloat16 --max-model-len 8192 --gpu-memory-utilization 0.46",
        shapes=("llama-3.1-8b",),
        cards=1,
        packages=("vllm",),
        limit_s=420.0,
    ),
    *(
        Run(
            f"burst-{count}",
            "inferengine.cli bench paired --ours {url} --theirs {theirs} --prompt ids --first-id 300 --last-id 127000 "
            f"--concurrency {count} --requests {count} --input 128 --output 32 --runs 4 --json {{json}}",
            service=f"{SMALL} --model.load_format dummy --model.max_model_len 8192 --cache.num_blocks 2400",
            theirs=f"{SMALL} --load-format dummy --dtype bfloat16 --max-model-len 8192 --gpu-memory-utilization 0.46",
            shapes=("qwen3-0.6b",),
            cards=1,
            packages=("vllm",),
            limit_s=240.0,
        )
        for count in (64, 256)
    ),
    *(
        Run(
            f"compare-{shape}",
            f"inferengine.cli bench compare --model {{shapes}}/{shape} --quick --limit 200 --json {{json}} {{peer}}",
            shapes=(shape,),
            cards=1,
            packages=("vllm",),
            limit_s=420.0,
        )
        for shape in COMPARED
    ),
    Run(
        "sampling",
        "benchmarks.sampling --shape gemma-3-1b --device cuda --features temperature top_p filters --json {json}",
        cards=1,
        limit_s=120.0,
    ),
    Run(
        "embeddings-card",
        "benchmarks.embeddings --encoder bge-base --device cuda --prompts 1024 --json {json}",
        cards=1,
        limit_s=120.0,
    ),
    Run("test-gpu", "tests.gpu.run --total-seconds 520 --out {json}", cards=1, limit_s=540.0, is_timed=False),
    Run(
        "families",
        "scripts/compare_families --device cuda --seeds 1 --json {json}",
        cards=1,
        limit_s=600.0,
        is_timed=False,
    ),
    Run(
        "families-onnx",
        "scripts/compare_families --executor onnx --device cuda --seeds 1 --json {json}",
        cards=1,
        packages=("onnxruntime",),
        limit_s=300.0,
        is_timed=False,
    ),
    Run(
        "soak",
        "benchmarks.soak --hours 0.335 --device cuda --folder {folder} --json {json}",
        cards=1,
        limit_s=1380.0,
        is_timed=False,
    ),
    Run("two-cards", "benchmarks.two_cards --total 1150 --json {json} {peer}", cards=2, limit_s=1200.0),
)
SIDE_BY_SIDE = 4  # runs that are not timed


class RunsReport(NamedTuple):
    """The names of the runs that failed, and of those that were not begun because too little time was left."""

    failed: list[str]
    left: list[str]


def possible_runs(names: Sequence[str], devices: Sequence[str]) -> list[Run]:
    """Return the runs of these names, or all that this machine can: those of cards where there is one, else the others.

    Raises InferEngineError for a name that none has.
    """
    unknown = set(names) - {run.name for run in RUNS}
    if unknown:
        known = ", ".join(run.name for run in RUNS)
        raise InferEngineError("invalid_request", f"--only: '{min(unknown)}' is none of {known}")
    if names:
        return [run for run in RUNS if run.name in names]
    return [run for run in RUNS if run.cards <= len(devices) and all(map(find_spec, run.packages))]


def machine_name(devices: Sequence[str]) -> str:
    """Return how the files of results name this machine: h100 for "NVIDIA H100 80GB HBM3", cpu2 for two cores."""
    models = [word.lower() for word in " ".join(devices[:1]).split() if any(letter.isdigit() for letter in word)]
    return models[0] if models else f"cpu{os.cpu_count()}"


def run_all(
    runs: Sequence[Run],
    machine: str,
    folder: Path,
    say: Callable[[str], None],
    *,
    seconds: float = math.inf,
    resume: bool = False,
    peer: PeerPlace = HERE,
) -> RunsReport:
    """Run these, results to `folder` as NAME-MACHINE.json: the timed ones in turn, then the others side by side. With
    two cards the others have the second one and half of the cores meanwhile, and what needs several cards comes last.

    `seconds`: begin none whose limit is beyond them; on one card time for the longest that is not timed is kept.
    `resume`: skip what has a result of this revision there. `peer`: where vLLM is.
    """
    end = time.monotonic() + seconds
    outcome = RunsReport([], [])
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    known = {run.name for run in runs if resume and _is_there(folder / f"{run.name}-{machine}.json")}
    for name in sorted(known):
        say(f"{name}: has a result of this revision")
    runs = [run for run in runs if run.name not in known]

    def turn(run: Run, kept_s: float = 0.0, environment: Mapping[str, str] = NOTHING) -> None:
        left_s = end - time.monotonic() - kept_s
        if run.limit_s > left_s:
            say(f"{run.name}: not begun, it may take {run.limit_s:.0f} s and {max(0.0, left_s):.0f} s are left")
            outcome.left.append(run.name)
            return
        say(f"{run.name}: begun, may take {run.limit_s:.0f} s")
        began = time.monotonic()
        try:
            complaint = _run(run, folder / f"{run.name}-{machine}.json", peer, environment)
        except InferEngineError as error:
            complaint = str(error)
        say(f"{run.name}: {complaint or 'done'} after {time.monotonic() - began:.0f} s")
        if complaint:
            outcome.failed.append(run.name)

    timed = [run for run in runs if run.is_timed and run.cards < 2]
    others = sorted((run for run in runs if not run.is_timed), key=lambda run: -run.limit_s)
    cards = visible_cards()
    if len(cards) > 1 and timed and others:
        cores = sorted(os.sched_getaffinity(0))
        halves = cores[: len(cores) // 2], cores[len(cores) // 2 :]

        def lane(card: int, lane_runs: Sequence[Run]) -> None:
            os.sched_setaffinity(0, halves[card])  # of this thread, and of what it starts
            for run in lane_runs:
                turn(run, environment={"CUDA_VISIBLE_DEVICES": cards[card]})

        rest = [others[place::SIDE_BY_SIDE] for place in range(SIDE_BY_SIDE)]
        with ThreadPoolExecutor(1 + SIDE_BY_SIDE) as lanes:
            list(lanes.map(lane, [0, *[1] * SIDE_BY_SIDE], [timed, *rest]))
    else:
        for run in timed:
            turn(run, max((other.limit_s for other in others), default=0.0))
        with ThreadPoolExecutor(SIDE_BY_SIDE) as lanes:
            list(lanes.map(turn, others))
    for run in runs:
        if run.is_timed and run.cards >= 2:
            turn(run)
    return outcome


def _is_there(file: Path) -> bool:
    """Return whether a file has a result of this code."""
    try:
        return bool(json.loads(file.read_text())["environment"]["revision"] == revision())
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _run(run: Run, file: Path, peer: PeerPlace, environment: Mapping[str, str]) -> str:
    """Return what went wrong; what it printed is in a log beside the result then. `environment`: variables besides
    this process's."""
    flags = {"python": peer.python, "path": peer.path}
    places = {
        "json": file,
        "plots": EVIDENCE,
        "folder": file.with_suffix(""),
        "peer": " ".join(f"--peer-{name} {shlex.quote(value)}" for name, value in flags.items() if value),
    }

    def words(text: str) -> list[str]:
        return shlex.split(text.format(**places))

    with ExitStack() as stack:
        if run.shapes:
            places["shapes"] = stack.enter_context(tempfile.TemporaryDirectory())
            command = [sys.executable, "-m", "benchmarks.shapes", str(places["shapes"]), *run.shapes]
            command += ["--weights"] if run.has_weights else []
            subprocess.run(command, cwd=ROOT, env={**variables(), "PYTHONPATH": python_path()}, check=True)
        if run.service is not None:
            places["url"] = stack.enter_context(local_service(*words(run.service), environment=environment))
        if run.theirs is not None:
            places["theirs"] = stack.enter_context(peer_service(*words(run.theirs), peer=peer, environment=environment))
        program, *arguments = words(run.command)
        command = [program] if program.startswith("scripts/") else ["-m", program]
        log = file.with_suffix(".log")
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, *command, *arguments],
                cwd=ROOT,
                env={**variables(), "PYTHONPATH": python_path(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = child.wait(run.limit_s)
        except subprocess.TimeoutExpired:
            return f"ended, its limit was {run.limit_s:.0f} s"
        finally:
            _end(child)
        if code == 0:
            log.unlink()
        return f"exit code {code}" if code else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process, which may clean up first, with what is left of its group."""
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
