"""Make the ZeroMQ sockets of the wire. No other file sets a ZeroMQ option.

The options: ROUTER_MANDATORY turns silent loss into an error that the sender sees (EAGAIN for a full pipe, EHOSTUNREACH
for a peer that is gone). ROUTER_HANDOVER lets a reconnecting client take over its routing id. High-water marks and
MAXMSGSIZE bound memory. TCP_MAXRT ends a connection whose other end has vanished. ZeroMQ's own heartbeats stay off: our
PING and leases do their work, and in libzmq 4.3.5 a peer that fills the receiving pipe and disconnects makes the next
heartbeat abort the whole process (stream_engine_base.cpp, out_event after an input error).
"""

from __future__ import annotations

import os
import secrets
import socket as plain_socket
from typing import cast

import zmq

from inferengine.wire.curve import ClientKeys, KeyPair

HIGH_WATER_MARK = 4096  # messages per peer and direction
STATUS_HIGH_WATER_MARK = 1024
REPLAY_HIGH_WATER_MARK = 20_000
LINGER_MS = 2000
TCP_GIVE_UP_MS = 6000
RECONNECT_MS, RECONNECT_MAX_MS = 50, 1000
_BACKLOG = 1024
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # arithmetic on pyzmq's flags costs more than asking the socket
_CONNECTION_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_ACCEPTED_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


def engine_router(context: zmq.Context[zmq.Socket[bytes]], max_message_bytes: int) -> zmq.Socket[bytes]:
    """Make the engine's ROUTER, not bound yet."""
    router = context.socket(zmq.ROUTER)
    _keep_alive(router)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    router.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    router.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    router.setsockopt(zmq.BACKLOG, _BACKLOG)
    router.setsockopt(zmq.LINGER, LINGER_MS)
    return router


def engine_publisher(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Make the engine's PUB for STATUS. A slow subscriber loses messages and never slows the engine."""
    publisher = context.socket(zmq.PUB)
    _keep_alive(publisher)
    publisher.setsockopt(zmq.SNDHWM, STATUS_HIGH_WATER_MARK)
    publisher.setsockopt(zmq.LINGER, 0)
    return publisher


def replay_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Make the engine's ROUTER that replays KV events on request."""
    router = context.socket(zmq.ROUTER)
    _keep_alive(router)
    router.setsockopt(zmq.SNDHWM, REPLAY_HIGH_WATER_MARK)
    router.setsockopt(zmq.MAXMSGSIZE, 64)
    router.setsockopt(zmq.LINGER, 0)
    return router


def require_curve(socket: zmq.Socket[bytes], own: KeyPair) -> None:
    """Demand a key of every client that connects to addresses bound from now on; `zap_handler` decides on the key.

    Addresses that are bound already stay as they are.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)


def ask_no_curve(socket: zmq.Socket[bytes]) -> None:
    """Accept clients without keys at addresses that are bound from now on."""
    socket.setsockopt(zmq.CURVE_SERVER, 0)


def zap_handler(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Make the socket that decides on each key of this context's sockets. Bind it before them."""
    handler = context.socket(zmq.REP)
    handler.setsockopt(zmq.LINGER, 0)
    handler.bind("inproc://zeromq.zap.01")
    return handler


def use_curve(socket: zmq.Socket[bytes], keys: ClientKeys | None, address: str) -> None:
    """Use a client's keys for a TCP address, if there are any. Call it before the socket connects to `address`."""
    if keys is not None and address.startswith("tcp://"):
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.engine)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)


def client_dealer(context: zmq.Context[zmq.Socket[bytes]], routing_id: bytes) -> zmq.Socket[bytes]:
    """Make a client's DEALER, not connected yet. It reconnects by itself."""
    dealer = context.socket(zmq.DEALER)
    _keep_alive(dealer)
    dealer.setsockopt(zmq.ROUTING_ID, routing_id)
    dealer.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    dealer.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    dealer.setsockopt(zmq.IMMEDIATE, 1)  # queue nothing without a connection: the session resends what was lost
    dealer.setsockopt(zmq.LINGER, LINGER_MS)
    return dealer


def status_subscriber(context: zmq.Context[zmq.Socket[bytes]], *topics: bytes) -> zmq.Socket[bytes]:
    """Make a client's SUB for STATUS, and for messages of these topics."""
    subscriber = context.socket(zmq.SUB)
    _keep_alive(subscriber)
    for topic in (b"status.", *topics):
        subscriber.setsockopt(zmq.SUBSCRIBE, topic)
    subscriber.setsockopt(zmq.RCVHWM, STATUS_HIGH_WATER_MARK)
    subscriber.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    subscriber.setsockopt(zmq.LINGER, 0)
    return subscriber


def connection_monitor(watched: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Make a PAIR that reports each finished handshake and each lost connection of `watched`."""
    return watched.get_monitor_socket(_CONNECTION_EVENTS)


def accepted_monitor(watched: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Make a PAIR that reports the descriptors of connections that `watched` accepts, and of those it has closed."""
    address = f"inproc://accepted-{secrets.token_hex(8)}"
    watched.monitor(address, int(_ACCEPTED_EVENTS))
    monitor: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # libzmq's own thread would wait at a full pipe
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def unbind(socket: zmq.Socket[bytes], address: str) -> None:
    """End the listener at `address`, as it was given to `bind`, and all connections accepted there, at once."""
    socket.setsockopt(
        zmq.LINGER, 0
    )  # otherwise each connection is read on for the linger time, and the messages are dropped
    try:
        socket.unbind(address)
    finally:
        socket.setsockopt(zmq.LINGER, LINGER_MS)


def routing_id(role: str) -> bytes:
    """Make a routing id, `<role>:<host>:<pid>:<random>`, of at most 255 bytes."""
    tail = f":{plain_socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}".encode()
    return (role.encode().lstrip(b"\0") or b"client")[: 255 - len(tail)] + tail


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message waits. Asking costs 2 us; trying and catching zmq.Again costs 40."""
    return bool(cast(int, socket.getsockopt(_EVENTS)) & _POLLIN)


def default_status_address(address: str) -> str:
    """Return the default address of an engine's PUB: `<address>.status`, over TCP the next port."""
    return _beside(address, "status", 1)


def replay_address(address: str) -> str:
    """Return the address at which KV events are replayed: `<address>.replay`, over TCP the next port but one."""
    return _beside(address, "replay", 2)


def replay_address_of_events(address: str) -> str:
    """Return the replay address of KV events that have a TCP address of their own: the next port."""
    return _beside(address, "replay", 1)


def _beside(address: str, suffix: str, offset: int) -> str:
    if address.startswith("tcp://"):
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + offset}"
    return f"{address}.{suffix}"


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.TCP_MAXRT, TCP_GIVE_UP_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, TCP_GIVE_UP_MS // 1000)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
