"""Clients of the engine's wire, for front ends and producers. They need pyzmq, msgpack and msgspec alone."""

from inferengine.client.async_client import AsyncClient, Stream, Submission
from inferengine.client.client import Client
from inferengine.client.output import Delta, Embedding, Finish, TokenLogprobs
from inferengine.client.pool import EnginePool
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
