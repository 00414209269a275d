"""Decode KV copy on the CPU: a contiguous copy of the keys and values of rows that decode step after step.

Gathering keys from the paged cache copies all of them in every layer of every step. Rows that continue need that once:
each has a place in a copy, to which each step adds its own tokens' keys and values. The paged cache is written as
always and stays authoritative. A new row is gathered into a free place; a finished row leaves its place free. A row may
have several new tokens (draft tokens to verify, tokens that a grammar forces), and it may start before the end of its
place (draft tokens were rejected).

Invariant: a place counts no position that a later step wrote only to the paged cache. Every step writes its rows from
their start on, and not every step uses the copies (rows too unequal, a chunk too long). So `begin` truncates the places
of all rows of a step to where the rows start, before it is decided how the step is computed, and only
`GroupCopy.advance` counts the positions that it adds itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from inferengine.kernels.batch import StepColumns
from inferengine.kernels.cpu.attention import FP8, block_places, without_sinks

MAX_COPY_BYTES = 64 << 20  # most that a copy may take, all layers together
MIN_EQUAL_STEPS = 2  # steps of the same rows after which a copy is made: before, it might not pay for itself
ROOM = 64  # a place has room for this many to twice as many tokens more than the longest row
RAGGED = 1.25  # padding to the longest row, over all keys, beyond which rows are too unequal to lie side by side
NEWCOMERS = 0.25  # share of a step's rows beyond which it is another batch
FILLED = 0.75  # share of places below which they are picked, not taken as they lie
SPARE_QUERIES = 12  # repeated queries that cost as much as a row whose keys are copied for its later queries
SPARSE_STEPS = 4  # such steps in a row after which the copy is too large for what is left of its rows


class LayerCopy(NamedTuple):
    """One layer's keys and values in P places, with room for `capacity` tokens each."""

    flat: torch.Tensor  # [2 * P * K * capacity, D]: what the other two look at
    keys: torch.Tensor  # [P * K, capacity, D]
    values: torch.Tensor


class Queries(NamedTuple):
    """Queries that are computed together: Q of each of X places, repetitions among them."""

    num_queries: int
    places: torch.Tensor | None  # [2 * X * K] of keys, then values, by head; None: all of them as they lie
    tokens: torch.Tensor | None  # [X * Q] token of each query; None: one for one
    mask: torch.Tensor | None  # [X, 1, Q, 1, keys], 0 or -inf; None: nothing is hidden


_ALONE = [Queries(1, None, None, None)]  # one query of each place, nothing hidden


class DecodeKvCache:
    """The copies of one model, by KV group, and the steps that decide when a copy is made. `advance` fills `copies`."""

    def __init__(self, num_layers: int) -> None:
        self.copies: dict[int, GroupCopy] = {}
        self.storage: dict[int, torch.Tensor] = {}  # by layer, used again by the next copy
        self._num_layers = num_layers
        self._num_alike = 0  # steps of about the same rows, up to this one
        self._step = 1
        self._last_step = np.zeros(1, dtype=np.int64)  # by slot: when it had a row last
        self._last_rows = b""  # slots of the last step
        self._under_way = False

    def begin(self, columns: StepColumns, admitted: list[int]) -> None:
        """Prepare for a step, before its attention is planned. `admitted`: slots whose contents no step of this model
        computed."""
        if self._under_way:  # the last step failed half way
            self.forget()
        self._under_way = True
        for copy in self.copies.values():
            copy.rewind(columns)
        rows = columns.row_slot.tobytes()
        if rows == self._last_rows and not admitted:
            self._num_alike += 1
            return
        highest = int(columns.row_slot.max())
        if highest >= len(self._last_step):
            self._last_step = np.concatenate((self._last_step, np.zeros(highest + 1, dtype=np.int64)))
        self.drop(admitted)
        num_new = int((self._last_step[columns.row_slot] < self._step).sum())
        self._num_alike = self._num_alike + 1 if num_new <= NEWCOMERS * len(columns.row_slot) else 0
        self._step += 1
        self._last_step[columns.row_slot] = self._step
        self._last_rows = rows
        if not self._num_alike:
            self.copies.clear()

    def end(self) -> None:
        """Mark the step as complete: it has gone through all layers."""
        self._under_way = False

    def drop(self, slots: list[int]) -> None:
        """Invalidate the copies of reassigned slots."""
        if not slots:
            return
        self._last_rows = b""
        self._last_step[[slot for slot in slots if slot < len(self._last_step)]] = 0
        for copy in self.copies.values():
            copy.drop(slots)

    def forget(self) -> None:
        """Discard all copies: they may be wrong."""
        self.copies.clear()
        self._num_alike = 0
        self._last_rows = b""
        self._last_step[:] = 0

    def advance(
        self, columns: StepColumns, num_rows: int, group: int, table: np.ndarray, kv: torch.Tensor
    ) -> GroupCopy | None:
        """Return the copies of a group without window, ready for the first `num_rows` rows of this step.

        None: this step reads the paged cache, because its rows are new, too unequal or too large to copy."""
        lengths = columns.row_len[:num_rows]
        longest = int(lengths[0] if num_rows == 1 else lengths.max())
        copy = self.copies.get(group)
        if copy is not None and not copy.suits(num_rows, longest):
            self.copies.pop(group)
            copy = None
        if self._num_alike < MIN_EQUAL_STEPS or (num_rows > 1 and num_rows * longest > RAGGED * lengths.sum()):
            return None
        if copy is None:
            capacity = (longest // ROOM + 2) * ROOM
            num_numbers = 2 * num_rows * kv.shape[2] * capacity * kv.shape[4]
            if kv.dtype == FP8 or num_numbers * kv.element_size() * self._num_layers > MAX_COPY_BYTES:
                return None
            copy = self.copies[group] = GroupCopy(num_rows, kv, capacity, self.storage)
        copy.advance(columns, num_rows, table)
        return copy


class GroupCopy:
    """Copies of the layers of one KV group."""

    def __init__(self, num_places: int, kv: torch.Tensor, capacity: int, storage: dict[int, torch.Tensor]) -> None:
        self.num_tokens = 0  # of the step: the first ones, those of rows with a place
        self._capacity, self._num_kv_heads, self._block_size = capacity, kv.shape[2], kv.shape[3]
        self._slots = np.full(num_places, -1)  # by place
        self._num_known = np.zeros(num_places, dtype=np.int64)  # by place: its first tokens
        halves_and_heads = np.arange(2 * self._num_kv_heads)
        half, head = halves_and_heads // self._num_kv_heads, halves_and_heads % self._num_kv_heads
        places = np.arange(num_places)[:, None]
        self._first = ((half * num_places + places) * self._num_kv_heads + head) * capacity  # [P, 2K] in `flat`
        self._storage, self._layers = storage, dict[int, LayerCopy]()
        self._zero = torch.zeros((), dtype=kv.dtype)
        self._num_sparse = self._longest = 0
        self._is_sparse = False
        self._written = self._zero
        self._queries: list[Queries] = []
        self._order: torch.Tensor | None = None  # [T] where each token's result lies among those of all queries
        self._joining: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def drop(self, slots: list[int]) -> None:
        """Free the places of these slots."""
        gone = np.isin(self._slots, slots)
        self._slots[gone], self._num_known[gone] = -1, 0

    def rewind(self, columns: StepColumns) -> None:
        """Truncate the places of a step's rows to where the rows start: the step writes from there on."""
        slots, starts = columns.row_slot, columns.row_start
        if len(slots) == len(self._slots) and np.array_equal(slots, self._slots):
            np.minimum(self._num_known, starts, out=self._num_known)
            return
        row, place = np.nonzero(slots[:, None] == self._slots)
        self._num_known[place] = np.minimum(self._num_known[place], starts[row])

    def held(self, slot: int, kv: torch.Tensor) -> torch.Tensor | None:
        """Return what the copy of the layer of `kv` holds of a slot, [2, K, known, D]; None where it holds nothing."""
        copy, places = self._layers.get(kv.data_ptr()), np.flatnonzero(self._slots == slot)
        if copy is None or not len(places):
            return None
        both = copy.flat.view(2, len(self._slots), self._num_kv_heads, self._capacity, -1)
        return both[:, int(places[0]), :, : int(self._num_known[places[0]])]

    def suits(self, num_rows: int, longest: int) -> bool:
        """Return whether the step's rows, up to `longest` tokens, fit, and have lately filled enough of the places."""
        self._is_sparse = num_rows < FILLED * len(self._slots)
        self._num_sparse = self._num_sparse + 1 if self._is_sparse else 0
        return longest <= self._capacity and num_rows <= len(self._slots) and self._num_sparse <= SPARSE_STEPS

    # -- once per step -----------------------------------------------------------------------------------------------

    def advance(self, columns: StepColumns, num_rows: int, table: np.ndarray) -> None:
        """Add the tokens of the next step."""
        if num_rows == len(self._slots) == 1 and self._advance_alone(columns):
            return
        slots, starts, lengths = columns.row_slot[:num_rows], columns.row_start[:num_rows], columns.row_len[:num_rows]
        self.num_tokens = int(columns.query_start[num_rows])
        places = self._places_of(slots)
        rows = columns.token_row[: self.num_tokens]
        self._written = torch.from_numpy(self._first[places[rows]] + columns.positions[: self.num_tokens, None])
        self._longest = int(lengths.max())
        behind = np.flatnonzero(starts > self._num_known[places])
        self._joining = self._join(slots[behind], places[behind], lengths[behind], table) if len(behind) else None
        self._num_known[places] = lengths
        self._queries, self._order = self._plan_queries(columns.query_start[: num_rows + 1], places, starts)

    def _advance_alone(self, columns: StepColumns) -> bool:
        """As `advance` for the next tokens of the one row there is; False where it is not that simple."""
        start, count = int(columns.row_start[0]), int(columns.query_start[1])
        if columns.row_slot[0] != self._slots[0] or start > self._num_known[0]:
            return False
        self.num_tokens, self._longest, self._joining, self._order = count, start + count, None, None
        self._num_known[0] = start + count
        if count == 1:
            self._written, self._queries = torch.from_numpy(self._first + start), _ALONE
            return True
        self._written = torch.from_numpy(self._first + columns.positions[:count, None])
        hidden = np.zeros((1, 1, count, 1, start + count), dtype=np.float32)
        hidden[0, 0, :, 0, start:] = np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)
        self._queries = [Queries(count, None, None, torch.from_numpy(hidden).to(self._zero.dtype))]
        return True

    def _places_of(self, slots: np.ndarray) -> np.ndarray:
        """The place of each row; rows without one are given one that no row of this step has."""
        if np.array_equal(self._slots[: len(slots)], slots):
            return np.arange(len(slots))
        by_slot = np.full(int(max(slots.max(), self._slots.max())) + 2, -1)  # the last one: of no slot
        by_slot[self._slots] = np.arange(len(self._slots))
        by_slot[-1] = -1
        places: np.ndarray = by_slot[slots]
        new = np.flatnonzero(places < 0)
        if len(new):
            is_taken = np.zeros(len(self._slots), dtype=np.bool_)
            is_taken[places[places >= 0]] = True
            free = np.flatnonzero(~is_taken)[: len(new)]
            if self.num_tokens > len(slots):  # rows of several tokens come last, and only in this step
                new = new[np.argsort(slots[new])]
            places[new], self._slots[free], self._num_known[free] = free, slots[new], 0
        return places

    def _join(
        self, slots: np.ndarray, places: np.ndarray, lengths: np.ndarray, table: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(places, sources, hidden) of rows whose keys are to be gathered: J, rows of the paged cache, and [J, keys]
        that lie behind the row's last one."""
        num_blocks = -(-lengths // self._block_size)
        index = np.minimum(np.arange(int(num_blocks.max())), num_blocks[:, None] - 1)
        sources = block_places(table[slots[:, None], index], self._num_kv_heads)
        hidden = np.arange(index.shape[1] * self._block_size) >= lengths[:, None]
        return torch.from_numpy(places), torch.from_numpy(sources), torch.from_numpy(hidden)

    def _plan_queries(
        self, query_start: np.ndarray, places: np.ndarray, starts: np.ndarray
    ) -> tuple[list[Queries], torch.Tensor | None]:
        """All rows at once, the shorter ones padded; where that is much, first tokens at once, the others after them.
        With the place of each token's result, None: as they come."""
        counts, first = np.diff(query_start), query_start[:-1]
        num_queries = int(counts.max())
        if num_queries == 1 and np.array_equal(places, np.arange(len(self._slots))):
            return [Queries(1, None, None, self._mask(starts[:, None]))], None
        many = counts > 1
        parts = [(first, counts, places, starts, self._is_sparse)]
        if len(places) * num_queries - self.num_tokens > SPARE_QUERIES * (1 + many.sum()):
            after = (first[many] + 1, counts[many] - 1, places[many], starts[many] + 1, True)
            parts = [(first, np.ones_like(counts), places, starts, self._is_sparse), after]
        order, queries, num_results = np.empty(self.num_tokens, dtype=np.int64), [], 0
        for part in parts:
            tokens, results, found = self._plan_places(*part)
            queries.append(found)
            order[tokens] = num_results + results
            picked = None if found.places is None else len(found.places) // (2 * self._num_kv_heads)
            num_results += found.num_queries * (len(self._slots) if picked is None else picked)
        return queries, None if _in_order(order) and num_results == self.num_tokens else torch.from_numpy(order)

    def _plan_places(
        self, first: np.ndarray, counts: np.ndarray, places: np.ndarray, starts: np.ndarray, picked: bool
    ) -> tuple[np.ndarray, np.ndarray, Queries]:
        """For rows of `counts` tokens from token `first` on: these tokens, which results are theirs, and the queries.
        `picked`: the rows' places alone, else all as they lie."""
        num_places = len(places) if picked else len(self._slots)
        at = np.arange(num_places) if picked else places
        within = np.arange(int(counts.max()))
        place_of = np.minimum(within, counts[:, None] - 1)  # [R, Q] of a query within its row
        tokens, last_key = np.zeros((2, num_places, len(within)), dtype=np.int64)
        tokens[at], last_key[at] = first[:, None] + place_of, starts[:, None] + place_of
        is_wanted = within < counts[:, None]
        results = (at[:, None] * len(within) + within)[is_wanted]
        flat = tokens.reshape(-1)
        queries = Queries(
            len(within),
            self._rows_of(places) if picked else None,
            None if len(flat) == self.num_tokens and _in_order(flat) else torch.from_numpy(flat),
            self._mask(last_key),
        )
        return flat[results], results, queries

    def _rows_of(self, places: np.ndarray) -> torch.Tensor:
        """[2 * X * K] of a copy seen as rows of `capacity` tokens: keys of each place and head, then values."""
        rows = (self._first[places] // self._capacity).reshape(len(places), 2, -1)
        return torch.from_numpy(rows.transpose(1, 0, 2).reshape(-1))

    def _mask(self, last_key: np.ndarray) -> torch.Tensor | None:
        """What queries [X, Q] must not see of the longest row's keys."""
        hidden = np.arange(self._longest) > last_key[:, :, None]  # [X, Q, keys]
        if not hidden.any():
            return None
        values = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return torch.from_numpy(values).to(self._zero.dtype)[:, None, :, None]

    # -- once per layer ----------------------------------------------------------------------------------------------

    def attention(
        self,
        q: torch.Tensor,
        new: torch.Tensor,
        kv: torch.Tensor,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend with q [T, H, D] over the keys of each token's row -> [T, H * D]. `new` [T, 2K, D] are the step's own
        keys and values, which are in `kv` already. `sinks` [H] as in kernels/cpu/attention.py."""
        copy = self._layers.get(kv.data_ptr())
        if copy is None:
            copy = self._layers[kv.data_ptr()] = self._make(kv)
        if self._joining is not None:
            self._gather(copy, kv, *self._joining)
        copy.flat.index_put_((self._written,), new)
        q = torch.mul(q, scale)  # here, not the scores: there are fewer of them
        parts = [self._attend(copy, q, queries, softcap, sinks) for queries in self._queries]
        results = parts[0] if len(parts) == 1 else torch.cat(parts)
        return results if self._order is None else results.index_select(0, self._order)

    def _attend(
        self,
        copy: LayerCopy,
        q: torch.Tensor,
        queries: Queries,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[X * Q, H * D] of queries that have been scaled."""
        num_queries, width, head_dim = queries.num_queries, q.shape[1] * q.shape[2], q.shape[2]
        if queries.places is None:
            keys, values = copy.keys.narrow(1, 0, self._longest), copy.values.narrow(1, 0, self._longest)
        else:
            by_place = copy.flat.view(-1, self._capacity, head_dim).narrow(1, 0, self._longest)
            keys, values = by_place.index_select(0, queries.places).chunk(2)
        if queries.tokens is not None:
            q = q.index_select(0, queries.tokens)
        by_head = q.view(-1, num_queries, self._num_kv_heads, width // head_dim // self._num_kv_heads, head_dim)
        if num_queries > 1:
            by_head = by_head.transpose(1, 2)
        by_head = by_head.reshape(keys.shape[0], -1, head_dim)
        scores = torch.bmm(by_head, keys.transpose(1, 2))
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if queries.mask is not None:
            scores.view(len(queries.mask), self._num_kv_heads, num_queries, -1, self._longest).add_(queries.mask)
        mixed = torch.bmm(torch.softmax(scores, -1), values)
        if sinks is not None:
            mixed = without_sinks(mixed, scores, sinks, self._num_kv_heads)
        if num_queries > 1:
            mixed = mixed.view(-1, self._num_kv_heads, num_queries, width // self._num_kv_heads).transpose(1, 2)
        return mixed.reshape(-1, width)

    def _make(self, kv: torch.Tensor) -> LayerCopy:
        """Places full of zeros: what is hidden is multiplied by 0, which must give 0."""
        shape = 2, len(self._slots) * self._num_kv_heads, self._capacity, kv.shape[4]
        size = int(np.prod(shape))
        storage = self._storage.get(kv.data_ptr())
        if storage is None or len(storage) < size:
            storage = self._storage[kv.data_ptr()] = torch.empty(size, dtype=kv.dtype)
        both = storage[:size].zero_().view(shape)
        return LayerCopy(both.view(-1, shape[3]), both[0], both[1])

    def _gather(
        self, copy: LayerCopy, kv: torch.Tensor, places: torch.Tensor, sources: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Fill places from the paged cache, with zeros behind each row's last token: what a request before left there
        may be no number."""
        block_size, head_dim = kv.shape[3:]
        found = kv.view(-1, block_size * head_dim).index_select(0, sources)
        found = found.view(2, len(places), self._num_kv_heads, -1, head_dim)
        found.masked_fill_(hidden.view(1, len(places), 1, -1, 1), 0.0)
        both = copy.flat.view(2, len(self._slots), self._num_kv_heads, self._capacity, head_dim)
        filled = min(self._capacity, found.shape[3])
        both[:, places, :, :filled] = found[:, :, :, :filled]
        both[:, places, :, filled:] = 0.0


def _in_order(indices: np.ndarray) -> bool:
    return np.array_equal(indices, np.arange(len(indices)))
