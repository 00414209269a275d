"""Clients of the engine's wire: what front ends and producers use. Needs pyzmq and msgpack alone."""

from inferengine.client.async_client import AsyncClient
from inferengine.client.client import Client
from inferengine.client.pool import EnginePool
from inferengine.client.streams import Delta, Embedding, Finish, TokenLogprobs
from inferengine.client.submission import Stream, Submission
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
