"""Serves causal models that have no family of their own with transformers' modules and this engine's paged attention.

transformers builds the model from config.json, of classes that are part of transformers: code of a checkpoint is never
run. Its attention goes through transformers' attention interface to PagedAttention, which writes and reads the paged KV
cache. All tokens of a step are one row [1, T] with their own positions.

That is exact for models whose tokens meet in that attention alone, and in modules whose states are in transformers'
cache (models/recurrent.py). What each layer asks of its attention (heads, scale, window) is recorded from a forward
pass on `meta`, so nothing about a model is listed here. What the paged attention cannot compute is refused by name.
`TransformersModel.verify` then checks on the loaded weights that tokens meet nowhere else, and that positions are those
given.

Linear layers become this engine's, for quantized weights and LoRA, and so do experts that are gated blocks: the model's
own router chooses, `Ops.add_experts` multiplies. No CUDA graphs: the modules may wait for the device.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from inferengine.errors import ConfigError
from inferengine.kernels.batch import Batch
from inferengine.kernels.ops import Ops
from inferengine.layers.attention import CachedAttention
from inferengine.layers.decoder_config import DecoderConfig, MoeConfig
from inferengine.layers.linear import Linear
from inferengine.layers.moe import RoutedExperts
from inferengine.models.decoder import DecoderModel, PartOfStep, Target, WeightMap
from inferengine.models.hf_config import LAYER_COUNTS, MOST_LAYERS, ConfigReader, refused
from inferengine.models.table import nearest
from inferengine.models.weights import LAYER

if TYPE_CHECKING:
    from inferengine.models.recurrent import RecurrentStates, StatefulModules

logger = logging.getLogger(__name__)

NAME = "inferengine"  # of the attention, in transformers' tables
PLACE = "inferengine_place"  # attribute of a module of transformers: what computes its attention
# fmt: off
WITHOUT_EFFECT = frozenset((  # arguments that the attention may be passed
    "cache_position", "dropout", "layer_idx", "output_attentions", "output_hidden_states", "position_ids",
    "return_dict", "use_cache",
))
# fmt: on
FAR = (0, 1, 2, 7, 100, 5000, 100_003)  # positions at which a mask is compared with what it is taken for
OWN_ATTENTION = "its attention does not use transformers' attention interface"
TOKENS, POSITIONS = (7, 3, 11, 5), (5, 2, 9, 4)  # that `verify` computes together and apart
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}  # of `verify`, relative


class AttentionCall(NamedTuple):
    """What one layer asks of its attention. `head_dim` is of queries and keys, `value_dim` of values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool = False


# Stands for the attention of a model that has none (Mamba): whatever counts blocks and tokens goes on as usual, and
# nothing is written there.
UNUSED_ATTENTION = AttentionCall(1, 1, 64, 64, 1.0, None, None)
LONGEST_WITHOUT_ATTENTION = 131_072  # tokens; such models say nothing of it


@dataclass(frozen=True)
class TransformersConfig(DecoderConfig):
    """A configuration that transformers has read. `values` is config.json, `calls` one entry per attention layer."""

    values: str = "{}"
    calls: tuple[AttentionCall, ...] = ()
    prefix: str = ""  # the name of the model without its head


@dataclass(frozen=True)
class Mask:
    """Stands for the attention mask between transformers' mask and attention functions."""

    window: int | None

    def __getitem__(self, places: Any) -> Mask:
        """Return the mask of all tokens, where models take what they need of one (Gemma 4). Raises _CannotServe for a
        part of it."""
        for place in places if isinstance(places, tuple) else (places,):
            if not isinstance(place, slice) or place.start not in (None, 0) or place.stop is not None:
                raise _CannotServe("it takes attention masks apart")
        return self


# -- what transformers knows -------------------------------------------------------------------------------------------


def knows(values: dict[str, Any]) -> bool:
    """Return whether transformers has a causal model of its own for a decoded config.json."""
    return _causal_class(values) is not None


def version() -> str:
    """Return the version of transformers."""
    import transformers

    found: str = transformers.__version__
    return found


def why_not(values: dict[str, Any]) -> str:
    """Say why `knows` is false of a config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return (
            f"model_type {model_type!r} is known neither here nor to transformers {version()}, and code of a "
            "checkpoint is never run"
        )
    found = _causal_class({**values, "architectures": None})
    if found is not None:
        return f"{model_type!r} is served as {found.__name__}"
    if values.get("is_encoder_decoder"):
        return f"{model_type!r} is an encoder with a decoder"
    if "text_config" in values:
        return f"{model_type!r} sees or hears, and its text model is not read"
    return f"{model_type!r} is no causal language model"


def _causal_class(values: dict[str, Any]) -> Any:
    """Return the class of transformers for this config; None: there is none, or the checkpoint is of another kind."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    found = found[0] if isinstance(found, tuple) else found
    names = values.get("architectures")
    named = names[0] if isinstance(names, list) and names else found.__name__
    base = f"{found.__name__.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}Model"
    return found if named in (found.__name__, base) else None


@functools.lru_cache(maxsize=8)
def _config_of(text: str) -> tuple[Any, Any]:
    """Return (transformers' config, the class of the causal model). Raises ConfigError."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = json.loads(text)
    model_class = _causal_class(values)
    try:
        config = CONFIG_MAPPING[values["model_type"]].from_dict(
            {name: _number(value) for name, value in values.items() if name not in ("auto_map", "quantization_config")}
        )
    except Exception as error:  # its checks raise errors of many kinds
        raise refused(f"config.json: transformers cannot read it ({_first_line(error)})") from None
    _register()
    return config, model_class


def _number(value: Any) -> Any:
    """Read what transformers writes for an infinite number, also in a list."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value["__float__"]) if isinstance(value, dict) and set(value) == {"__float__"} else value


def read_config(config: ConfigReader) -> TransformersConfig:
    """Read config.json with transformers, and record what the model asks of its attention. Raises ConfigError."""
    for name, value in config.values.items():
        config.value(name)
        if name in LAYER_COUNTS and isinstance(value, (int, float)) and value > MOST_LAYERS:
            raise refused(f"{config.where}: {name} must be at most {MOST_LAYERS}; got {value}")
    values = {name: value for name, value in config.values.items() if name != "quantization_config"}
    return _read(json.dumps(values, sort_keys=True), config.dtype())


@functools.lru_cache(maxsize=8)
def _read(text: str, dtype: str) -> TransformersConfig:
    theirs, model_class = _config_of(text)
    name = model_class.__name__
    stateful = _has_states(theirs)
    if getattr(model_class, "_is_stateful", False) and not stateful and not _attends_everywhere(theirs):
        raise _no_attention(name, "it keeps a state between tokens that is not in transformers' cache")
    if _conversions(str(theirs.model_type)) is None:
        raise _no_attention(name, "transformers joins or divides tensors of its checkpoints")
    causal = _on_meta(text)
    prefix = model_class.base_model_prefix
    base = getattr(causal, prefix, None)
    if not isinstance(base, nn.Module) or not (stateful or _takes_positions(base)):
        raise _no_attention(name, "it takes no positions of tokens")
    if stateful:
        _to_bfloat16(base)  # which shows the states that are fp32 whatever the weights are
    blocks = _expert_modules(name, base)
    recording = _record(name, base)
    calls = [call for _, call in recording.calls] or [UNUSED_ATTENTION]
    if recording.calls and not _takes_positions(base):
        raise _no_attention(name, "it takes no positions of tokens")
    first, num_layers = calls[0], len(calls)
    if stateful:
        num_layers = int(getattr(theirs, "num_hidden_layers", num_layers))
    num_kv_heads = max(call.num_kv_heads for call in calls)  # layers with fewer hold each several times
    if any(num_kv_heads % call.num_kv_heads or call.num_heads % num_kv_heads for call in calls):
        raise _no_attention(name, "its layers differ in their number of KV heads, which do not divide each other")
    embedding = causal.get_input_embeddings().weight
    return TransformersConfig(
        model_type=str(theirs.model_type),
        vocab_size=int(causal.get_output_embeddings().weight.shape[0]),
        hidden_size=int(causal.get_output_embeddings().weight.shape[1]),
        intermediate_size=_widest(base),
        num_layers=num_layers,
        num_heads=max(call.num_heads for call in calls),
        num_kv_heads=num_kv_heads,
        head_dim=max(max(call.head_dim, call.value_dim) for call in calls),
        max_position=_max_position(theirs) if recording.calls else LONGEST_WITHOUT_ATTENTION,
        norm_eps=1e-5,
        windows=tuple(call.window for call in calls),
        attention_scale=first.scale,
        tied_embeddings=causal.get_output_embeddings().weight is embedding,
        dtype=dtype,
        implementation="transformers",
        moe=_moe_config(base, blocks, recording.num_chosen, num_layers),
        states=() if recording.stateful is None else recording.stateful.tensors(),
        values=text,
        calls=tuple(calls),
        prefix=prefix,
    )


def _has_states(config: Any) -> bool:
    """Return whether transformers' cache for this configuration has states beside keys and values."""
    from inferengine.models.recurrent import has_states

    try:
        return has_states(config)
    except Exception:  # a cache of the model's own
        return False


def _to_bfloat16(base: nn.Module) -> None:
    """Make the parameters of a model on `meta` bfloat16, but for those that are fp32 in every checkpoint."""
    for parameter in base.parameters():
        if getattr(parameter, "number_type", None) is None:
            parameter.data = parameter.data.to(torch.bfloat16)


def _attends_everywhere(config: Any) -> bool:
    """Return whether a model that may keep a state has attention alone in this configuration (Granite 4.0 Micro)."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return isinstance(kinds, list) and all(str(kind) in ATTENTION_KINDS for kind in kinds)


ATTENTION_KINDS = ("attention", "full_attention", "sliding_attention")


def _expert_modules(name: str, base: nn.Module) -> dict[str, nn.Module]:
    """Find transformers' modules of experts, by name. Raises ConfigError where they are not gated blocks in the usual
    layout."""
    from transformers.integrations import moe

    found: dict[str, nn.Module] = {}
    for place, module in base.named_modules():
        if _are_without_gate(module):
            continue
        up, down = (getattr(module, each, None) for each in ("gate_up_proj", "down_proj"))
        if not (isinstance(up, nn.Parameter) and up.dim() == 3):
            if any(parameter.dim() == 3 and "expert" in place for parameter in module.parameters(recurse=False)):
                raise _no_attention(name, "its experts are not gated blocks that this engine computes")
            continue
        of: Any = module
        usual = isinstance(down, nn.Parameter) and up.shape[1] == 2 * down.shape[2] and up.shape[2] == down.shape[1]
        usual = usual and getattr(of, "is_concatenated", True) and not getattr(of, "is_transposed", False)
        usual = usual and not getattr(of, "has_bias", False) and not getattr(of, "has_post_expert_norm", False)
        gate = getattr(type(of), "_apply_gate", None)
        if not usual or gate not in (None, getattr(moe, "_default_apply_gate", None)) or _activation(of) is None:
            raise _no_attention(name, "its experts are not gated blocks that this engine computes")
        found[place] = module
    return found


def _are_without_gate(module: Any) -> bool:
    """Return whether a module is transformers' experts of two projections (Nemotron 3), which compute themselves."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    return getattr(module, "has_gate", None) is False and names == ["up_proj", "down_proj"]


def _activation(experts: Any) -> str | None:
    """Name the activation of transformers' experts as this engine does; None: it is another."""
    function = getattr(experts, "act_fn", None)
    return ACTIVATIONS.get(getattr(function, "__name__", type(function).__name__))


ACTIVATIONS = {
    "SiLU": "silu",
    "silu": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def _moe_config(base: nn.Module, blocks: dict[str, nn.Module], num_chosen: int, num_layers: int) -> MoeConfig | None:
    """Describe the experts for the plan of memory; None: there are none."""
    if not blocks:
        return None
    numbers = {int(found.group(1)) for place in blocks if (found := LAYER.search(f".{place}."))}
    dense = tuple(index for index in range(num_layers) if index not in numbers)
    return _experts_config(next(iter(blocks.values())), num_chosen, dense)


def _experts_config(experts: Any, num_chosen: int, dense: tuple[int, ...] = ()) -> MoeConfig:
    return MoeConfig(experts.down_proj.shape[0], num_chosen, experts.down_proj.shape[2], dense_layers=dense)


class Conversions(NamedTuple):
    """How checkpoints of a model differ from transformers' modules. `renamed`: parts of names, theirs and the modules'.
    `experts`: names with a * for each expert, by the tensor of a module that they are joined into."""

    renamed: tuple[tuple[str, str], ...]
    experts: dict[str, list[str]]
    beginnings: tuple[tuple[str, str], ...] = ()  # of names, theirs and the modules': a checkpoint has either

    def names(self, name: str) -> list[str]:
        """Return what checkpoints may call a tensor of the modules."""
        stored = self.stored(name)
        others = [theirs + stored.removeprefix(ours) for theirs, ours in self.beginnings if stored.startswith(ours)]
        return [stored, *others]

    def stored(self, name: str) -> str:
        """Return what checkpoints call a tensor of the modules, or each expert's part of it."""
        for theirs, ours in reversed(self.renamed):
            name = name.replace(ours, theirs)
        return name

    def of_experts(self, name: str) -> list[str]:
        """Return the names of the parts of a tensor of all experts, with a *, before they are renamed; empty where
        checkpoints have one tensor."""
        for ours, theirs in self.experts.items():
            if ours in name:
                return [name.replace(ours, each) for each in theirs]
        return []


def _conversions(model_type: str) -> Conversions | None:
    """Read what transformers does to checkpoints of this type; None: more than renaming and joining experts."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    renamed: list[tuple[str, str]] = []
    beginnings: list[tuple[str, str]] = []
    experts: dict[str, list[str]] = {}
    for item in get_checkpoint_conversion_mapping(model_type) or ():
        sources, targets = list(item.source_patterns), list(item.target_patterns)
        operations = [type(each).__name__ for each in getattr(item, "operations", None) or ()]
        plain = [re.sub(r"\\(.)", r"\1", each) for each in (*sources, *targets)]
        if operations in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]) and len(targets) == 1:
            experts[plain[-1]] = plain[:-1]
        elif not operations and len(plain) == 2 and (found := re.fullmatch(r"\^([\w.]+)\(\.\+\)\$?", plain[0])):
            beginnings.append((found[1], plain[1].removesuffix("1")))
        elif operations or len(plain) != 2 or any(re.search(r"[][^$*+?(){}|]", each) for each in plain):
            return None
        else:
            renamed.append((plain[0], plain[1]))
    return Conversions(tuple(renamed), experts, tuple(beginnings))


def _max_position(config: Any) -> int:
    """Return the longest context. Frequencies that depend on the sequence's length are used up to where they change:
    cached keys must not depend on how long their sequence becomes."""
    found = next(
        (value for name in POSITION_KEYS if type(value := getattr(config, name, None)) is int and value > 0), 0
    )
    if not found:
        raise refused(f"config.json: none of {', '.join(POSITION_KEYS)} says how long a sequence may be")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            original = getattr(config, "original_max_position_embeddings", None)
            found = min(found, int(rope.get("original_max_position_embeddings") or original or found))
    return found


POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


def _widest(base: nn.Module) -> int:
    """Return the widest input or output of a layer, which the memory of a step depends on."""
    widths = [
        max(module.in_features, module.out_features) for module in base.modules() if isinstance(module, nn.Linear)
    ]
    shapes = [max(parameter.shape, default=1) for name, parameter in base.named_parameters() if "embed" not in name]
    return max(widths or shapes)


# -- building ----------------------------------------------------------------------------------------------------------


def _on_meta(text: str) -> Any:
    """Build transformers' causal model with its parameters on `meta` and its other tensors computed, on the CPU. Raises
    ConfigError."""
    config, model_class = _config_of(text)
    try:
        with torch.device("meta"):
            causal = model_class._from_config(config, attn_implementation=NAME).eval()
        with torch.device("cpu"):
            _compute_buffers(causal)
    except Exception as error:  # a size that does not divide, an unknown activation: errors of many kinds
        if NAME in str(error):  # it chooses among attention classes of its own
            raise _no_attention(model_class.__name__, OWN_ATTENTION) from None
        raise refused(f"config.json: transformers builds no {model_class.__name__} ({_first_line(error)})") from None
    return causal


def _compute_buffers(causal: Any) -> None:
    """Give tensors that no checkpoint holds (frequencies, tables of angles) their values, by the model's own rules."""
    kept = {name for name, _ in causal.named_non_persistent_buffers()}
    for module_name, module in causal.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if f"{module_name}.{name}".lstrip(".") in kept:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
            elif buffer.is_floating_point():  # part of checkpoints: loaded as parameters are
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
    for parameter in causal.parameters():
        parameter.requires_grad_(False)
        parameter._is_hf_initialized = True  # what transformers' initialization leaves alone
    causal.initialize_weights()
    wide = (*(causal._keep_in_fp32_modules or ()), *(causal._keep_in_fp32_modules_strict or ()))
    for name, parameter in causal.named_parameters():
        if any(part in name.split(".") or part == name for part in wide):
            parameter.number_type = torch.float32  # read by models/weights.py


class TransformersLinear(Linear):
    """A Linear for inputs of any number of dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map inputs [..., in] to outputs [..., out]."""
        count = math.prod(x.shape[:-1])
        rows = x.reshape(count, self.in_features).contiguous()  # some models transpose before a product (Mamba)
        out = super().forward(rows)
        return out.view(*x.shape[:-1], out.shape[-1])


class PagedAttention(CachedAttention):
    """The attention of one layer, over the paged cache."""

    def __init__(self, ops: Ops, config: TransformersConfig, call: AttentionCall) -> None:
        super().__init__()
        self.ops, self.call, self.head_dim = ops, call, config.head_dim
        self.num_kv_heads = config.num_kv_heads
        self.group = config.group_windows.index(call.window)
        self.batch: Batch | None = None  # of the step; None: `verify` runs, and tokens see themselves alone

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict[str, Any]
    ) -> tuple[torch.Tensor, None]:
        """Attend with queries [1, H, T, D], keys [1, K, T, D] and values [1, K, T, Dv] -> [1, T, H, Dv]."""
        call, batch = self.call, self.batch
        if batch is None:
            return self._of_itself(query, key, value), None
        repeats = self.num_kv_heads // call.num_kv_heads
        if repeats > 1:
            key, value = (part.repeat_interleave(repeats, 1) for part in (key, value))
        parts = [functional.pad(part[0], (0, self.head_dim - part.shape[-1])) for part in (query, key, value)]
        qkv = torch.cat([part.to(value.dtype) for part in parts]).transpose(0, 1).reshape(query.shape[2], -1)
        mixed = self.ops.attention_qkv(
            qkv.contiguous(),
            None,
            None,
            0.0,
            None,
            self.kv,
            batch,
            self.group,
            call.num_heads,
            self.num_kv_heads,
            call.scale,
            call.window,
            call.softcap,
            self.kv_scales,
            options["s_aux"].float() if call.sinks else None,
        )
        return mixed.view(1, -1, call.num_heads, self.head_dim)[..., : call.value_dim].contiguous(), None

    def _of_itself(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Mix each token's own query, key and value: shows what positions and neighbours have done to them."""
        width = min(self.call.head_dim, self.call.value_dim)
        repeats = self.call.num_heads // self.call.num_kv_heads
        both = functional.pad(key[..., :width], (0, self.call.value_dim - width)) + value
        own = both.repeat_interleave(repeats, 1)
        own[..., :width] += query[..., :width]
        return (own / 3).transpose(1, 2).contiguous()


class GivenStates(nn.Module):
    """Stands in for the model below the head, and returns final hidden states that are known already."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._base = (base,)  # in a tuple: not a submodule
        self.states: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the states, as the model below the head would."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        output = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.states)
        output.router_logits = output.shared_kv_states = output.cache_params = None  # which some models pass on
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._base[0], name)


class TransformersModel(DecoderModel):
    """transformers' modules as the executor uses a model. The states that it returns are after the final norm."""

    can_be_captured = False

    def __init__(self, ops: Ops, config: TransformersConfig) -> None:
        super().__init__()
        causal = _on_meta(config.values)
        self.base = getattr(causal, config.prefix)
        self.given = GivenStates(self.base)
        setattr(causal, config.prefix, self.given)
        self.causal = causal
        self.name, self.vocab_size = type(causal).__name__, config.vocab_size
        recording = _record(self.name, self.base)
        places = [module for module, _ in recording.calls]
        self.states: RecurrentStates | None = None
        if recording.stateful is not None:
            from inferengine.models.recurrent import RecurrentStates

            self.states = RecurrentStates(self.base.config, recording.stateful)
        self.config = config
        head = causal.get_output_embeddings()
        for place, module in _expert_modules(self.name, self.base).items():
            assert config.moe is not None
            of_layer = _experts_config(module, config.moe.num_chosen)
            parent, _, attribute = place.rpartition(".")
            experts = _own_experts(ops, module, of_layer)
            setattr(self.base.get_submodule(parent), attribute, experts)
        for module in filter(_are_without_gate, self.base.modules()):
            module.parts = [1] * len(module.up_proj)  # a checkpoint has a tensor for each expert
        for parent in list(causal.modules()) + list(self.base.modules()):
            for name, module in list(parent.named_children()):
                is_router = config.moe is not None and getattr(module, "out_features", 0) == config.moe.num_experts
                is_left = is_router or module in recording.read  # routers are not rounded
                if type(module) is nn.Linear and module is not head and not is_left:
                    setattr(parent, name, _own_linear(ops, module))
        self.layers = nn.ModuleList()  # kinds of layers are not known: kernels are compiled with all of them
        self.norm = nn.Identity()
        self._attentions = [PagedAttention(ops, config, call) for call in config.calls]
        self.attentions = nn.ModuleList(self._attentions)  # where KVCache finds them
        for module, attention in zip(places, self._attentions, strict=bool(places)):
            module.__dict__[PLACE] = attention  # not as a submodule: `attentions` holds it

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the final hidden states [T, E] of ids [T]."""
        self._set_batch(batch)
        if self.states is None:
            return self._hidden(batch.input_ids, batch.positions)
        columns, device = batch.columns, batch.input_ids.device
        assert columns is not None  # there are none in a CUDA graph alone
        # On a CPU a step that is not finite is computed once more, from the same states (executor/cpu_step.py).
        is_first = device.type == "cpu" and not batch.isolated
        rows = columns.row_slot, columns.row_start, columns.query_start
        self.states.begin(*rows, device, keep_old=is_first, snapshots=batch.snapshots)
        hidden = self._hidden(batch.input_ids, batch.positions)
        self.states.end(undo=is_first and not math.isfinite(hidden.sum(dtype=torch.float32).item()))
        return hidden

    def bind_states(self, tensors: list[torch.Tensor], num_slots: int = 0) -> None:
        """Set the states of all slots, then of all snapshots, each [S + P, *shape]."""
        if self.states is not None:
            self.states.bind(tensors, num_slots)

    def restore_states(self, slots: list[int], snapshots: list[int]) -> None:
        """Copy the states of snapshots into slots."""
        if self.states is not None:
            self.states.restore(slots, snapshots)

    def bind_adapters(self, part: PartOfStep) -> None:
        """Set what tells the adapters which tokens of the step the next products are of."""
        if self.states is not None:
            self.states.part = part

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of final hidden states [N, E], by the model's own head and whatever follows it."""
        self.given.states = x.unsqueeze(0)
        ids = torch.zeros(1, len(x), dtype=torch.long, device=x.device)
        logits: torch.Tensor = self.causal(input_ids=ids, use_cache=False).logits[0]
        self.given.states = None
        return logits

    def finish(self) -> None:
        """Put the tensors that no checkpoint holds on the model's device."""
        device = next(self.parameters()).device
        for module in self.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    @torch.inference_mode()
    def verify(self) -> None:
        """Check on the loaded weights that tokens meet in the paged attention and in states alone. Raises
        ConfigError."""
        self._set_batch(None)
        weight = self.base.get_input_embeddings().weight
        ids = torch.tensor(TOKENS, device=weight.device) % self.vocab_size
        positions = torch.tensor(POSITIONS, device=weight.device)
        try:
            if self.states is None:
                together = self._hidden(ids, positions)
                apart = torch.cat([self._hidden(ids[i : i + 1], positions[i : i + 1]) for i in range(len(ids))])
            else:
                together, apart = self._in_steps(ids, positions, weight)
                if _differ(together, apart, weight.dtype):  # some modules begin anew where tokens follow a state
                    self.states.one_by_one = True
                    together, apart = self._in_steps(ids, positions, weight)
        except Exception as error:
            raise _no_attention(self.name, f"its modules cannot run with it ({_first_line(error)})") from error
        if _differ(together, apart, weight.dtype):
            raise _no_attention(self.name, "its tokens reach each other, or have positions, outside its attention")
        self.is_slow_after_states = self.states is not None and self.states.one_by_one
        if self.is_slow_after_states:
            logger.warning("%s: modules with states continue a prompt token by token: long ones are slow", self.name)

    def _in_steps(
        self, ids: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the final hidden states of the tokens as one sequence in one step, and in steps of one, two and one
        tokens beside another sequence."""
        assert self.states is not None
        states, count, other = self.states, len(ids), ids.flip(0)
        states.bind(
            [
                torch.zeros(2, *each.shape, dtype=torch.float32 if each.is_float32 else weight.dtype, device=ids.device)
                for each in self.config.states
            ],
            2,
        )

        def step(slots: list[int], starts: list[int], lengths: list[int]) -> torch.Tensor:
            bounds = np.cumsum([0, *lengths])
            states.begin(np.array(slots), np.array(starts), bounds, ids.device, keep_old=False)
            parts = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
            rows = [(other if slot else ids)[part] for slot, part in zip(slots, parts, strict=True)]
            return self._hidden(torch.cat(rows), torch.cat([positions[part] for part in parts]))

        step([0], [0], [2])
        with states.probing():
            step([0], [2], [count - 2])
        together = step([0], [0], [count])
        found = [step([0, 1], [0, 0], [1, count - 2])[:1], step([1, 0], [count - 2, 1], [1, count - 2])[1:]]
        found.append(step([1, 0], [count - 1, count - 1], [1, 1])[1:])
        states.bind([], 0)
        return together, torch.cat(found)

    def _set_batch(self, batch: Batch | None) -> None:
        for attention in self._attentions:
            attention.batch = batch

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [T, E] of ids [T]."""
        cache = None if self.states is None else self.states.cache
        hidden: torch.Tensor = self.base(**_inputs(self.base, ids, positions, cache))[0][0]
        return hidden


def _differ(found: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether results of a model of this number format differ by more than rounding."""
    return float((found - other).float().norm() / found.float().norm()) > TOLERANCE[dtype]


def _takes_positions(base: nn.Module) -> bool:
    return "position_ids" in inspect.signature(base.forward).parameters


def _inputs(base: nn.Module, ids: torch.Tensor, positions: torch.Tensor, cache: Any = None) -> dict[str, Any]:
    """Return the arguments of transformers' models for one flattened batch. With a mask of ones, or with a cache, no
    sequences are looked for in the positions. Models may ask whether it has ones alone, which nobody can tell on
    `meta`."""
    place = "cpu" if ids.is_meta else ids.device
    taken = inspect.signature(base.forward).parameters
    inputs = {
        "input_ids": ids.long().unsqueeze(0),
        "position_ids": positions.long().unsqueeze(0),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long, device=place) if cache is None else None,
        "use_cache": False,
        "past_key_values": cache,
        "cache_params": cache,
    }
    return {name: value for name, value in inputs.items() if value is not None and name in taken}


def _own_linear(ops: Ops, linear: nn.Linear) -> TransformersLinear:
    with torch.device("meta"):
        return TransformersLinear(ops, linear.in_features, linear.out_features, bias=linear.bias is not None)


def _own_experts(ops: Ops, experts: Any, config: MoeConfig) -> RoutedExperts:
    with torch.device("meta"):
        return RoutedExperts(ops, experts.down_proj.shape[1], config, _activation(experts) or "")


def build(ops: Ops, config: DecoderConfig) -> TransformersModel:
    """Build the model on `meta`, without weights."""
    assert isinstance(config, TransformersConfig)
    return TransformersModel(ops, config)


def weight_map(config: DecoderConfig) -> WeightMap:
    """Say where each tensor of a checkpoint goes: names are those of transformers' own modules."""
    assert isinstance(config, TransformersConfig)
    causal = _on_meta(config.values)
    conversions = _conversions(config.model_type)
    assert conversions is not None  # checked by `read_config`
    targets: dict[str, Target] = {}
    for name, parameter in causal.named_parameters(remove_duplicate=False):
        inside = name.startswith(f"{config.prefix}.")
        place = f"base.{name.removeprefix(config.prefix + '.')}" if inside else f"causal.{name}"
        template, place = (LAYER.sub(".{}.", each, count=1) for each in (name, place))
        if _are_without_gate(causal.get_submodule(name.rpartition(".")[0])) and conversions.of_experts(template):
            (each,) = conversions.of_experts(template)
            targets |= {
                stored.replace("*", str(expert)): Target(place, expert)
                for expert in range(len(parameter))
                for stored in conversions.names(each)
            }
        elif place.endswith((".gate_up_proj", ".down_proj")) and parameter.dim() == 3:
            targets |= _expert_targets(template, f"{place.removesuffix('_proj')}.weight", parameter, conversions)
        else:
            targets |= dict.fromkeys(conversions.names(template), Target(place))
    names = {id(parameter): name for name, parameter in causal.named_parameters()}  # the first of those that are tied
    ignored = [*(causal._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return WeightMap(
        targets,
        root=f"{config.prefix}.",
        ignored=tuple(f".*({pattern}).*" for pattern in ignored),
        head=conversions.stored(f"{_name_of(causal, causal.get_output_embeddings())}.weight"),
        embedding=conversions.stored(names[id(causal.get_input_embeddings().weight)]),
    )


def _expert_targets(name: str, place: str, parameter: torch.Tensor, conversions: Conversions) -> dict[str, Target]:
    """Return the targets of one tensor of all experts: stored as a tensor for each projection of each, or as one."""
    parts = conversions.of_experts(name)
    targets = {
        stored.replace("*", str(expert)): Target(place, expert * len(parts) + part)
        for expert in range(len(parameter))
        for part, each in enumerate(parts)
        for stored in conversions.names(each)
    }
    return targets | dict.fromkeys(conversions.names(name), Target(place, stacked=True))


def _name_of(causal: nn.Module, module: nn.Module) -> str:
    names: list[str] = [name for name, each in causal.named_modules() if each is module]
    return names[0]


# -- the attention interface -------------------------------------------------------------------------------------------


@functools.cache
def _register() -> None:
    """Enter this engine's attention and masks in transformers' tables, once."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention by what stands at its place: a PagedAttention, or a recorder."""
    mask = options.pop("attention_mask", mask)
    found: tuple[torch.Tensor, None] = module.__dict__[PLACE](query, key, value, mask, options)
    return found


def _mask(*, mask_function: Any = None, local_size: int | None = None, **options: Any) -> Mask:
    """Return what stands for a mask: causal, or causal within a window. Raises _CannotServe for another mask."""
    if _RECORDING:
        _compare_mask(mask_function, local_size)
    return Mask(local_size)


_RECORDING: list[str] = []  # names of models whose calls are being recorded


def _compare_mask(mask_function: Any, window: int | None) -> None:
    """Compare a mask with the one that it is taken for, at chosen distances."""
    for position in FAR if window is None else (*FAR, window - 1, window, window + 1, 3 * window):
        near = {0, position - 1, position, position + 1, position // 2}
        if window is not None:
            near |= {position - window - 1, position - window, position - window + 1}
        for key in sorted(key for key in near if key >= 0):
            with torch.device("cpu"):
                zero, at, to = torch.tensor(0), torch.tensor(position), torch.tensor(key)
                found = bool(mask_function(zero, zero, at, to))
            if found != (key <= position and (window is None or key > position - window)):
                raise _CannotServe("its mask is neither causal nor a sliding window")


class _CannotServe(Exception):
    """Something about a model that the paged attention cannot compute."""


class _Recorder:
    """Stands at every place while a model runs on `meta`, and notes what each layer asks."""

    def __init__(self, name: str, module: nn.Module, calls: list[tuple[nn.Module, AttentionCall]]) -> None:
        self.name, self.module, self.calls = name, module, calls

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict[str, Any]
    ) -> tuple[torch.Tensor, None]:
        if not isinstance(mask, Mask):
            raise _CannotServe("it makes attention masks of its own")
        options = {name: option for name, option in options.items() if option is not None}
        scale = options.pop("scaling", query.shape[-1] ** -0.5)
        softcap, window = options.pop("softcap", None), options.pop("sliding_window", mask.window)
        if not isinstance(scale, (int, float)):
            raise _CannotServe("its scale of scores differs between heads")
        if options.pop("is_causal", True) is not True:
            raise _CannotServe("its attention is not causal")
        if window != mask.window:
            raise _CannotServe(f"its attention has a window of {window}, its mask one of {mask.window}")
        sinks = options.pop("s_aux", None)
        if sinks is not None and sinks.shape != (query.shape[1],):
            raise _CannotServe("its attention has sinks of another shape than one for each head")
        unknown = sorted(name for name in options if name not in WITHOUT_EFFECT)
        if unknown:
            raise _CannotServe(f"its attention takes {unknown[0]}")
        heads, kv_heads, length = query.shape[1], key.shape[1], query.shape[2]
        if key.shape[2] != length or heads % kv_heads or key.shape[1] != value.shape[1]:
            raise _CannotServe("its keys are not one for each token and KV head")
        call = AttentionCall(
            heads,
            kv_heads,
            query.shape[3],
            value.shape[3],
            float(scale),
            window,
            None if not softcap else float(softcap),
            sinks is not None,
        )
        self.calls.append((self.module, call))
        return query.new_empty(1, length, heads, value.shape[3]), None


class Recording(NamedTuple):
    """What a run on `meta` has shown: attention layers in order, with their modules; how many experts a token takes (0:
    there are none); modules with states (None: there are none); linear layers of these whose weights they read."""

    calls: list[tuple[nn.Module, AttentionCall]]
    num_chosen: int
    stateful: StatefulModules | None
    read: frozenset[nn.Module] = frozenset()


def _record(name: str, base: nn.Module) -> Recording:
    """Run the model on `meta`. Raises ConfigError where it asks for what cannot be computed."""
    counts: list[int] = []
    calls: list[tuple[nn.Module, AttentionCall]] = []

    def choose(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts.append(experts.shape[-1])
        return torch.empty_like(x)

    config: Any = base.config
    stateful: StatefulModules | None = None
    try:
        with _recording(name, base, calls, choose), torch.inference_mode():
            tokens = torch.zeros(2, dtype=torch.long, device="meta")
            if _has_states(config):
                from inferengine.models.recurrent import RecordingCache

                cache = RecordingCache(config)
                with cache.watching(base):
                    base(**_inputs(base, tokens, tokens, cache))
                stateful = cache.found()
            else:
                base(**_inputs(base, tokens, tokens))
    except ConfigError:
        raise
    except _CannotServe as error:
        raise _no_attention(name, _first_line(error)) from None
    except Exception as error:  # whatever its modules raise
        reason = f"its modules cannot run with it: {_first_line(error)}"
        raise _no_attention(name, OWN_ATTENTION if Mask.__name__ in str(error) else reason) from None
    _check_places(name, int(getattr(config, "num_hidden_layers", len(calls))), calls, stateful)
    read = frozenset() if stateful is None else frozenset(stateful.read)
    return Recording(calls, max(counts, default=0), stateful, read)


def _check_places(
    name: str, num_layers: int, calls: list[tuple[nn.Module, AttentionCall]], stateful: StatefulModules | None
) -> None:
    """Refuse a model that has attention outside transformers' interface, or inside a module with states."""
    places = {id(module) for module, _ in calls}
    if len(calls) != len(places) or (stateful is None and len(places) != num_layers):
        raise _no_attention(
            name,
            f"{len(places)} of its {num_layers} layers use transformers' attention interface, in {len(calls)} calls",
        )
    for holder, _ in () if stateful is None else stateful.layers:
        if any(id(module) in places for module in holder.modules()):
            raise _no_attention(name, "its attention itself has states")


@contextmanager
def _recording(
    name: str, base: nn.Module, calls: list[tuple[nn.Module, AttentionCall]], choose: Callable[..., torch.Tensor]
) -> Iterator[None]:
    """Record, inside the context, the calls of every module of `base`; computed tensors are on `meta`, and experts call
    `choose`."""
    experts = [*_expert_modules(name, base).values(), *filter(_are_without_gate, base.modules())]
    for module in experts:
        module.__dict__["forward"] = choose
    kept = [(module, name, buffer) for module in base.modules() for name, buffer in module._buffers.items()]
    for module, key, buffer in kept:
        module._buffers[key] = None if buffer is None else buffer.to("meta")
    for module in base.modules():
        module.__dict__[PLACE] = _Recorder(name, module, calls)
    _RECORDING.append(name)
    try:
        yield
    finally:
        _RECORDING.pop()
        for module in experts:
            del module.__dict__["forward"]
        for module in base.modules():
            del module.__dict__[PLACE]
        for module, key, buffer in kept:
            module._buffers[key] = buffer


def _no_attention(name: str, reason: str) -> ConfigError:
    return refused(
        f"config.json: {name} has no layers here, and cannot be served with transformers' modules and paged attention: "
        f"{reason}; {nearest(name)}"
    )


def _first_line(error: BaseException) -> str:
    lines: list[str] = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
