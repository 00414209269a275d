"""EngineCore and an executor in one process, no sockets: what the engine itself costs.

python benchmarks/offline.py --shape llama-3.1-8b --batches 1 8 32 --prefill 16x4096 --mixed 512 [--json FILE]
python benchmarks/offline.py --shape qwen3-30b-a3b --router-skew 0 1.0 --mixed 400 --mixed-in 128-384 --mixed-out 32-96
python benchmarks/offline.py --model FOLDER --against transformers [--speculation.method none]

Rows: `decode` (median ms per step at a steady batch), `prefill` (prompt tokens per second), `mixed` (requests of random
lengths submitted at once: output tokens per second), `generate` (the same prompts to us and to transformers' generate,
one after the other in this process: tokens per second and their ratio). `roofline` is the engine's own share.

Random routers spread tokens evenly over experts, which trained ones do not: `--router-skew S` measures every row again
with experts whose popularity falls about as 1 / rank ** S (`router` in its row).
"""

from __future__ import annotations

import argparse
import atexit
import gc
import itertools
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.device import Clock
from benchmarks.shapes import SHAPES, write_weights
from benchmarks.speculation import HEROES
from inferengine.bench.environment import write_result
from inferengine.config import Config, load, parse_flags
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Request
from inferengine.core.speculation import build_proposer, speculation_method
from inferengine.core.step_time import Roofline
from inferengine.engine.core import EngineCore
from inferengine.engine.model_info import read_model_card
from inferengine.engine.options import scheduler_options
from inferengine.engine.process import build_executor
from inferengine.layers.moe import MoeMLP
from inferengine.sampling_params import SamplingParams
from inferengine.text import ChatTemplate, Tokenizer

Row = dict[str, Any]


class Bench:
    """A loaded engine and a counter of requests."""

    def __init__(self, config: Config, clock: Clock | None = None, *, has_skew: bool = False) -> None:
        """`has_skew`: routers get biases of zeros, which `skew_routers` may change later, graphs included."""
        self.config = config
        self.clock = clock or Clock("wall")
        self.num_threads = config.engine.threads or torch.get_num_threads()
        begin = time.perf_counter()
        self.executor = build_executor(config)
        self.capacity = self.executor.load(lambda phase, share: None)
        self.load_s = time.perf_counter() - begin
        if has_skew:
            skew_routers(self.executor.model, 0.0)
        begin = time.perf_counter()
        self.executor.warm_up(lambda phase, share: None)
        self.warm_up_s = time.perf_counter() - begin
        freeze()
        self.known = self.executor.roofline()
        self.uid = 0
        self.random = random.Random(0)

    def roofline(self) -> Roofline | None:
        """Return a fresh roofline, to compare what comes with; None where the device's peaks are unknown."""
        return Roofline(self.known.work, self.known.peaks) if self.known is not None else None

    def core(self, *, speculates: bool = False) -> EngineCore:
        """Make a fresh scheduler without prefix cache, so that no run lives off the one before. `speculates`: as far as
        speculation.method says, else every step is one token a row."""
        options = SchedulerOptions(
            self.capacity.max_num_batched_tokens, self.capacity.max_num_seqs, prefix_caching=False
        )
        proposer = None
        if speculates:
            asked = scheduler_options(self.config, self.capacity)
            options = replace(options, max_drafts=asked.max_drafts, max_running_to_draft=asked.max_running_to_draft)
            proposer = build_proposer(self.config.speculation.method, self.capacity)
        core = EngineCore(
            self.executor, self.capacity, options, clock=self.clock.now, on_failure=_raise, proposer=proposer
        )
        core.roofline = self.roofline()
        return core

    def submit(self, core: EngineCore, prompt: int | list[int], max_tokens: int, temperature: float = 0.0) -> None:
        self.uid += 1
        ids = self.prompt(prompt) if isinstance(prompt, int) else prompt
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        core.submit(Request(uid=self.uid, prompt_ids=ids, params=params, max_tokens=max_tokens, seed=self.uid))

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(self.capacity.vocab_size) for _ in range(length)]

    def decode(self, batch: int, prompt: int, num_tokens: int, temperature: float) -> Row:
        """Measure milliseconds between results of steps in which every row decodes."""
        core = self.core()
        for _ in range(batch):
            self.submit(core, prompt, num_tokens, temperature)
        times: list[float] = []
        last = None
        while core.has_work:
            output = core.step()
            now = time.perf_counter()
            full = output is not None and len(output.uids) == batch and not output.finished
            if full and last is not None:
                times.append((now - last) * 1e3)
            last = now if full else None
        times = sorted(times[len(times) // 10 :])
        return {
            "row": "decode", "batch": batch, "prompt_tokens": prompt, "output_tokens": num_tokens,
            "temperature": temperature, "median_ms": round(statistics.median(times), 4),
            "mean_ms": round(statistics.fmean(times), 4), "p99_ms": round(times[int(len(times) * 0.99)], 4),
            "tokens_per_s": round(batch / statistics.fmean(times) * 1e3, 1), "roofline": share(core, "decode"),
        }  # fmt: skip

    def prefill(self, num_prompts: int, length: int, repeats: int = 3) -> Row:
        """Measure prompt tokens per second, one output token each."""
        seconds = []
        for _ in range(repeats + 1):
            core = self.core()
            for _ in range(num_prompts):
                self.submit(core, length, 1)
            begin = time.perf_counter()
            drain(core)
            seconds.append(time.perf_counter() - begin)
        best = statistics.median(seconds[1:])
        return {
            "row": "prefill", "prompts": num_prompts, "prompt_tokens": length,
            "seconds": round(best, 4), "tokens_per_s": round(num_prompts * length / best, 1),
            "roofline": share(core, "prefill"),
        }  # fmt: skip

    def mixed(
        self, count: int, inputs: tuple[int, int], outputs: tuple[int, int], temperature: float, seed: int = 0
    ) -> Row:
        """Run requests of random lengths, all submitted at once. All inputs are drawn before the outputs, as benchmarks
        of other engines draw them."""
        rng = random.Random(seed)
        drawn = [rng.randint(*inputs) for _ in range(count)], [rng.randint(*outputs) for _ in range(count)]
        lengths = list(zip(*drawn, strict=True))
        core = self.core()
        for prompt, output in lengths:
            self.submit(core, prompt, output, temperature)
        begin = time.perf_counter()
        drain(core)
        seconds = time.perf_counter() - begin
        total_in, total_out = sum(a for a, _ in lengths), sum(b for _, b in lengths)
        return {
            "row": "mixed", "requests": count, "seed": seed, "input_tokens": total_in, "output_tokens": total_out,
            "temperature": temperature, "seconds": round(seconds, 3),
            "output_tokens_per_s": round(total_out / seconds, 1), "preemptions": core.scheduler.stats.num_preemptions,
        }  # fmt: skip

    def generate(self, core: EngineCore, prompts: list[list[int]], num_tokens: int) -> float:
        """Measure the seconds for these prompts, greedy, all submitted at once. `core` keeps its measured
        acceptance."""
        for prompt in prompts:
            self.submit(core, prompt, num_tokens)
        begin = self.clock.now()
        drain(core)
        return self.clock.now() - begin


def skew_routers(model: nn.Module, exponent: float) -> Row:
    """Return bias every router's experts by -exponent * log(rank), ranks shuffled layer by layer. Returns how tokens of
    random numbers spread over the first layer's experts: the busiest expert's share of the tokens, and how many
    different experts 64 tokens take."""
    generator = torch.Generator().manual_seed(5)
    blocks = [module for module in model.modules() if isinstance(module, MoeMLP)]
    for block in blocks:
        router, count = block.router, block.config.num_experts
        ranks = 1 + torch.randperm(count, generator=generator)
        bias = torch.cat((-exponent * ranks.log(), torch.zeros(sum(router.parts) - count)))
        if router.bias is None:
            like = next(iter(model.parameters()))
            router.bias = nn.Parameter(bias.to(like.device, like.dtype), requires_grad=False)
        else:
            router.bias.data.copy_(bias)
    block = blocks[0]
    device, dtype = block.router.bias.device, block.router.bias.dtype
    x = torch.randn(4096, block.gate_up.in_features, generator=generator).to(device, dtype)
    with torch.inference_mode():
        scores = block.router(x)[:, : block.config.num_experts]
    chosen = scores.float().topk(block.config.num_chosen, -1).indices
    busiest = torch.bincount(chosen.flatten()).max().item() / len(x)
    spread = [len(part.unique()) for part in chosen.split(64)]
    return {"skew": exponent, "busiest_expert": round(busiest, 3), "experts_of_64": round(statistics.fmean(spread), 1)}


def story_prompts(folder: Path) -> list[list[int]]:
    """Return chats that ask for a story, of one length in tokens, which transformers computes without padding."""
    card = read_model_card(load(environment={}).with_values(model={"path": str(folder)}))
    tokenizer, template = Tokenizer.from_files(card.files), ChatTemplate.from_files(card.files)
    by_length: dict[int, list[list[int]]] = {}
    for first, second in itertools.permutations(HEROES, 2):
        text = f"Tell me a story about a {first} and a {second}."
        text = template.render([{"role": "user", "content": text}]) if template else text
        ids = tokenizer.encode(text, add_special_tokens=template is None)
        by_length.setdefault(len(ids), []).append(ids)
    return max(by_length.values(), key=len)


def against_transformers(
    bench: Bench, folder: Path, batches: list[int], prompt: int, num_tokens: int, rounds: int, stories: bool
) -> list[Row]:
    """Run the same prompts through transformers' generate, alternating with ours after a round that is not counted.
    Prompts are random tokens, other ones each round, or `stories`, where draft tokens are accepted as in real text."""
    from transformers import AutoModelForCausalLM

    dtype, device = bench.executor.dtype, bench.executor.device
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    freeze()
    rows = []
    for batch in batches:
        known = story_prompts(folder) if stories else []
        core = bench.core(speculates=True)
        ours, theirs = [], []
        for turn in range(rounds + 1):
            if stories:
                prompts = [known[(turn * batch + row) % len(known)] for row in range(batch)]
            else:
                prompts = [bench.prompt(prompt) for _ in range(batch)]
            ours.append(bench.generate(core, prompts, num_tokens))
            torch.set_num_threads(bench.num_threads)  # the engine chooses anew for each of its steps
            begin = bench.clock.now()
            with torch.inference_mode():
                ids = torch.tensor(prompts, device=device)
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                    max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                )  # fmt: skip
            assert out.shape[1] == len(prompts[0]) + num_tokens
            theirs.append(bench.clock.now() - begin)
        total = batch * num_tokens
        us, them = total / statistics.median(ours[1:]), total / statistics.median(theirs[1:])
        row: Row = {"row": "generate", "batch": batch, "prompt_tokens": len(prompts[0]), "output_tokens": num_tokens}
        row["speculation"] = speculation_method(bench.config.speculation.method, bench.capacity)
        row |= {"tokens_per_s": round(us, 1), "transformers_tokens_per_s": round(them, 1), "ratio": round(us / them, 3)}
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def environment(bench: Bench) -> Row:
    executor = bench.executor
    on_cuda = executor.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_cuda else platform.processor() or platform.machine(),
        "threads": bench.num_threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": str(executor.dtype),
        "kv_blocks": [group.num_blocks for group in bench.capacity.groups],
        "load_s": round(bench.load_s, 3),
        "warm_up_s": round(bench.warm_up_s, 3),
    }


def share(core: EngineCore, phase: str) -> float | None:
    """Return the share of the roofline, as the engine itself counts it (core/step_time.py)."""
    return core.roofline.shares().get(phase) if core.roofline is not None else None


def freeze() -> None:
    """Exclude what is loaded from garbage collection, as the service does: it is there to stay."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else Triton reports at the end what was never collected


def drain(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def _raise(error: BaseException) -> None:
    raise error


def _pair(text: str, separator: str) -> tuple[int, int]:
    first, _, second = text.partition(separator)
    return int(first), int(second)


def main() -> None:
    flags, rest = parse_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every key of the configuration is a flag too: --engine.threads 2, --model.dtype float32",
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prefill", nargs="*", default=[], metavar="COUNTxLENGTH")
    parser.add_argument("--mixed", type=int, default=0, metavar="REQUESTS")
    parser.add_argument("--mixed-in", default="128-1024", metavar="LOW-HIGH")
    parser.add_argument("--mixed-out", default="64-512", metavar="LOW-HIGH")
    parser.add_argument("--mixed-seed", type=int, default=0, help="of the lengths")
    parser.add_argument(
        "--router-skew", type=float, nargs="*", default=[], help="measure a mixture of experts with each of these"
    )
    parser.add_argument("--against", choices=["transformers"])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: of one thread, with --against")
    parser.add_argument("--prompts", choices=["random", "stories"], default="random", help="with --against")
    parser.add_argument("--rounds", type=int, default=3, help="of each side, by turns, with --against")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(rest)
    if (arguments.model is None) == (arguments.shape is None):
        parser.error("name --model or --shape, one of them")

    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or Path(scratch)
        values = {"path": str(folder)}
        if arguments.shape:
            (folder / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
        if arguments.shape and arguments.against:
            write_weights(folder, arguments.shape)  # that both sides can load
        elif arguments.shape:
            values["load_format"] = "dummy"
        config = load(flags=flags).with_values(model=values)
        bench = Bench(config, Clock(arguments.clock), has_skew=bool(arguments.router_skew))
        rows: list[Row] = []
        router: Row = {}

        def report(row: Row) -> None:
            row |= router
            rows.append(row)
            print(json.dumps(row), flush=True)

        about = environment(bench)
        print(json.dumps(about), flush=True)
        size = arguments.prompt_tokens, arguments.output_tokens
        if arguments.against:
            stories = arguments.prompts == "stories"
            rows += against_transformers(bench, folder, arguments.batches, *size, arguments.rounds, stories)
        for skew in arguments.router_skew or [None]:
            if skew is not None:
                router = {"router": skew_routers(bench.executor.model, skew)}
            for batch in () if arguments.against else arguments.batches:
                report(bench.decode(batch, *size, arguments.temperature))
            for text in arguments.prefill:
                report(bench.prefill(*_pair(text, "x")))
            if arguments.mixed:
                lengths = _pair(arguments.mixed_in, "-"), _pair(arguments.mixed_out, "-")
                report(bench.mixed(arguments.mixed, *lengths, arguments.temperature, arguments.mixed_seed))
    if arguments.json:
        model = arguments.shape or arguments.model.name
        document = {"benchmark": "offline", "model": model, "environment": about, "rows": rows}
        write_result(arguments.json, document)


if __name__ == "__main__":
    main()
