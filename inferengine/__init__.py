"""InferEngine: a message-queue engine for LLM inference. See README.md for the path of a request."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """`inferengine.LLM` brings torch with it, so it is imported when it is asked for and not before."""
    if name == "LLM":
        from inferengine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from inferengine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'inferengine' has no attribute '{name}'")
