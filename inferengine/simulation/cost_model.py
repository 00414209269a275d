"""CostModel: how long a step takes, from what its plan holds.

Steps are of three kinds, each with coefficients of its own (`KindCost`):

    decodes     decode rows alone
    prompts     with prompt chunks
    launched    no CUDA graph holds them, so the host launches them kernel by kernel; only where there are graphs

    t = curve(tokens) + rows * row + KV tokens read by decodes * kv_token(decodes)
        + attention pairs of prompt chunks * pair + [rows differ from the step before] change

`curve` and `kv_token` join measured points by straight lines: the one bends where reading the weights ends to be what
takes the time, and wherever other kernels take over; the other falls with the number of rows, because a few rows do not
saturate a device's memory. Decodes read the whole context; a prompt chunk attends each of its tokens to all
before it. Where steps are captured as CUDA graphs (`CapturedSteps`), `tokens` are those of the graph that the step is
padded to.

With two steps in flight the host works while the device does (`HostCost`): its time counts where it is the longer one.
Without, it is part of every step's time and HostCost is nothing.

Of a model that N devices share (`divided`) a step takes

    t_N = undivided + (t - undivided) / N + sums * all_reduce(N, tokens * row)

`ALL_REDUCE_S` is measured; `Exchange` says how many sums a step has, how long a token's row is, and which part of a
step's time every rank spends for itself: norms, draws, and what lies between kernels.

The coefficients come from measured steps (fitting.py, benchmarks/calibrate.py), or from a model's shapes and a device's
ceilings (`analytic`) where nothing has been measured yet.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.core.executor import Capacity, KVGroup, StepPlan
from inferengine.errors import ConfigError

COSTS_FOLDER = Path(__file__).parent / "costs"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")  # of config.json: one of them


class StepShape(NamedTuple):
    """What the time of a step depends on. The fields from `seconds` on are of measured steps."""

    num_tokens: int
    num_rows: int
    num_decodes: int
    num_kv_tokens: int  # context read by decode rows, themselves included
    num_pairs: float  # (query, key) pairs of prompt chunks
    seconds: float = 0.0
    is_changed: bool = False  # its rows are not those of the step before
    host_s: float = 0.0  # of `seconds`, or beside them, what the host did for it
    is_device_time: bool = True  # the host waited for this step and the one before: `seconds` are the device's

    @property
    def has_chunks(self) -> bool:
        """Whether the step has prompt chunks."""
        return self.num_rows > self.num_decodes


def shape_of(plan: StepPlan, last_slots: Sequence[int] | None = None) -> StepShape:
    """Return the shape of a planned step. O(rows), most of it in one `sum`. `last_slots`: those of the step before."""
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
        """Return the tokens of the smallest graph with room for this step. None: it is launched kernel by kernel."""
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


Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class KindCost:
    """Seconds of the steps of one kind; see the module's formula. `curve`: (tokens, seconds), tokens ascending; flat
    before its first point, beyond its last one as steep as just before. `kv_token_s`: (decodes, seconds), flat at both
    ends."""

    curve: Curve
    row_s: float = 0.0
    kv_token_s: Curve = ()
    pair_s: float = 0.0
    change_s: float = 0.0

    def seconds(self, tokens: int, shape: StepShape) -> float:
        """Return the seconds of a step that is computed as `tokens` tokens."""
        seconds = self.at(tokens) + shape.num_rows * self.row_s + shape.num_pairs * self.pair_s
        if self.kv_token_s:
            decodes = min(max(shape.num_decodes, self.kv_token_s[0][0]), self.kv_token_s[-1][0])
            seconds += shape.num_kv_tokens * _height(self.kv_token_s, decodes)
        return seconds + self.change_s if shape.is_changed else seconds

    def at(self, tokens: float) -> float:
        """Return the curve at so many tokens."""
        return _height(self.curve, tokens)


def _height(curve: Curve, place: float) -> float:
    index = min(bisect_left(curve, (place,)), len(curve) - 1)
    if index == 0:
        return curve[0][1]
    (left, low), (right, high) = curve[index - 1], curve[index]
    return low + (high - low) * (place - left) / (right - left)


class HostTime(NamedTuple):
    """What the host does for a step. The device may begin after `plan_s`; it is not done before the host has launched
    all of it."""

    plan_s: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds of the host for a step: planning, and launching kernel by kernel where no graph holds it."""

    step_s: float = 0.0
    row_s: float = 0.0
    launch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long steps take: implements `simulation.virtual_engine.StepCost`."""

    decodes: KindCost
    prompts: KindCost
    launched: KindCost | None = None
    host: HostCost = HostCost()
    graphs: CapturedSteps | None = None

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds of one step on the device."""
        kind, tokens = self.kind_of(shape)
        if kind == "decodes":
            return self.decodes.seconds(tokens, shape)
        costs = self.launched if kind == "launched" else None
        return (costs or self.prompts).seconds(tokens, shape)

    def kind_of(self, shape: StepShape) -> tuple[str, int]:
        """Return the field with the coefficients of a step, and the tokens that it is computed as."""
        return kind_of(shape, self.graphs)

    def host_time(self, shape: StepShape) -> HostTime:
        """Return the seconds of one step on the host."""
        host = self.host
        plan_s = host.step_s + shape.num_rows * host.row_s
        return HostTime(plan_s, host.launch_s if host.launch_s and self.kind_of(shape)[0] == "launched" else 0.0)

    @property
    def prompt_token_s(self) -> float:
        """Seconds of one more prompt token in a large step."""
        curve = (self.launched or self.prompts).curve
        if len(curve) == 1:
            return 0.0
        (left, low), (right, high) = curve[-2:]
        return (high - low) / (right - left)


def kind_of(shape: StepShape, graphs: CapturedSteps | None) -> tuple[str, int]:
    """Return the kind of a step, one of CostModel's fields, and its tokens with the graph's padding."""
    kind = "prompts" if shape.has_chunks else "decodes"
    if graphs is None:
        return kind, shape.num_tokens
    padded = graphs.padded(shape)
    return ("launched", shape.num_tokens) if padded is None else (kind, padded)


def linear_cost(
    step_s: float,
    token_s: float,
    *,
    knee: float = 0.0,
    row_s: float = 0.0,
    kv_token_s: float = 0.0,
    pair_s: float = 0.0,
    change_s: float = 0.0,
) -> CostModel:
    """Return the cost model step + max(knee, tokens) * token + the rest, the same for all kinds of steps."""
    curve = ((knee, step_s + knee * token_s), (knee + 1.0, step_s + (knee + 1.0) * token_s))
    kind = KindCost(curve, row_s, ((1.0, kv_token_s),), pair_s, change_s)
    return CostModel(kind, kind)


@dataclass(frozen=True)
class Exchange:
    """What the ranks of a divided model exchange in a step: `sums` sums of a row of `row_bytes` for each token.
    `undivided_s`: seconds of a step that no rank takes from another."""

    sums: int
    row_bytes: int
    undivided_s: float


# Seconds of a sum over so many devices, with the residual add and norm after it, by bytes. Two H200s over NVLink, rows
# of 4,096 in bf16, in CUDA graphs (python -m benchmarks.tensor_parallel --sums OUT.json).
ALL_REDUCE_S: Mapping[int, Curve] = {
    2: (
        (8 << 10, 3.1e-6),
        (32 << 10, 3.2e-6),
        (128 << 10, 3.9e-6),
        (256 << 10, 4.4e-6),
        (512 << 10, 5.9e-6),
        (1 << 20, 8.5e-6),
        (2 << 20, 13.5e-6),
        (4 << 20, 18.9e-6),
        (16 << 20, 56.9e-6),
        (64 << 20, 195.8e-6),
    ),
}


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
    exchange: Exchange | None = None  # None: `divided` cannot tell

    def capacity(self, **changes: int) -> Capacity:
        """Return the capacity that the scheduler plans with. `changes`: any of this profile's sizes; 0 keeps it."""
        sizes = {name: changes.get(name) or getattr(self, name) for name in _SIZES}
        return Capacity(
            block_size=sizes["block_size"],
            groups=[KVGroup(sizes["num_blocks"])],
            max_num_seqs=sizes["max_num_seqs"],
            max_num_batched_tokens=sizes["max_num_batched_tokens"],
            max_model_len=sizes["max_model_len"],
            vocab_size=1 << 20,
            prefill_token_s=self.cost.prompt_token_s,
        )

    def divided(self, ranks: int) -> DeviceProfile:
        """Return the profile of `ranks` such devices that share the model: its steps, and as many times the KV blocks,
        of each of which a rank holds its part. Raises ConfigError where that was not measured."""
        if ranks == 1:
            return self
        if ranks not in ALL_REDUCE_S:
            known = ", ".join(map(str, ALL_REDUCE_S))
            raise ConfigError("--tensor-parallel", f"sums were measured over {known} devices, not over {ranks}")
        if self.exchange is None:
            raise ConfigError(
                "--tensor-parallel", f"{self.name} does not say what ranks exchange: it has no `exchange`"
            )
        cost, exchange = self.cost, self.exchange
        launched = None if cost.launched is None else _divided(cost.launched, ranks, exchange)
        decodes, prompts = (_divided(kind, ranks, exchange) for kind in (cost.decodes, cost.prompts))
        return replace(
            self,
            name=f"{self.name}, divided among {ranks}",
            cost=replace(cost, decodes=decodes, prompts=prompts, launched=launched),
            num_blocks=self.num_blocks * ranks,
        )

    def save(self, path: Path) -> None:
        """Write the profile as JSON, lists of numbers on one line."""
        text = json.dumps(asdict(self), indent=1)
        path.write_text(_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")


def _divided(kind: KindCost, ranks: int, exchange: Exchange) -> KindCost:
    """Return the cost of a kind of steps on each of `ranks` devices."""
    sums = ALL_REDUCE_S[ranks]
    places = sorted({tokens for tokens, _ in kind.curve} | {size / exchange.row_bytes for size, _ in sums})
    own, each = exchange.undivided_s, 1.0 / ranks
    curve = tuple(
        (
            place,
            own + (kind.at(place) - own) * each + exchange.sums * _height(sums, place * exchange.row_bytes),
        )
        for place in places
    )
    kv_token_s = tuple((decodes, seconds * each) for decodes, seconds in kind.kv_token_s)
    return replace(kind, curve=curve, kv_token_s=kv_token_s, pair_s=kind.pair_s * each)


_NUMBERS = re.compile(r"\[[\s\d.,e+-]*\]")
_SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


def load_profile(name: str) -> DeviceProfile:
    """Load a profile by the name of one in the package, or by the path of a JSON file. Raises ConfigError."""
    path = Path(name) if name.endswith(".json") else COSTS_FOLDER / f"{name}.json"
    try:
        document = json.loads(path.read_text())
        cost = _cost(document.pop("cost"))
        known = {item.name for item in fields(DeviceProfile)}
        if unknown := set(document) - known:
            raise ConfigError("--cost", f"{path.name} has unknown keys: {', '.join(sorted(unknown))}")
        if exchange := document.pop("exchange", None):
            document["exchange"] = Exchange(**exchange)
        return DeviceProfile(cost=cost, **document)
    except FileNotFoundError:
        names = ", ".join(profile_names()) or "none"
        raise ConfigError("--cost", f"no such cost model: {name}; there are {names}, or give a .json file") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError("--cost", f"{path.name} is not a cost model: {error}") from None


def _cost(document: Mapping[str, Any]) -> CostModel:
    if unknown := set(document) - {item.name for item in fields(CostModel)}:
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}; measure it again with benchmarks.calibrate")
    launched = document.get("launched")
    return CostModel(
        _kind(document["decodes"]),
        _kind(document["prompts"]),
        None if launched is None else _kind(launched),
        HostCost(**{key: float(value) for key, value in document.get("host", {}).items()}),
        _graphs(document.get("graphs")),
    )


def _kind(document: Mapping[str, Any]) -> KindCost:
    values: dict[str, Any] = {}
    for key, value in document.items():
        values[key] = tuple((float(x), float(y)) for x, y in value) if key in ("curve", "kv_token_s") else float(value)
    for curve in (values["curve"], values.get("kv_token_s", ())):
        if any(left >= right for (left, _), (right, _) in pairwise(curve)):
            raise ValueError("the points of a curve must ascend")
    if not values["curve"]:
        raise ValueError("a curve needs points")
    return KindCost(**values)


def _graphs(document: Mapping[str, Any] | None) -> CapturedSteps | None:
    if document is None:
        return None
    mixed = tuple((int(decodes), int(tokens)) for decodes, tokens in document["mixed"])
    return CapturedSteps(tuple(map(int, document["decodes"])), mixed, int(document["prompt_rows"]))


def profile_names() -> list[str]:
    """Return the names of the cost models in the package."""
    return sorted(path.stem for path in COSTS_FOLDER.glob("*.json"))


class ExpertShape(NamedTuple):
    """A mixture of experts in `num_layers` of the layers. `shared_size`: the width of a block that all tokens take."""

    num_layers: int
    num_experts: int
    num_chosen: int
    intermediate_size: int
    shared_size: int = 0


class LatentShape(NamedTuple):
    """Latent attention (DeepSeek): the cache holds a latent of `rank` numbers, and a rotated key, for all heads."""

    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    query_rank: int | None


class ModelShape(NamedTuple):
    """The parts of a decoder's configuration that decide its cost."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    experts: ExpertShape | None = None
    latent: LatentShape | None = None

    @property
    def num_matmul_weights(self) -> int:
        """Return the number of weights that a token is multiplied with: of experts those that it chooses (the input
        embedding is looked up, not multiplied)."""
        chosen = 0 if self.experts is None else self.experts.num_chosen
        return self._num_common_weights + chosen * self._weights_per_expert

    def num_read_weights(self, num_tokens: float) -> float:
        """Return how many of these weights a step reads: of experts those that as many tokens choose on average, where
        all are chosen equally often."""
        if self.experts is None:
            return self._num_common_weights
        missed: float = (1.0 - self.experts.num_chosen / self.experts.num_experts) ** num_tokens
        return self._num_common_weights + (1.0 - missed) * self.experts.num_experts * self._weights_per_expert

    @property
    def kv_numbers_per_token(self) -> int:
        """Return how many numbers the cache holds of a token, in all layers."""
        if self.latent is not None:
            return self.num_layers * (self.latent.rank + self.latent.rotary_dim)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def operations_per_pair(self) -> int:
        """Return the operations of attention between one query and one key, in all layers; of latents as they are."""
        width = 2 * self.head_dim if self.latent is None else 2 * self.latent.rank + self.latent.rotary_dim
        return 2 * self.num_layers * self.num_heads * width

    @property
    def _num_common_weights(self) -> int:
        """Weights that all tokens are multiplied with."""
        sparse = 0 if self.experts is None else self.experts.num_layers
        blocks = (self.num_layers - sparse) * 3 * self.intermediate_size
        if self.experts is not None:
            blocks += sparse * (3 * self.experts.shared_size + self.experts.num_experts)  # and the router
        return self.num_layers * self._attention_weights + self.hidden_size * (blocks + self.vocab_size)

    @property
    def _weights_per_expert(self) -> int:
        """Of all layers together; 0 without experts."""
        return (
            0
            if self.experts is None
            else self.experts.num_layers * 3 * self.hidden_size * self.experts.intermediate_size
        )

    @property
    def _attention_weights(self) -> int:
        if self.latent is None:
            return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        rank, rotary_dim, plain_dim, value_dim, query_rank = self.latent
        queries = self.num_heads * (plain_dim + rotary_dim)
        made = queries * self.hidden_size if query_rank is None else query_rank * (self.hidden_size + queries)
        made += self.hidden_size * (rank + rotary_dim) + rank * self.num_heads * (plain_dim + value_dim)
        return made + self.num_heads * value_dim * self.hidden_size


class DeviceCeilings(NamedTuple):
    """What a device reaches in practice, not on its data sheet."""

    memory_bytes_per_s: float
    flops_per_s: float
    step_s: float  # fixed time of a step: launches, scheduling, sampling
    row_s: float = 0.0


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape from the config.json of a decoder built like Llama, with experts or not, or like DeepSeek-V2.
    Raises ConfigError naming a missing key."""
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,  # of latents: means nothing
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            experts=_experts_of(config),
            latent=_latent_of(config),
        )
    except KeyError as error:
        raise ConfigError("config.json", f"has no {error.args[0]}") from None


def _experts_of(config: Mapping[str, Any]) -> ExpertShape | None:
    number = next((config[key] for key in EXPERT_KEYS if config.get(key)), None)
    if number is None:
        return None
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    first, every = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq", 1)
    return ExpertShape(
        num_layers=sum(layer >= first and layer % every == 0 for layer in range(config["num_hidden_layers"])),
        num_experts=number,
        num_chosen=config["num_experts_per_tok"],
        intermediate_size=width,
        shared_size=width * (config.get("n_shared_experts") or 0) or config.get("shared_expert_intermediate_size", 0),
    )


def _latent_of(config: Mapping[str, Any]) -> LatentShape | None:
    if config.get("kv_lora_rank") is None:
        return None
    return LatentShape(
        config["kv_lora_rank"],
        config["qk_rope_head_dim"],
        config["qk_nope_head_dim"],
        config["v_head_dim"],
        config.get("q_lora_rank"),
    )


def analytic(
    shape: ModelShape, device: DeviceCeilings, *, weight_bytes: float = 2.0, kv_bytes: float = 2.0
) -> CostModel:
    """Return a cost model from first principles, the roofline (Williams, Waterman and Patterson, 2009).

    A step takes the time to read the weights, of experts those that its tokens choose, or to multiply with them,
    whichever is longer, to read the KV, and to compute the attention.
    """
    token_s = 2.0 * shape.num_matmul_weights / device.flops_per_s

    def seconds(num_tokens: float) -> float:
        read_s = shape.num_read_weights(num_tokens) * weight_bytes / device.memory_bytes_per_s
        return device.step_s + max(read_s, num_tokens * token_s)

    # Between the first points experts join; at the last two products take longer than all weights take to be read.
    knee = shape.num_read_weights(math.inf) * weight_bytes / device.memory_bytes_per_s / token_s
    places = [2.0**power for power in range(20) if 2.0**power < knee] if shape.experts is not None else []
    curve = tuple((place, seconds(place)) for place in [*places, knee, knee + 1.0])
    kv_token_s = shape.kv_numbers_per_token * kv_bytes / device.memory_bytes_per_s
    pair_s = shape.operations_per_pair / device.flops_per_s
    kind = KindCost(curve, device.row_s, ((1.0, kv_token_s),), pair_s)
    return CostModel(kind, kind)
