"""CostModel: how long a step takes, from what its plan holds.

    t = step + [chunks] chunk_step + [rows differ from the step before] change + max(knee, tokens) * token + rows * row
        + KV tokens read by decodes * kv_token + attention pairs of prompt chunks * pair

Up to `knee` tokens a step reads every weight once whatever it computes; beyond, arithmetic decides. Decodes read the
whole context; a prompt chunk attends each of its tokens to everything before it. A step with chunks has an overhead of
its own; one whose rows have changed writes slots and tables, and on a CPU gathers keys anew.

Where steps are captured as CUDA graphs (`CapturedSteps`), `tokens` are those of the graph that the step is padded to. A
step that no graph holds is launched kernel by kernel, which takes as long as computing `eager_knee` tokens.

The coefficients come from measured steps (`fit`, benchmarks/calibrate.py) or from a model's shapes and a device's
ceilings (`analytic`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.core.executor import Capacity, KVGroup
from inferengine.core.plan import StepPlan
from inferengine.errors import ConfigError

COSTS_FOLDER = Path(__file__).parent / "costs"


class StepShape(NamedTuple):
    """What the time of a step depends on. `seconds` is there for measured ones."""

    num_tokens: int
    num_rows: int
    num_decodes: int
    num_kv_tokens: int  # context read by decode rows, themselves included
    num_pairs: float  # (query, key) pairs of prompt chunks
    seconds: float = 0.0
    is_changed: bool = False  # its rows are not those of the step before

    @property
    def has_chunks(self) -> bool:
        return self.num_rows > self.num_decodes


def shape_of(plan: StepPlan, last_slots: Sequence[int] | None = None) -> StepShape:
    """The shape of a planned step. O(rows), most of it in one `sum`. `last_slots`: of the step before, if any."""
    decodes, starts, counts = plan.num_decodes, plan.starts, plan.counts
    num_rows = len(starts)
    changed = last_slots is not None and plan.slots != last_slots
    if decodes == num_rows:
        return StepShape(plan.num_tokens, num_rows, decodes, sum(starts) + decodes, 0.0, 0.0, changed)
    pairs = 0.0
    for row in range(decodes, num_rows):
        count = counts[row]
        pairs += count * (starts[row] + 0.5 * (count + 1))
    return StepShape(plan.num_tokens, num_rows, decodes, sum(starts[:decodes]) + decodes, pairs, 0.0, changed)


@dataclass(frozen=True)
class CapturedSteps:
    """The CUDA graphs that steps are padded to: batch sizes of decodes, and (decodes, prompt tokens) of mixed steps
    with at most `prompt_rows` prompts, both from small to large."""

    decodes: tuple[int, ...] = ()
    mixed: tuple[tuple[int, int], ...] = ()
    prompt_rows: int = 0

    def padded(self, shape: StepShape) -> int | None:
        """Tokens of the smallest graph with room for this step. None: it is launched kernel by kernel."""
        if not shape.has_chunks:
            place = bisect_left(self.decodes, shape.num_rows)
            return self.decodes[place] if place < len(self.decodes) else None
        if shape.num_rows - shape.num_decodes > self.prompt_rows:
            return None
        prompt_tokens = shape.num_tokens - shape.num_decodes
        for decodes, tokens in self.mixed:
            if decodes >= shape.num_decodes and tokens >= prompt_tokens:
                return decodes + tokens
        return None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds per unit; see the module's formula. Knees are in tokens."""

    step_s: float
    token_s: float
    knee: float = 0.0
    chunk_step_s: float = 0.0
    row_s: float = 0.0
    kv_token_s: float = 0.0
    pair_s: float = 0.0
    change_s: float = 0.0
    eager_knee: float = 0.0
    graphs: CapturedSteps | None = None

    def seconds(self, shape: StepShape) -> float:
        """Time of one step."""
        seconds = (
            self.step_s
            + self.tokens_of(shape) * self.token_s
            + shape.num_rows * self.row_s
            + shape.num_kv_tokens * self.kv_token_s
        )
        if shape.is_changed:
            seconds += self.change_s
        if shape.num_rows > shape.num_decodes:
            seconds += self.chunk_step_s + shape.num_pairs * self.pair_s
        return seconds

    def tokens_of(self, shape: StepShape) -> float:
        """Tokens that the step costs: its own, its graph's, or as many as reading the weights or launching takes."""
        if self.graphs is None:
            return shape.num_tokens if shape.num_tokens > self.knee else self.knee
        padded = self.graphs.padded(shape)
        return max(self.eager_knee, shape.num_tokens) if padded is None else max(self.knee, padded)


@dataclass(frozen=True)
class DeviceProfile:
    """A cost model with the capacity that it was measured at, and how: what a simulation starts from."""

    name: str
    cost: CostModel
    block_size: int = 16
    num_blocks: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 8192
    max_in_flight: int = 1
    source: Mapping[str, Any] = field(default_factory=dict)  # machine, model, date, error of the fit

    def capacity(self, **changes: int) -> Capacity:
        """The device as the scheduler sees it. `changes`: any of this profile's sizes; 0 leaves it."""
        sizes = {name: changes.get(name) or getattr(self, name) for name in _SIZES}
        return Capacity(
            block_size=sizes["block_size"],
            groups=[KVGroup(sizes["num_blocks"])],
            max_num_seqs=sizes["max_num_seqs"],
            max_num_batched_tokens=sizes["max_num_batched_tokens"],
            max_model_len=sizes["max_model_len"],
            vocab_size=1 << 20,
            prefill_token_s=self.cost.token_s,
        )

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


_SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def load_profile(name: str) -> DeviceProfile:
    """A profile by the name of one that comes with the package, or by the path of a JSON file. Raises ConfigError."""
    path = Path(name) if name.endswith(".json") else COSTS_FOLDER / f"{name}.json"
    try:
        document = json.loads(path.read_text())
        values = document.pop("cost")
        graphs = _graphs(values.pop("graphs", None))
        cost = CostModel(**{key: float(value) for key, value in values.items()}, graphs=graphs)
        known = {item.name for item in fields(DeviceProfile)}
        if unknown := set(document) - known:
            raise ConfigError("--cost", f"{path.name} has unknown keys: {', '.join(sorted(unknown))}")
        return DeviceProfile(cost=cost, **document)
    except FileNotFoundError:
        names = ", ".join(profile_names()) or "none"
        raise ConfigError("--cost", f"no such cost model: {name}; there are {names}, or give a .json file") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError("--cost", f"{path.name} is not a cost model: {error}") from None


def _graphs(document: Mapping[str, Any] | None) -> CapturedSteps | None:
    if document is None:
        return None
    mixed = tuple((int(decodes), int(tokens)) for decodes, tokens in document["mixed"])
    return CapturedSteps(tuple(map(int, document["decodes"])), mixed, int(document["prompt_rows"]))


def profile_names() -> list[str]:
    """The cost models that come with the package."""
    return sorted(path.stem for path in COSTS_FOLDER.glob("*.json"))


class ModelShape(NamedTuple):
    """What of a decoder's configuration decides its cost."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False

    @property
    def num_matmul_weights(self) -> int:
        """Weights that every token is multiplied with (the input embedding is looked up, not multiplied)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.hidden_size * self.vocab_size


class DeviceCeilings(NamedTuple):
    """What a device reaches, not what its data sheet says."""

    memory_bytes_per_s: float
    flops_per_s: float
    step_s: float  # fixed time of a step: launches, scheduling, sampling
    row_s: float = 0.0


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """From a Hugging Face config.json of a Llama-like decoder. Raises ConfigError naming the missing key."""
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ConfigError("config.json", f"has no {error.args[0]}") from None


def analytic(
    shape: ModelShape, device: DeviceCeilings, *, weight_bytes: float = 2.0, kv_bytes: float = 2.0
) -> CostModel:
    """A cost model from first principles, the roofline (Williams, Waterman and Patterson, 2009): reading the weights
    or multiplying with them, whichever takes longer; reading KV; attention's arithmetic."""
    weights_s = shape.num_matmul_weights * weight_bytes / device.memory_bytes_per_s
    token_s = 2.0 * shape.num_matmul_weights / device.flops_per_s
    kv_token_bytes = 2.0 * shape.num_layers * shape.num_kv_heads * shape.head_dim * kv_bytes
    return CostModel(
        step_s=device.step_s,
        token_s=token_s,
        knee=weights_s / token_s,
        row_s=device.row_s,
        kv_token_s=kv_token_bytes / device.memory_bytes_per_s,
        pair_s=4.0 * shape.num_layers * shape.num_heads * shape.head_dim / device.flops_per_s,
    )
