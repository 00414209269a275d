"""AdapterBank: applies all loaded adapters to the model's linear layers, each token with its own.

The factors of all adapters of a layer are stacked: one product with all A gives [T, C], a mask keeps each token's own
columns (times its adapter's scaling), and one product with all B gives the sum to add. So a batch may mix adapters and
plain rows at two products for each layer, whatever their number; for other adapters a row adds exact zeros.

An adapter may also bring an embedding and an output head of its own: rows of tokens and of logits that are its are
computed anew with them.

It replaces the layers' ops tables; models know nothing of it. In a step without adapters nothing is added.

AdapterFolder: the adapters that a model may use, by name. A name is that of a sub-folder, never a path: clients can
only load what the operator put there.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from inferengine.errors import ConfigError, InferEngineError
from inferengine.kernels.ops import Ops
from inferengine.layers.embedding import Head, TokenEmbedding
from inferengine.layers.linear import Linear
from inferengine.layers.parallel import Communicator
from inferengine.lora.adapter import CONFIG, EMBEDDING, HEAD, Adapter, Factors, Projection, read_adapter

logger = logging.getLogger(__name__)

COLUMNS_AT_ONCE = 256  # of a weight, read while an adapter is loaded


class AdapterColumns(NamedTuple):
    """The adapter and the scaling of each of C stacked columns. Shared by layers with equal columns."""

    adapters: torch.Tensor  # [C] int32
    scaling: torch.Tensor  # [C] in the model's dtype


class Gains(NamedTuple):
    """What G adapters that set the lengths of a layer's rows (DoRA) multiply its outputs by, less 1: [G, out], fp32."""

    adapters: torch.Tensor  # [G] int32
    less_one: torch.Tensor


class Stack(NamedTuple):
    """All adapters of one layer: down [C, in], up [out, C]."""

    down: torch.Tensor
    up: torch.Tensor
    columns: AdapterColumns
    gains: Gains | None


class AdapterBank:
    """Installed once, after loading and before any step; adapters are added and removed between steps."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        communicator: Communicator | None = None,
    ) -> None:
        """`communicator`: to the ranks that hold the rest of a divided model. All of them make the same calls."""
        self._communicator = communicator
        self.device, self.dtype = device, dtype
        self.adapters: dict[int, Adapter] = {}
        self._next = 1
        self._of_slot = np.zeros(num_slots + 1, dtype=np.int32)
        self._of_row = np.zeros(0, dtype=np.int32)  # the adapters of this step's rows
        self._stacks: dict[str, Stack] = {}
        self._token_adapters: torch.Tensor | None = None  # [T] of this step; None: no row has one
        self._masks: dict[int, torch.Tensor] = {}
        self._of_token = self._of_logits = self._of_row  # those of its tokens and of the logits' rows
        self._whole: dict[str, dict[int, torch.Tensor]] = {EMBEDDING: {}, HEAD: {}}  # by module and adapter
        self._parts: dict[str, list[int]] = {}
        self._linears: dict[str, tuple[Linear, Ops]] = {}  # with the ops that they had before
        self._orders: dict[str, torch.Tensor] = {}  # of the outputs, where the weight's rows have been reordered
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                self._parts[name] = module.parts
                self._linears[name] = module, module.ops
                if module.order is not None and module.is_reordered:
                    self._orders[name] = module.order.cpu()
                module.ops = self._table(module.ops, name)
        embedding, head = getattr(model, EMBEDDING, None), getattr(model, HEAD, None)
        if isinstance(embedding, TokenEmbedding) and isinstance(head, Head):
            embedding.register_forward_hook(self._own_embeddings)
            head.ops = self._head_table(head.ops)

    # -- between steps -----------------------------------------------------------------------------------------------

    def add(self, adapter: Adapter) -> int:
        """Add an adapter. Returns its number, which is never used again. An adapter of the same name may still be in
        use under its own number. Where it fails, as without memory, the others are as before."""
        number, self._next = self._next, self._next + 1
        self.adapters[number] = adapter
        try:
            for module, weight in adapter.whole.items():
                self._whole[module][number] = weight.to(self.device)
            self._restack({place.linear for place in adapter.factors})
        except BaseException:
            self._forget(number)
            raise
        return number

    def remove(self, number: int) -> None:
        """Remove an adapter that no sequence uses."""
        adapter = self._forget(number)
        try:
            self._restack({place.linear for place in adapter.factors})
        except (MemoryError, RuntimeError) as error:
            # Stacking takes memory. The old stacks serve on: no row has this number, so its columns add zeros.
            logger.warning("the memory of the adapter %s is not freed now: %s", adapter.name, error)

    def _forget(self, number: int) -> Adapter:
        for weights in self._whole.values():
            weights.pop(number, None)
        return self.adapters.pop(number)

    def admit(self, slot: int, adapter: int) -> None:
        """Set the adapter of a slot's new sequence (0: none). Raises InferEngineError when it was removed."""
        if adapter and adapter not in self.adapters:
            raise InferEngineError("model_not_found", "the adapter was unloaded", field="adapter")
        self._of_slot[slot] = adapter

    def begin(self, row_slot: np.ndarray, token_row: np.ndarray) -> bool:
        """Set the rows of the next step: slots of its rows [R], rows of its tokens [T]. Returns whether any has an
        adapter."""
        self._masks.clear()
        of_row = self._of_slot[row_slot]
        if not of_row.any():
            self._token_adapters = None
            return False
        self._of_row, self._of_token = of_row, of_row[token_row]
        self._token_adapters = torch.from_numpy(self._of_token).to(self.device)
        return True

    @contextmanager
    def part(self, tokens: torch.Tensor) -> Iterator[None]:
        """Restrict products to these tokens of the step, by their places in it, inside the context."""
        whole, masks = self._token_adapters, self._masks
        if whole is None:
            yield
            return
        self._token_adapters, self._masks = whole.index_select(0, tokens), {}
        try:
            yield
        finally:
            self._token_adapters, self._masks = whole, masks

    def expect_logits(self, rows: np.ndarray) -> None:
        """Set the rows of the step that the next logits [N, V] are of [N]."""
        if self._token_adapters is not None:
            self._of_logits = self._of_row[rows]

    # -- in a step ---------------------------------------------------------------------------------------------------

    def _added(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        """Return the sum [T, out] to add to a layer's output for input [T, in]; None: nothing."""
        if self._token_adapters is None or name not in self._stacks:
            return None
        down, up, columns, _ = self._stacks[name]
        mask = self._masks.get(id(columns))
        if mask is None:
            own = self._token_adapters[:, None] == columns.adapters[None, :]
            mask = self._masks[id(columns)] = own.to(self.dtype).mul_(columns.scaling)
        return torch.mm(torch.mm(x, down.t()).mul_(mask), up.t())

    def _places(self, of_place: np.ndarray, number: int) -> torch.Tensor | None:
        """Return the places of an adapter among these; None: it has none."""
        places = np.flatnonzero(of_place == number)
        return torch.from_numpy(places).to(self.device) if len(places) else None

    def _own_embeddings(self, module: TokenEmbedding, ids: tuple[torch.Tensor], rows: torch.Tensor) -> None:
        """Replace the rows [T, E] of tokens whose adapters have an embedding of their own, in place."""
        if self._token_adapters is None:
            return
        for number, weight in self._whole[EMBEDDING].items():
            if (places := self._places(self._of_token, number)) is not None:
                own = weight.index_select(0, ids[0].index_select(0, places))
                if module.scale is not None:
                    own.mul_(torch.tensor(module.scale, dtype=own.dtype).item())
                rows.index_copy_(0, places, own)

    def _head_table(self, base: Ops) -> Ops:
        """Return `base`, with products that give the rows of adapters with a head of their own that head's logits."""

        def own(x: torch.Tensor, logits: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            for number, weight in self._whole[HEAD].items():
                if self._token_adapters is None:
                    break
                if (places := self._places(self._of_logits, number)) is not None:
                    made = functional.linear(norm(x.index_select(0, places)), weight)
                    logits[:, : len(weight)].index_copy_(0, places, made.to(logits.dtype))  # the model's may be padded
            return logits

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return own(x, base.linear(x, weight, bias), lambda rows: rows)

        def norm_linear(
            x: torch.Tensor,
            gain: torch.Tensor,
            eps: float,
            weight: torch.Tensor,
            bias: torch.Tensor | None = None,
        ) -> torch.Tensor:
            logits = base.norm_linear(x, gain, eps, weight, bias)
            return own(x, logits, lambda rows: base.rms_norm(rows, gain, eps))

        return dataclasses.replace(base, linear=linear, norm_linear=norm_linear)

    def _has_gains(self, name: str) -> bool:
        return self._token_adapters is not None and name in self._stacks and self._stacks[name].gains is not None

    def _scaled(self, name: str, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs of a changed weight, with its rows at the lengths that DoRA sets; the bias is not
        scaled."""
        gains = self._stacks[name].gains
        if gains is None or self._token_adapters is None:
            return y
        own = self._token_adapters[:, None] == gains.adapters[None, :]
        less_one = torch.mm(own.float(), gains.less_one)
        return y.add_(less_one.mul_(y if bias is None else y - bias).to(y.dtype))

    def _table(self, base: Ops, name: str) -> Ops:
        """Return `base`, with products that add the adapters of one layer."""

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            y = base.linear(x, weight, bias)
            added = self._added(name, x)
            return y if added is None else self._scaled(name, y.add_(added), bias)

        def norm_linear(
            x: torch.Tensor,
            gain: torch.Tensor,
            eps: float,
            weight: torch.Tensor,
            bias: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if self._token_adapters is None:
                return base.norm_linear(x, gain, eps, weight, bias)
            return linear(base.rms_norm(x, gain, eps), weight, bias)

        def linear_add(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
        ) -> torch.Tensor:
            if self._has_gains(name):
                return residual.add_(linear(x, weight, bias))
            added = self._added(name, x)
            residual = base.linear_add(x, weight, bias, residual)
            return residual if added is None else residual.add_(added)

        def norm_gated_linear(
            x: torch.Tensor,
            gain: torch.Tensor | None,
            eps: float,
            weight: torch.Tensor,
            bias: torch.Tensor | None = None,
            activation: str = "silu",
        ) -> torch.Tensor:
            if self._token_adapters is None:
                return base.norm_gated_linear(x, gain, eps, weight, bias, activation)
            both = linear(x if gain is None else base.rms_norm(x, gain, eps), weight, bias)
            return base.silu_and_mul(both) if activation == "silu" else base.gelu_tanh_and_mul(both)

        return dataclasses.replace(
            base,
            linear=linear,
            norm_linear=norm_linear,
            linear_add=linear_add,
            linear_add_norm=None,
            norm_gated_linear=norm_gated_linear,
        )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _restack(self, names: set[str]) -> None:
        """Stack the factors of these layers anew, all of them or none. Layers with equal columns share one
        AdapterColumns."""
        known = {self._signature(stack.columns): stack.columns for stack in self._stacks.values()}
        made: dict[str, Stack] = {}
        for name in sorted(names):  # all ranks in the same order
            parts = self._parts[name]
            downs, ups, adapters, scaling = [], [], [], []
            gains: dict[int, torch.Tensor] = {}
            for number, adapter in self.adapters.items():
                for part in (None, *range(len(parts))):
                    factors = adapter.factors.get(Projection(name, part))
                    if factors is None:
                        continue
                    first, rows = (0, sum(parts)) if part is None else (sum(parts[:part]), parts[part])
                    rank = len(factors.down)
                    up = torch.zeros(sum(parts), rank, dtype=self.dtype)
                    up[first : first + rows] = factors.up
                    if factors.magnitude is not None:
                        gain = gains.setdefault(number, torch.zeros(sum(parts)))
                        gain[first : first + rows] = self._gain(name, first, factors) - 1.0
                    if name in self._orders:
                        up = up[self._orders[name]]
                    downs.append(factors.down)
                    ups.append(up)
                    adapters += [number] * rank
                    scaling += [factors.scaling] * rank
            if not downs:
                continue
            columns = AdapterColumns(
                torch.tensor(adapters, dtype=torch.int32, device=self.device),
                torch.tensor(scaling, dtype=self.dtype, device=self.device),
            )
            columns = known.setdefault(self._signature(columns), columns)
            down, up = torch.cat(downs).to(self.device), torch.cat(ups, 1).to(self.device)
            made[name] = Stack(down, up, columns, self._gains(name, gains))
        for name in names:
            self._stacks.pop(name, None)
        self._stacks.update(made)

    def _gains(self, name: str, gains: dict[int, torch.Tensor]) -> Gains | None:
        if not gains:
            return None
        less_one = torch.stack(list(gains.values()))
        if name in self._orders:
            less_one = less_one[:, self._orders[name]]
        return Gains(torch.tensor(list(gains), dtype=torch.int32, device=self.device), less_one.to(self.device))

    @torch.inference_mode()
    def _gain(self, name: str, first: int, factors: Factors) -> torch.Tensor:
        """Return what scales the rows of a changed weight to an adapter's magnitudes [rows], in fp32. The weight is
        read through its own product, whatever layout it is packed in."""
        linear, base = self._linears[name]
        down, up = factors.down.to(self.device).float(), factors.up.to(self.device).float()
        squares = torch.zeros(len(up), device=self.device)
        order = self._orders.get(name)
        for begin in range(0, linear.in_features, COLUMNS_AT_ONCE):
            count = min(COLUMNS_AT_ONCE, linear.in_features - begin)
            ones = torch.zeros(count, linear.in_features, dtype=self.dtype, device=self.device)
            ones[:, begin : begin + count].fill_diagonal_(1.0)
            columns = base.linear(ones, linear.packed, None).float()  # [count, out]: so many columns of the weight
            if order is not None:
                plain = torch.empty_like(columns)
                plain[:, order.to(self.device)] = columns
                columns = plain
            change = torch.mm(down[:, begin : begin + count].t(), up.t()).mul_(factors.scaling)
            squares += columns[:, first : first + len(up)].add(change).square_().sum(0)
        if linear.held is not None and linear.held.inputs is not None and self._communicator is not None:
            squares = self._communicator.all_reduce(squares)  # of the rest of each row
        assert factors.magnitude is not None
        return (factors.magnitude.to(self.device).float() / squares.sqrt_()).cpu()

    @staticmethod
    def _signature(columns: AdapterColumns) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return tuple(columns.adapters.tolist()), tuple(columns.scaling.tolist())


# -- adapters by name --------------------------------------------------------------------------------------------------


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class AdapterFolder:
    """`read` may be called from any thread; `add` and `remove` between steps, in the thread that runs them."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        targets: Mapping[str, Any],
        bank: AdapterBank,
        *,
        max_rank: int,
        unread: Sequence[str] = (),
    ) -> None:
        self.bank, self._unread = bank, unread
        self._folder, self._model, self._targets, self._max_rank = folder, model, targets, max_rank

    def load_all(self) -> None:
        """Load every adapter in the folder. Raises ConfigError for one that cannot be used."""
        for path in sorted(self._folder.iterdir()):
            if (path / CONFIG).is_file():
                try:
                    self.bank.add(self.read(path.name))
                except InferEngineError as error:
                    raise ConfigError("model.adapters", error.message) from None

    def names(self) -> dict[str, int]:
        """Return the number of each loaded adapter."""
        return {adapter.name: number for number, adapter in self.bank.adapters.items()}

    def add(self, adapter: Adapter) -> int:
        """Add an adapter between steps. Returns its number, which requests carry."""
        return self.bank.add(adapter)

    def remove(self, number: int) -> None:
        """Remove an adapter that no sequence uses, between steps."""
        self.bank.remove(number)

    def read(self, name: str) -> Adapter:
        """Read and check an adapter into host memory. Raises InferEngineError."""
        if not NAME.fullmatch(name) or not (self._folder / name / CONFIG).is_file():
            raise InferEngineError("not_found", "there is no adapter of that name in model.adapters", field="name")
        folder = self._folder / name
        return read_adapter(
            folder,
            name,
            self._model,
            self._targets,
            max_rank=self._max_rank,
            dtype=self.bank.dtype,
            unread=self._unread,
        )
