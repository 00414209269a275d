"""InferEngine: a message-queue engine for LLM inference. See README.md for the path of a request."""

__version__ = "0.1.0"
