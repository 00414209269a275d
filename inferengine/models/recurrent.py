"""The recurrent states of transformers' modules, by slot: those of convolutions, state-space models, linear attention.

transformers keeps the states of a layer in its cache, and a module reads and writes them there for one batch of
sequences. A step of this engine is one row [1, T] with pieces of many sequences. So each module with states is called
for the pieces: those of equal length are one batch [B, L], and a step of decodes is one call. Around each call the
cache holds the states of the piece's slots. A row is divided where a snapshot of its state is taken, so that a prompt
takes no further step for one. Which modules have states, and of what shape, is noted while the model runs
on `meta` with transformers' own cache: nothing about a model is listed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from inferengine.layers.decoder_config import StateTensor
from inferengine.models.decoder import PartOfStep

SHORTEST_CHUNK, LONGEST_CHUNK = 16, 64  # of a recurrence on a CPU: measured, of 8 to 256
CHANGE = 8.0  # of every number of a state, which its reader must notice
NOTHING = "nothing"


class StatePlace(NamedTuple):
    """Where transformers' cache holds a state: the layer, the attribute of its cache, and the key there."""

    layer: int
    attribute: str  # conv_states | recurrent_states
    key: int


class StatefulModules(NamedTuple):
    """What a run on `meta` has shown: modules with the layers whose states they use; all states; linear layers inside
    these modules that were not called, because the modules read their weights (Jamba)."""

    layers: list[tuple[nn.Module, tuple[int, ...]]]
    states: dict[StatePlace, torch.Tensor]  # on `meta`, of one sequence
    read: list[nn.Module]

    def tensors(self) -> tuple[StateTensor, ...]:
        """Describe the states, of a model that ran in bfloat16: what was fp32 then always is."""
        return tuple(StateTensor(tuple(each.shape[1:]), each.dtype == torch.float32) for each in self.states.values())


def has_states(config: Any) -> bool:
    """Return whether transformers' cache for this configuration has states beside keys and values."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


class StepCache(DynamicCache):
    """transformers' cache as the model is given it. Keys and values are in the paged cache: here no token has any."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Return the keys and values as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return those of a sequence without a past."""
        return query_length, 0


# -- recording ---------------------------------------------------------------------------------------------------------


class RecordingCache(StepCache):
    """The cache for a run on `meta`, which notes the modules that use its states."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self._running: list[nn.Module] = []  # the modules that were given this cache, the innermost last
        self._layers: dict[nn.Module, set[int]] = {}
        self._called: set[nn.Module] = set()

    @contextmanager
    def watching(self, base: nn.Module) -> Iterator[None]:
        """Track which module of `base` runs, inside the context."""
        hooks: list[Any] = []
        for module in base.modules():
            hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def found(self) -> StatefulModules:
        """Return what was noted."""
        states: dict[StatePlace, torch.Tensor] = {}
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for attribute in ("conv_states", "recurrent_states"):
                    for key, state in getattr(layer, attribute).items():
                        if state is not None:
                            states[StatePlace(number, attribute, key)] = state
        inside = [each for module in self._layers for each in module.modules() if type(each) is nn.Linear]
        return StatefulModules(
            [(module, tuple(sorted(each))) for module, each in self._layers.items()],
            states,
            [each for each in inside if each not in self._called],
        )

    def get_conv_state(self, layer_idx: int, *args: Any, **options: Any) -> torch.Tensor | None:
        """Do as transformers' cache does."""
        self._note(layer_idx)
        return super().get_conv_state(layer_idx, *args, **options)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **options: Any) -> torch.Tensor | None:
        """Do as transformers' cache does."""
        self._note(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **options)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **options: Any) -> torch.Tensor:
        """Do as transformers' cache does."""
        self._note(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **options)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **options: Any
    ) -> torch.Tensor:
        """Do as transformers' cache does."""
        self._note(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **options)

    def _note(self, layer: int) -> None:
        self._layers.setdefault(self._running[-1], set()).add(layer)

    def _is_given(self, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        return any(each is self for each in (*args, *options.values()))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._called.add(module)
        if self._is_given(args, options):
            self._running.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if self._is_given(args, options):
            self._running.pop()


# -- steps -------------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Rows of a step that a module computes in one call: as many tokens of each, with states or without."""

    slots: torch.Tensor  # [B] int64
    length: int  # tokens of each row
    is_fresh: bool  # the rows begin their sequences: they have no state yet
    begin: int | None  # of their tokens in the step, where they are next to each other
    tokens: torch.Tensor  # [B * L] int64: their places in the step
    kept: torch.Tensor  # [N] int64: the rows of which a snapshot is taken afterwards
    places: torch.Tensor  # [N] int64: where these are, in the tensors of all states

    def of(self, value: Any, num_tokens: int) -> Any:
        """Return the part of an argument: tensors [1, T, ...] become [B, L, ...], others stay."""
        if isinstance(value, (tuple, list)):
            return type(value)(self.of(each, num_tokens) for each in value)
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, num_tokens):
            return value
        if self.begin is None:
            taken = value[0].index_select(0, self.tokens)
        else:
            taken = value[0, self.begin : self.begin + len(self.tokens)]
        return taken.unflatten(0, (len(self.slots), self.length))


class Pieces(NamedTuple):
    """The pieces of a step. `order`: the place of each of its tokens in their outputs, one after the other; None: the
    same."""

    pieces: list[Piece]
    num_tokens: int
    order: torch.Tensor | None

    def joined(self, outputs: list[Any]) -> Any:
        """Return one output [1, T, ...] of those of the pieces, each [B, L, ...]."""
        first = outputs[0]
        if isinstance(first, (tuple, list)):
            return type(first)(self.joined(list(parts)) for parts in zip(*outputs, strict=True))
        if not isinstance(first, torch.Tensor):
            return first
        rows = torch.cat([each.flatten(0, 1) for each in outputs]) if len(outputs) > 1 else first.flatten(0, 1)
        return (rows if self.order is None else rows.index_select(0, self.order)).unsqueeze(0)


class _Rows(NamedTuple):
    """Rows of one piece: their slots, their first tokens in the step, and those whose state is kept with its place."""

    slots: list[int]
    begins: list[int]
    kept: list[int]
    places: list[int]


def _parts(count: int, ends: dict[int, int], *, is_fresh: bool, one_by_one: bool) -> list[tuple[int, int]]:
    """Divide a row of `count` tokens at `ends`; with `one_by_one`, what follows a state into tokens."""
    if count == 1 or not (ends or one_by_one):
        return [(0, count)]
    parts: list[tuple[int, int]] = []
    for first, last in pairwise(sorted({0, *ends, count})):
        is_divided = one_by_one and not (is_fresh and first == 0)
        parts += [(each, each + 1) for each in range(first, last)] if is_divided else [(first, last)]
    return parts


def pieces_of(
    slots: np.ndarray,
    starts: np.ndarray,
    query_start: np.ndarray,
    device: torch.device,
    *,
    one_by_one: bool,
    kept: SequenceOf[tuple[int, int, int]] = (),
) -> Pieces:
    """Divide a step by length and by whether there is a state. Arguments: its columns [R], [R], [R + 1].

    A row is divided where its state is kept: `kept` are (row, tokens of its sequence, place in the tensors). With
    `one_by_one` what follows a state is divided into tokens. The first parts of all rows come first.
    """
    num_tokens = int(query_start[-1])
    places_of: dict[int, dict[int, int]] = {}  # by row: where its state is kept after so many of its tokens
    for row, length, place in kept:
        places_of.setdefault(row, {})[length - int(starts[row])] = place
    kinds: dict[tuple[int, int, bool], _Rows] = {}  # by the number of the part, its length and whether it begins
    columns = zip(slots.tolist(), starts.tolist(), query_start.tolist(), np.diff(query_start).tolist(), strict=False)
    for row, (slot, start, begin, count) in enumerate(columns):
        ends = places_of.get(row, {})
        for part, (first, last) in enumerate(_parts(count, ends, is_fresh=start == 0, one_by_one=one_by_one)):
            rows = kinds.setdefault((part, last - first, start + first == 0), _Rows([], [], [], []))
            if last in ends:
                rows.kept.append(len(rows.slots))
                rows.places.append(ends[last])
            rows.slots.append(slot)
            rows.begins.append(begin + first)
    pieces: list[Piece] = []
    step_places: list[np.ndarray] = []
    for (_, length, is_fresh), rows in sorted(kinds.items(), key=lambda item: item[0][0]):
        begins = rows.begins
        tokens = (np.array(begins)[:, None] + np.arange(length)).reshape(-1)
        begin = begins[0] if tokens[-1] - begins[0] == len(tokens) - 1 else None
        both = np.concatenate((np.array([*rows.slots, *rows.kept, *rows.places], dtype=np.int64), tokens))
        sizes = [len(rows.slots), len(rows.kept), len(rows.kept), len(tokens)]
        own, kept_rows, places, all_tokens = torch.from_numpy(both).to(device).split(sizes)
        pieces.append(Piece(own, length, is_fresh, begin, all_tokens, kept_rows, places))
        step_places.append(tokens)
    computed = np.concatenate(step_places)
    in_order = bool((computed == np.arange(num_tokens)).all())
    return Pieces(pieces, num_tokens, None if in_order else torch.from_numpy(np.argsort(computed)).to(device))


def chunk_size_for(length: int) -> int:
    """Return in what chunks transformers' modules should compute a recurrence over so many tokens on a CPU: they pad to
    whole chunks, and work and memory of one grow with its square (Mamba 2 has 256)."""
    return min(LONGEST_CHUNK, max(SHORTEST_CHUNK, 1 << (length - 1).bit_length()))


class _TimeSteps(TorchFunctionMode):
    """Keeps the time steps of Mamba 2 within their limits, inside the context. transformers limits those of several
    tokens, and forgets to where it computes one."""

    def __init__(self, limits: tuple[float, float]) -> None:
        super().__init__()
        self.limits = limits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output.clamp(*self.limits) if func is functional.softplus else output


def _limits_of(module: nn.Module) -> tuple[float, float] | None:
    """Return the limits of a module's time steps; None: it has none that matter."""
    found = getattr(module, "time_step_limit", None)
    limits = None if found is None else (float(found[0]), float(found[1]))
    return None if limits is None or (limits[0] <= 0 and limits[1] == math.inf) else limits


class RecurrentStates:
    """The states of all slots and snapshots, and the calls of the modules that use them. `cache` is what the model is
    given."""

    def __init__(self, config: Any, modules: StatefulModules) -> None:
        self.cache = StepCache(config=config)
        self._places: dict[int, list[tuple[StatePlace, int]]] = {}  # by layer, with the numbers of their tensors
        for number, place in enumerate(modules.states):
            self._places.setdefault(place.layer, []).append((place, number))
        self._tensors: list[torch.Tensor] = []
        self._num_slots = 0
        self._pieces: Pieces | None = None
        self._old: list[tuple[int, torch.Tensor, torch.Tensor]] | None = None  # what the step has overwritten
        self.part: PartOfStep = lambda tokens: nullcontext()
        self.one_by_one = False  # the modules continue a state by one token at a time (Mamba 1)
        self._probes = False
        for module, layers in modules.layers:
            module.__dict__["forward"] = self._in_pieces(module, module.forward, layers)

    def bind(self, tensors: list[torch.Tensor], num_slots: int) -> None:
        """Set the states [S + P, ...] of all slots, then of all snapshots, in the order of their descriptions."""
        self._tensors, self._num_slots = tensors, num_slots

    def restore(self, slots: list[int], snapshots: list[int]) -> None:
        """Copy the states of snapshots into slots."""
        both = torch.tensor([slots, [self._num_slots + each for each in snapshots]], device=self._tensors[0].device)
        for tensor in self._tensors:
            tensor.index_copy_(0, both[0], tensor.index_select(0, both[1]))

    def begin(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        query_start: np.ndarray,
        device: torch.device,
        *,
        keep_old: bool,
        snapshots: SequenceOf[tuple[int, int, int]] = (),
    ) -> None:
        """Set the rows of the next step by its columns [R], [R], [R + 1], and the snapshots that are taken of them.
        `keep_old`: `end` may take it back, but for the snapshots."""
        kept = [(row, length, self._num_slots + snapshot) for row, length, snapshot in snapshots]
        self._pieces = pieces_of(slots, starts, query_start, device, one_by_one=self.one_by_one, kept=kept)
        self._old = [] if keep_old else None

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Find out, inside the context, whether all modules read all of their states in a step of several tokens that
        follow others: another state must give another output, bit by bit. Where one does not, `one_by_one` is set."""
        self._probes = True
        try:
            yield
        finally:
            self._probes = False

    def end(self, *, undo: bool) -> None:
        """Forget what the step has overwritten; with `undo`, take the step back first."""
        for number, slots, state in reversed(self._old or ()) if undo else ():
            self._tensors[number].index_copy_(0, slots, state)
        self._old = None

    def _in_pieces(self, module: nn.Module, forward: Callable[..., Any], layers: tuple[int, ...]) -> Callable[..., Any]:
        """Wrap a module's `forward` for the row of a step: it is called for each piece."""
        longest, limits = getattr(module, "chunk_size", None), _limits_of(module)

        def call(*args: Any, **options: Any) -> Any:
            step = self._pieces
            assert step is not None
            outputs: list[Any] = []
            for piece in step.pieces:
                if isinstance(longest, int) and piece.tokens.device.type == "cpu":
                    module.__dict__["chunk_size"] = min(longest, chunk_size_for(piece.length))
                own = [piece.of(each, step.num_tokens) for each in args]
                named = {name: piece.of(each, step.num_tokens) for name, each in options.items()}
                if self._probes:
                    self._probe(lambda: forward(*own, **named), piece, layers)  # noqa: B023  called at once
                is_part = len(piece.tokens) < step.num_tokens or step.order is not None
                limited = nullcontext() if limits is None or piece.length > 1 else _TimeSteps(limits)
                with self._states_of(piece, layers), self.part(piece.tokens) if is_part else nullcontext(), limited:
                    outputs.append(forward(*own, **named))
            return step.joined(outputs)

        return call

    def _probe(self, compute: Callable[[], torch.Tensor], piece: Piece, layers: tuple[int, ...]) -> None:
        """Set `one_by_one` where another state of a kind gives the same output."""
        outputs: dict[str, torch.Tensor] = {}
        kinds = {place.attribute for layer in layers for place, _ in self._places.get(layer, ())}
        for changed in (NOTHING, *kinds):
            with self._states_of(piece, layers, changed=changed):
                outputs[changed] = compute()
        self.one_by_one |= any(torch.equal(outputs[kind], outputs[NOTHING]) for kind in kinds)

    @contextmanager
    def _states_of(self, piece: Piece, layers: tuple[int, ...], *, changed: str = "") -> Iterator[None]:
        """Put into the cache, inside the context, the states of the piece's slots; afterwards what has become of them
        is kept. With `changed` those of a kind, or NOTHING, are others, and nothing is kept."""
        usual = {layer: self.cache.layers[layer] for layer in layers}
        for layer in layers:
            self.cache.layers[layer] = self._layer_of(piece, layer, changed)
        try:
            yield
            for layer in layers if not changed else ():
                for place, number in self._places.get(layer, ()):
                    self._write(number, piece, getattr(self.cache.layers[layer], place.attribute)[place.key])
        finally:
            for layer, each in usual.items():
                self.cache.layers[layer] = each

    def _layer_of(self, piece: Piece, layer: int, changed: str) -> LinearAttentionLayer:
        """Return transformers' cache of one layer, with the states of these slots; without any for the first tokens."""
        usual: Any = self.cache.layers[layer]
        made = LinearAttentionLayer(number_of_states=usual.number_of_states)
        for place, number in () if piece.is_fresh else self._places.get(layer, ()):
            state = self._tensors[number].index_select(0, piece.slots)
            if place.attribute == changed:
                state += CHANGE
            getattr(made, place.attribute)[place.key] = state
            getattr(made, f"is_{place.attribute}_initialized")[place.key] = True
            if place.attribute == "conv_states":
                made.conv_kernel_size[place.key] = state.shape[-1]
                made.has_previous_state[place.key] = True
        return made

    def _write(self, number: int, piece: Piece, state: torch.Tensor) -> None:
        tensor = self._tensors[number]
        if self._old is not None and not piece.is_fresh:
            self._old.append((number, piece.slots, tensor.index_select(0, piece.slots)))
        state = state.to(tensor.dtype)
        tensor.index_copy_(0, piece.slots, state)
        if len(piece.kept):
            tensor.index_copy_(0, piece.places, state.index_select(0, piece.kept))
