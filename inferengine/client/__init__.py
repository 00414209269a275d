"""Clients of the engine's wire, for front ends and producers. They need pyzmq, msgpack and msgspec alone."""

from inferengine.client.client import AsyncClient, Client, Stream, Submission
from inferengine.client.pool import EnginePool
from inferengine.client.requests import Delta, Embedding, Finish, TokenLogprobs
from inferengine.wire.messages import Accept, ModelFiles, ModelInfo, Pong, Welcome

__all__ = [
    "Accept",
    "AsyncClient",
    "Client",
    "Delta",
    "Embedding",
    "EnginePool",
    "Finish",
    "ModelFiles",
    "ModelInfo",
    "Pong",
    "Stream",
    "Submission",
    "TokenLogprobs",
    "Welcome",
]
