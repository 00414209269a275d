"""What somebody types who sees this engine for the first time, in the words they use. All of it is in the training text.

The held-out split exists to measure how far the model carries to phrasings that it never saw; it must not cost the
plainest questions their answers. So the phrasings here, and no others, are never held out. Marks: see `knowledge`.
"""

# ruff: noqa: E501  (one answer, one line)
from __future__ import annotations

from collections.abc import Sequence

from . import engine

_MARKS = str.maketrans("", "", "«»")


def _answer(start: str) -> str:
    """Return the one answer of `engine` that starts so: a question has one answer, wherever it is asked."""
    (answer,) = {answer for _, answer in engine.ENGINE if answer.translate(_MARKS).startswith(start)}
    return answer


_START = _answer("Run `./scripts/serve`")
_PORTS = _answer("The HTTP front end uses port")
_CANCEL = _answer("Close the connection")
_STREAM = _answer('Add `"stream"')
_STOP = _answer("Press Ctrl-C")
_CURL = _answer("For example: curl http://127.0.0.1:8000/v1/completions")
_MODEL = _answer("Give the folder")
_PAGE = _answer("Open http")
_METRICS = _answer("`GET /metrics`")
_JSON = _answer('Set `"response_format"')
_PYTHON = _answer("Use `inferengine.client`")

# phrasings (no patterns: each is typed as it stands), answer
FIRST: tuple[tuple[tuple[str, ...], str], ...] = (
    (("How do I start the server", "How do I start", "How do I start the engine", "How do I start InferEngine", "How do I start it", "How do I run it", "How do I run the server", "How do I run this", "How to start the server", "How to start", "How to run", "Start the server", "How can I start the server", "How do you start the server", "How do I get started", "Getting started", "How do I launch it", "How do I serve the model", "Where do I start", "How do I begin"), _START),
    (("What is the default port", "What's the default port", "Default port", "Default ports", "What are the default ports", "Which port", "What port", "Which ports", "What port do you use", "Which port do you use", "What port is it on", "What port does it use", "What port is the default", "Which port is the default", "What port does the server use", "What port does the engine use", "On which port does it run", "What port does the server run on", "What ports are used"), _PORTS),
    (("How do I stream", "How do I stream tokens", "How do I stream responses", "How do I stream a response", "How do I stream an answer", "How do I stream the output", "How do I use streaming", "How do I enable streaming", "How to stream", "How can I stream", "How does one stream", "How do I get streaming", "Can I stream", "Do you support streaming", "Can it stream", "Is streaming supported"), _STREAM),
    (("How do I stop a request", "How do I cancel a request", "How do I abort a request", "How do I stop a generation", "How do I cancel", "How to stop a request", "How to cancel a request", "How can I stop a request", "How can I cancel a request", "Can I cancel a request", "How do I kill a request", "How do I end a request", "How do I stop generating", "How do I interrupt a request"), _CANCEL),
    (("How do I stop the server", "How do I stop it", "How do I stop the engine", "How to stop the server", "How do I shut it down", "How do I quit", "How do I shut down the server", "How do I exit", "How do I end it", "How can I stop the server"), _STOP),
    (("How do I send a request", "How do I make a request", "How do I use the API", "How do I call the API", "Give me an example", "Show me an example", "How do I use it", "How do I use this", "How do I use curl", "Example request", "curl example", "How do I ask for a completion", "How do I test it with curl", "How can I send a request", "How to send a request"), _CURL),
    (("How do I load a model", "How do I use another model", "How do I load another model", "How do I change the model", "How do I load Llama", "How do I use Llama", "How do I use my own model", "How do I serve another model", "How do I serve my own model", "How do I run Llama", "How do I run Qwen", "How to load a model", "Can I use another model", "Can I use my own model", "How do I switch the model"), _MODEL),
    (("Where is the chat page", "How do I open the chat page", "Is there a chat page", "Is there a web page", "Is there a UI", "Where is the UI", "How do I chat", "Where can I chat", "How do I chat in the browser", "Is there a web UI"), _PAGE),
    (("How do I see metrics", "Where are the metrics", "How do I get metrics", "How do I see the metrics", "Are there metrics", "How do I monitor it", "How do I use Prometheus", "Is there a metrics endpoint"), _METRICS),
    (("How do I get JSON", "How do I use JSON mode", "How do I get structured output", "How do I force JSON", "Is there a JSON mode", "Can I get JSON", "How do I use a JSON schema", "Do you support structured output"), _JSON),
    (("How do I use it from Python", "How do I use Python", "Is there a Python client", "How do I call it from Python", "Is there a client", "Is there a client library", "How do I use ZeroMQ", "How do I talk to the engine over ZeroMQ"), _PYTHON),
    (("How do I install it", "How do I install InferEngine", "How to install", "How do I install", "How do I set it up", "What do I need to install", "How do I install the engine", "How to install it", "Installation"), "Run `«./scripts/serve»`: the first time it installs everything into `.venv`. It needs Linux and Python 3.11 or newer."),
    (("How do I use a GPU", "How do I use the GPU", "How do I run it on a GPU", "How do I run on GPU", "Does it use the GPU", "Does it use my GPU", "Can it use a GPU", "How do I enable the GPU", "Do I need a GPU", "Is a GPU needed", "Does it need a GPU", "How do I use CUDA"), "With `«--engine.device auto»`, the default, it takes a GPU when there is one and the CPU otherwise."),
    (("How do I quantize the model", "How do I quantize", "How do I use quantization", "How do I use int8", "How do I use fp8", "How do I use int4", "How do I enable quantization", "Can I quantize the model", "How do I make the model smaller", "Do you support quantization", "How do I run in low precision"), "Start with `«--model.quantization» fp8`, int8 or int4; the weights are made small while they are loaded."),
    (("How do I use LoRA", "How do I load a LoRA adapter", "How do I use a LoRA adapter", "How do I use adapters", "How do I load an adapter", "How do I serve LoRA adapters", "Do you support LoRA", "Can I use LoRA", "Does it support LoRA adapters"), "Start with `«--model.adapters» FOLDER`, and name an adapter of that folder as `model` in the request."),
    (("How do I use speculative decoding", "How do I enable speculative decoding", "How do I turn on speculation", "How do I use speculation", "How do I use a draft model", "How do I enable speculation", "Do you support speculative decoding", "Can I use a draft model", "How do I switch on speculative decoding"), "Start with `«--speculation.method» draft` for a small model that guesses ahead, or `ngram` for prompt lookup."),
    (("How do I run the benchmarks", "How do I run benchmarks", "How do I benchmark it", "How do I measure the speed", "How do I measure throughput", "Is there a benchmark", "How fast is it", "How do I run a benchmark", "Where are the benchmarks"), "The programs are in the folder `«benchmarks»`; for example `python -m benchmarks.serving --concurrency 32`."),
    (("Where are the docs", "Where is the documentation", "Is there documentation", "Where can I read more", "Where do I find the documentation", "Where can I learn more", "Is there a manual", "Where are the instructions", "Do you have docs"), "Start with `README.md`; the other pages are in the folder `«docs»`."),
    (("Where are the logs", "Where is the log", "How do I see the logs", "Where do I find the logs", "How do I get more logs", "How do I read the logs", "Is there a log file", "How do I see errors"), "Every part writes its log to «standard error»; `--log.level debug` says more, `--log.format json` is for collectors."),
    (("How do I use API keys", "How do I set an API key", "Do I need an API key", "How do I add API keys", "How do I make an API key", "How do I protect the server", "How do I secure it", "Is there authentication", "How do I ask for API keys"), "No key is needed at first. Make keys with `inferengine keygen` and name their file in `«--auth.keys_file»`."),
    (("How do I use Docker", "How do I run it in Docker", "Is there a Docker image", "How do I run it with docker compose", "Can I run it in Docker", "Is there a Dockerfile", "How do I use docker compose"), "Run `«docker compose up»` in the repository: it builds one image and starts the engine and both front ends."),
    (("How much memory do I need", "How much memory does it need", "How much memory does a model need", "Will my model fit", "Does my model fit", "How do I plan memory", "How much GPU memory do I need", "What fits on my GPU", "How do I know if a model fits"), "Run `«inferengine plan-memory» MODEL`: it shows weights, KV cache and what fits, from config.json alone."),
    (("How do I get embeddings", "How do I use embeddings", "Is there an embeddings endpoint", "Do you support embeddings", "Can I get embeddings", "How do I embed a text"), "Use `POST «/v1/embeddings»` with the text as `input`."),
    (("How do I use a system prompt", "How do I set the system prompt", "How do I set a system prompt", "How do I add a system prompt", "Can I set a system prompt", "Where does the system prompt go"), "Put a message with the role `«system»` first in the `messages` of `/v1/chat/completions`."),
    (("How do I profile it", "How do I profile the engine", "How do I see where the time goes", "How do I get a trace", "Is there a profiler", "How do I find out why it is slow"), "Run `«inferengine profile»`: it records steps of a running engine and shows where the time goes."),
    (("How do I simulate the scheduler", "How do I plan capacity", "Is there a simulator", "How do I simulate load", "How do I try a policy without a GPU"), "Run `«inferengine simulate»`: the same scheduler in virtual time, without a device."),
    (("How do I use tools", "Do you support tools", "Do you support tool calls", "Do you support function calling", "How do I use function calling", "Is function calling supported", "Can I use tools"), "The API takes `«tools»` in a chat request, for models that were trained for them; I was not."),
)  # fmt: skip


def phrasings(questions: Sequence[str]) -> tuple[str, ...]:
    """Return each question with and without its mark, as it is and in lower case: `as_typed` adds the rest."""
    forms = (form for question in questions for form in (f"{question}?", question, question.lower()))
    return tuple(forms)


TAUGHT: frozenset[str] = frozenset(question.lower() for questions, _ in FIRST for question in questions)
