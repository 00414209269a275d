"""BatchRouting: which logs a step's tokens go to and who reads them, prepared once for all steps of the same sequences.

While no sequence begins or ends, a step costs nothing per sequence: its tokens stay together in one column, and the
logs take them out of the columns when somebody reads them, or after `MAX_COLUMNS` steps. Sequences that begin and end
change the routing in place. Used by the I/O thread only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from inferengine.engine.io.connection import Connection
from inferengine.engine.io.output_log import OutputLog, Subscription
from inferengine.wire import codec

MAX_COLUMNS = 64  # steps that logs may be behind their routing
FEW_COLUMNS = 4  # with fewer it is quicker to give each token to its log than to cut the columns into rows
MAX_GONE_SHARE = 8  # one in so many sequences may have ended for a change in place: beyond, a new routing is quicker


class RoutingGroup:
    """The rows of one routing that go to one connection. A row stands here once for each of its readers there."""

    __slots__ = ("_column", "_pick", "_whole", "connection", "indices", "num_special", "streams", "subscriptions")

    def __init__(self, connection: Connection, subscriptions: list[Subscription], indices: list[int]) -> None:
        self.connection = connection
        self.subscriptions = subscriptions
        self.indices = indices  # of the rows, ascending
        self.streams = array("I", [subscription.stream for subscription in subscriptions])
        self.num_special = len([s for s in subscriptions if not s.plain])  # those that are more than tokens
        self._column: bytes | None = None  # the streams as the wire has them
        self._pick: Any = None  # takes the tokens of these rows out of a step's
        self._whole = indices == list(range(len(indices)))

    def add(self, index: int, subscription: Subscription) -> None:
        """A reader of the row `index`, the last so far."""
        self._whole = self._whole and index == len(self.indices)
        self.subscriptions.append(subscription)
        self.indices.append(index)
        self.streams.append(subscription.stream)
        self.num_special += not subscription.plain
        self._column = self._pick = None

    def remove(self, index: int) -> None:
        """The row `index` is gone, and those after it move up."""
        indices = self.indices
        begin, end = bisect_left(indices, index), bisect_right(indices, index)
        if begin < end:
            self.num_special -= sum(not subscription.plain for subscription in self.subscriptions[begin:end])
            del self.subscriptions[begin:end]
            del self.streams[begin:end]
            self._column = None
        if not self._whole:
            indices[begin:] = [later - 1 for later in indices[end:]]
        elif begin < end:
            indices.pop()
        self._pick = None

    @property
    def stream_column(self) -> bytes:
        """The streams of the rows, u32[]."""
        if self._column is None:
            self._column = codec.to_u32(self.streams)
        return self._column

    def token_column(self, token_ids: list[int], tokens: array[int]) -> bytes:
        """The tokens of the rows, u32[], out of all tokens of a step, given in both forms."""
        indices = self.indices
        if self._whole and len(indices) == len(tokens):
            return codec.to_u32(tokens)
        if len(indices) == 1:
            return codec.to_u32((token_ids[indices[0]],))
        if self._pick is None:
            self._pick = itemgetter(*indices)
        return codec.to_u32(self._pick(token_ids))


class BatchRouting:
    """The i-th token of a step goes to `logs[i]`. A log stands there as often as it gets tokens in one step."""

    __slots__ = (
        "_columns",
        "_counts",
        "_stored",
        "_token_ids",
        "_tokens",
        "_uids",
        "gone",
        "groups",
        "key",
        "logs",
        "stale",
        "texts",
        "time_s",
    )

    def __init__(self, key: int, logs: list[OutputLog], time_s: float) -> None:
        self.key = key
        self.time_s = time_s  # of the last step
        self.logs = list(logs)
        self.gone: list[int] = []  # uids that have ended since
        self.stale = False  # a reader has come or gone: to be made anew
        self.texts: dict[OutputLog, list[int]] = {}  # logs with text, with the indices of their tokens
        self._uids = [log.uid for log in logs]
        self._stored = [log.stored for log in logs]
        self._token_ids: list[int] = []  # of the last step, in two forms
        self._tokens = array("I")
        self._columns: list[array[int]] = []  # tokens that the logs have not taken yet, by step
        self._counts = Counter(logs) if len(set(self._uids)) != len(logs) else None
        for index, log in enumerate(logs):
            if log.text is not None:
                self.texts.setdefault(log, []).append(index)
        self.groups = _groups(logs)

    @property
    def num_logs(self) -> int:
        """How many logs get tokens from one step."""
        return len(self.logs) if self._counts is None else len(self._counts)

    def tokens_of(self, log: OutputLog) -> int:
        """How many tokens this log gets in one step."""
        return 1 if self._counts is None else self._counts[log]

    def is_of(self, key: int) -> bool:
        """Whether a step with this key draws for these very logs, with readers as they were."""
        return key == self.key and not self.stale

    def push(self, token_ids: list[int]) -> None:
        """Collect the tokens of a step."""
        assert len(token_ids) == len(self.logs), "a step has one token for each row of its layout"
        if len(self._columns) >= MAX_COLUMNS:
            self.settle()
        self._token_ids = token_ids
        self._tokens = array("I", token_ids)
        self._columns.append(self._tokens)

    def token_column(self, group: RoutingGroup) -> bytes:
        """The tokens of the last step for one connection, u32[]."""
        return group.token_column(self._token_ids, self._tokens)

    def settle(self) -> None:
        """Move the collected tokens into the logs."""
        columns = self._columns
        if not columns:
            return
        self._columns = []
        if len(columns) < FEW_COLUMNS or self._counts is not None:
            for column in columns:
                deque(map(array.append, self._stored, column), maxlen=0)  # twice as fast as a loop
            return
        tokens = array("I")
        for column in columns:
            tokens += column
        width = len(self._stored)
        for index, stored in enumerate(self._stored):
            stored.extend(tokens[index::width])

    def change(self, key: int, uids: list[int], logs: Mapping[int, OutputLog]) -> list[OutputLog] | None:
        """Become the routing of another step, for sequences of which the first are those that have not ended, in the
        order in which they were. Returns the others, new here, or None if it is not so: then this routing is done."""
        self.settle()
        if self.stale or self._counts is not None or len(self.gone) * MAX_GONE_SHARE > len(self._uids):
            return None
        for uid in self.gone:
            self._remove(self._uids.index(uid))
        self.gone.clear()
        kept = len(self._uids)
        if uids[:kept] != self._uids:
            return None
        new = [logs[uid] for uid in uids[kept:]]
        if len(set(new)) != len(new) or any(log.routing is self for log in new):
            return None
        for log in new:
            self._add(log)
        self.key = key
        return new

    def _add(self, log: OutputLog) -> None:
        index = len(self.logs)
        self.logs.append(log)
        self._uids.append(log.uid)
        self._stored.append(log.stored)
        if log.text is not None:
            self.texts.setdefault(log, []).append(index)
        for subscription in log.subscriptions:
            group = self.groups.get(subscription.connection)
            if group is None:
                self.groups[subscription.connection] = RoutingGroup(subscription.connection, [subscription], [index])
            else:
                group.add(index, subscription)

    def _remove(self, index: int) -> None:
        log = self.logs.pop(index)
        del self._uids[index], self._stored[index]
        self.texts.pop(log, None)
        for indices in self.texts.values():
            indices[:] = [later - (later > index) for later in indices]
        for group in list(self.groups.values()):
            group.remove(index)
            if not group.indices:
                del self.groups[group.connection]


def _groups(logs: list[OutputLog]) -> dict[Connection, RoutingGroup]:
    """The rows of each connection. Mostly there is one connection, and every log has one reader."""
    sole = [log.subscriptions[0] for log in logs if len(log.subscriptions) == 1]
    if len(sole) == len(logs) and len({subscription.connection for subscription in sole}) == 1:
        return {sole[0].connection: RoutingGroup(sole[0].connection, sole, list(range(len(sole))))}
    rows: dict[Connection, tuple[list[Subscription], list[int]]] = {}
    for index, log in enumerate(logs):
        for subscription in log.subscriptions:
            subscriptions, indices = rows.setdefault(subscription.connection, ([], []))
            subscriptions.append(subscription)
            indices.append(index)
    return {
        connection: RoutingGroup(connection, subscriptions, indices)
        for connection, (subscriptions, indices) in rows.items()
    }
