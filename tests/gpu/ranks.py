"""Two cards give the tokens of one: small checkpoints in fp32 with CUDA graphs, and the embedded model in bf16.

python -m tests.gpu.ranks [--cases llama,gpt-oss] [--limit S] [--json FILE] [--device cpu]

Each model runs on one card and on two, in processes of their own, all of them side by side. In fp32 tokens must be
equal and log-probabilities within 1e-4: in chunks, preempted, from cached prefixes, drawn, with penalties, grammars,
adapters and draft tokens. In bf16 the tokens of two cards are read again by one card in fp32, and must keep to the
margins that tests/gpu/formats.py sets for one card. With `--device cpu` ranks are processes that exchange over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from inferengine.bench.environment import write_result

PROMPT_LENGTHS = (3, 137, 117, 129)
MOST_DIFFERENCE = 1e-4  # of log-probabilities, in fp32
CASES = ("llama", "qwen3", "gemma3", "qwen2-moe", "gpt-oss", "deepseek-v2", "embedded")
DEFAULT_CASES = tuple(name for name in CASES if name != "deepseek-v2")
BF16 = "embedded"
POLL_S = 0.05
Outputs = dict[str, Any]


# -- one model on one card or two, in a process of its own ------------------------------------------------------------


def make_checkpoint(name: str, folder: Path) -> Path:
    """Return a checkpoint with seeded random weights, of the shapes that tests on a CPU compare, and two adapters."""
    from tests.lora.adapters import write_adapter
    from tests.models.checkpoints import FAMILIES, make_model, model_of, save
    from tests.models.families import CASES as SHAPES

    if name in FAMILIES:
        saved = save(make_model(name), folder)
    else:
        saved = save(model_of(SHAPES[name].config, SHAPES[name].values), folder)
    if name == "llama":
        targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
        write_adapter(folder / "adapters" / "plain", make_model(name), targets=targets)
        write_adapter(folder / "adapters" / "dora", make_model(name), targets=targets, dora=True)
    return saved


class Run:
    """A model on `ranks` ranks. What it gives is collected in `outputs`, to be compared."""

    def __init__(self, folder: Path, ranks: int, device: str) -> None:
        from tests.executor.parallel import Pair

        self._folder, self._ranks, self._device = folder, ranks, device
        self._pair = Pair() if ranks == 2 else None
        self._launched: set[str] = set()
        self.outputs: Outputs = {}

    def engine(self, **values: Any) -> Any:
        """Load an engine and warm it up; the one before is unloaded."""
        from inferengine.executor.torch_executor import build_executor
        from tests.executor.engine import Engine

        build: Callable[..., Any] = build_executor if self._pair is None else self._pair.build
        values = {"budget": 128, "num_blocks": 64, "block_size": 16, **values}
        model = {"dtype": "float32", **values.pop("model", {})}
        engine = Engine(self._folder, build=build, device=self._device, model=model, **values)
        engine.executor.warm_up(lambda phase, share: None)
        return engine

    def run(self, engine: Any) -> None:
        """Run until everything has ended."""
        while engine.core.has_work:
            engine.step()
            self._launched.add(engine.executor.launched)

    def chunks_preemption_and_prefixes(self) -> None:
        engine = self.engine(num_blocks=30)
        for again in range(2):
            uids = [engine.submit(prompt, 40, logprobs=5) for prompt in prompts()]
            self.run(engine)
            self.outputs[f"greedy {again}"] = [engine.outputs[uid] for uid in uids]
            self.outputs[f"logprobs {again}"] = [
                value for uid in uids for item in engine.logprobs[uid] for value in item.top_logprobs
            ]
        self.outputs["preempted"] = engine.core.scheduler.stats.num_preemptions > 0
        close(engine, self._pair)

    def what_requests_ask_for(self) -> None:
        from tests.core.builders import ThirdsGrammar

        engine = self.engine(max_num_seqs=8)
        asked = [
            engine.submit(prompts()[0], 12, temperature=0.8, top_p=0.9, top_k=40, seed=7),
            engine.submit(prompts()[1], 24, grammar=ThirdsGrammar()),
            engine.submit(prompts()[2], 12, temperature=1.0, seed=-5, presence_penalty=0.5, logit_bias=((3, 2.0),)),
            engine.submit(prompts()[3], 12, repetition_penalty=1.3, bad_words_ids=((5,), (7, 8))),
        ]
        read = engine.submit(prompts(5, (70,))[0], 3, prompt_logprobs=2)
        embedded = engine.embed(prompts(6, (40,))[0], "mean")
        self.run(engine)
        self.outputs["asked for"] = [engine.outputs[uid] for uid in asked]
        self.outputs["prompt logprobs"] = [item.logprob for item in engine.prompt_logprobs[read]]
        self.outputs["embedding logprobs"] = engine.embeddings[embedded]  # within rounding, as log-probabilities
        close(engine, self._pair)

    def adapters(self) -> None:
        engine = self.engine(model={"adapters": str(self._folder / "adapters")})
        numbers = engine.executor.adapters.names()
        chosen = (numbers["plain"], 0, numbers["dora"], numbers["dora"])
        uids = [engine.submit(prompt, 10, adapter=each) for prompt, each in zip(prompts(), chosen, strict=True)]
        self.run(engine)
        self.outputs["adapters"] = [engine.outputs[uid] for uid in uids]
        close(engine, self._pair)

    def draft_tokens(self) -> None:
        from tests.executor.engine import Foreknowledge

        proposer = Foreknowledge()
        engine = self.engine(proposer=proposer, max_drafts=3)
        first = engine.generate(prompts(), 20)
        proposer.texts += [[*prompt, *output] for prompt, output in zip(prompts(), first, strict=True)]
        second = engine.generate(prompts(), 20)
        self.outputs["with draft tokens"] = second
        self.outputs["without draft tokens"] = first
        self.outputs["accepted"] = engine.core.scheduler.snapshot().num_drafts_accepted > 20
        close(engine, self._pair)

    def close(self) -> Outputs:
        """Return what was found, and how: by graphs or not, and by which sums."""
        sums = "none"
        if self._pair is not None:
            communicator = self._pair.communicator
            sums = "peer memory" if communicator is not None and communicator.uses_peer_memory else "torch.distributed"
            self._pair.close()
        return {"outputs": self.outputs, "launched": sorted(self._launched), "sums": sums}


def close(engine: Any, pair: Any) -> None:
    """Unload an engine; a pair keeps its processes."""
    if pair is None:
        engine.executor.close()
    else:
        pair.unload()


def prompts(seed: int = 1, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    import random

    rng = random.Random(seed)
    return [[rng.randrange(301) for _ in range(length)] for length in lengths]


def run_fp32(name: str, folder: Path, ranks: int, device: str) -> Outputs:
    """Run one model in fp32; the first one with everything."""
    run = Run(folder, ranks, device)
    run.chunks_preemption_and_prefixes()
    if name == "llama":
        run.what_requests_ask_for()
        run.draft_tokens()
        run.adapters()
    return run.close()


def run_bf16(ranks: int, device: str, generated: Path) -> Outputs:
    """Run the embedded model: two ranks generate in bf16 into the file `generated`; one reads it again in fp32."""
    from inferengine import SamplingParams
    from tests.gpu import formats

    def settings(dtype: str) -> dict[str, Any]:
        return {"model": {"dtype": dtype}, "engine": {"device": device, "tensor_parallel": ranks}}

    with formats.engine(settings("bfloat16" if ranks == 2 else "float32")) as llm:
        if ranks == 2:
            params = SamplingParams(temperature=0.0, max_tokens=formats.OUTPUT_TOKENS, ignore_eos=True)
            found = [
                (result.prompt_ids, list(result.choices[0].token_ids))
                for result in llm.generate(formats.PROMPTS, params, progress=False)
            ]
            generated.with_suffix(".part").write_text(json.dumps(found))
            generated.with_suffix(".part").rename(generated)
            return {"tokens": sum(len(output) for _, output in found)}
        while not generated.exists():  # ended by the process that started this one
            time.sleep(POLL_S)
        mean, chosen = formats.read_again(llm, json.loads(generated.read_text()))
        return {"mean_loss": mean, "chosen": chosen}


# -- all of them ------------------------------------------------------------------------------------------------------


def difference(one: Outputs, two: Outputs) -> tuple[list[str], float]:
    """Return what differs between the outputs of one rank and of two, and how far log-probabilities are apart."""
    wrong, most = [], 0.0
    for name, value in one.items():
        if "logprobs" in name:
            pairs = list(zip(value, two[name], strict=True))
            apart = max(abs(a - b) for a, b in pairs)
            most = max(most, apart)
            wrong += [name] if apart > MOST_DIFFERENCE else []
        elif value != two[name]:
            wrong.append(name)
    wrong += [name for name in ("preempted", "accepted") if two.get(name) is False]
    return wrong, most


def judged(name: str, one: Outputs, two: Outputs, device: str) -> tuple[list[str], str]:
    """Return what is wrong with a model, and a line about it."""
    from tests.gpu.formats import FORMATS

    if name == BF16:
        most_loss, least_chosen = FORMATS["bfloat16"][1:]
        good = one["mean_loss"] <= most_loss and one["chosen"] >= least_chosen
        text = f"bf16, {two['tokens']} tokens: mean loss {one['mean_loss']:.4f} (at most {most_loss}), "
        return [] if good else ["margins"], text + f"fp32's choice {one['chosen']:.3f} (at least {least_chosen})"
    wrong, most = difference(one["outputs"], two["outputs"])
    if device == "cuda" and not any("graph" in how for how in two["launched"]):
        wrong.append("no step was a graph")
    tokens = sum(len(row) for value in one["outputs"].values() if isinstance(value, list) for row in _rows(value))
    return wrong, f"fp32, {tokens} tokens equal, log-probabilities within {most:.1e}; sums: {two['sums']}"


def _rows(value: list[Any]) -> list[list[int]]:
    return [row for row in value if isinstance(row, list)]


class Children:
    """The processes of all models. Each leads a process group, so that its ranks end with it."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(self, name: str, checkpoint: Path) -> None:
        """Run a model on one rank and on two."""
        for ranks in (1, 2):
            command = [sys.executable, "-m", "tests.gpu.ranks", "--device", self._device, "--run", name]
            command += ["--ranks", str(ranks), "--folder", str(checkpoint), "--out", str(self.out(name, ranks))]
            with self._log(name, ranks).open("w") as log:
                child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            self._running[name, ranks] = child

    def out(self, name: str, ranks: int) -> Path:
        return self._folder / f"{name}-{ranks}.json"

    def _log(self, name: str, ranks: int) -> Path:
        return self._folder / f"{name}-{ranks}.log"

    def wait(self, deadline_s: float) -> None:
        """Wait until all have ended, or the time is over."""
        while time.monotonic() < deadline_s and any(child.poll() is None for child in self._running.values()):
            time.sleep(POLL_S)
            if any(child.poll() for (name, _), child in self._running.items() if name == BF16):
                self._end(self._running[BF16, 1])  # it would wait for the other's file

    def outputs(self, name: str, ranks: int) -> Outputs | str:
        """Return what a process found, or the errors it named and the end of what it said."""
        if self.out(name, ranks).exists():
            found: Outputs = json.loads(self.out(name, ranks).read_text())
            return found
        ended = self._running[name, ranks].poll() is not None
        said = self._log(name, ranks).read_text(errors="replace").strip().splitlines()
        named = [line for line in said[:-12] if "Error" in line or "error:" in line][:12]
        return f"{ranks} ranks {'failed' if ended else 'took too long'}: " + "\n    ".join(named + said[-12:])

    def close(self) -> None:
        """End all that still run, their ranks too."""
        for child in self._running.values():
            self._end(child)

    @staticmethod
    def _end(child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # ranks, in groups of their own, end with their parent
            child.wait()


def run_all(names: list[str], device: str, limit_s: float) -> list[dict[str, Any]]:
    """Run the models side by side and compare; a row for each."""
    begin, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        children = Children(Path(scratch), device)
        try:
            if BF16 in names:
                children.start(BF16, Path(scratch))
            for name in [name for name in names if name != BF16]:
                children.start(name, make_checkpoint(name, Path(scratch, name)))
            children.wait(begin + limit_s)
            for name in names:
                found = [children.outputs(name, ranks) for ranks in (1, 2)]
                problems = [each for each in found if isinstance(each, str)]
                if problems:
                    rows.append({"case": name, "wrong": ["no result"], "text": "; ".join(problems)})
                else:
                    wrong, text = judged(name, *found, device)  # type: ignore[arg-type]  # no strings
                    rows.append({"case": name, "wrong": wrong, "text": text})
        finally:
            children.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(DEFAULT_CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="seconds for all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, choices=[1, 2], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        generated = options.folder / "generated.json"
        if options.run == BF16:
            found = run_bf16(options.ranks, options.device, generated)
        else:
            found = run_fp32(options.run, options.folder, options.ranks, options.device)
        options.out.with_suffix(".part").write_text(json.dumps(found))
        options.out.with_suffix(".part").rename(options.out)
        return 0
    names = options.cases.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"--cases knows {', '.join(CASES)}; got {min(unknown)}")
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        print("it needs two cards")
        return 1
    begin = time.monotonic()
    rows = run_all(names, options.device, options.limit)
    for row in rows:
        print(f"{'FAIL: ' + ', '.join(row['wrong']) + ' ' if row['wrong'] else ''}{row['case']:12} {row['text']}")
    wrong = [row["case"] for row in rows if row["wrong"]]
    seconds = round(time.monotonic() - begin, 1)
    if options.json is not None:
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        document = {"benchmark": "ranks", "device": options.device, "seconds": seconds, "cases": rows}
        write_result(options.json, {"environment": {"devices": devices}, **document})
    print(
        f"{len(rows)} models on one {options.device} rank and on two, {seconds} s, wrong: {', '.join(wrong) or 'none'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
