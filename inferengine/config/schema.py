"""One configuration for every process: frozen dataclasses, filled from TOML, environment and flags.

Precedence: flags over environment over file over defaults. Every key exists three times under one name:
`[http] port` in the file, `--http.port` on the command line, `INFERENGINE_HTTP_PORT` in the environment.
An unknown key anywhere is an error that names it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferengine.config.environment import runtime_directory, variables
from inferengine.config.values import (
    ENVIRONMENT_PREFIX,
    allowed,
    check_address,
    convert,
    current_name,
    flatten,
    from_environment,
    read_toml,
    suggestion,
)
from inferengine.errors import ConfigError

# Renamed keys: old name → present name. The old names are read for one release, with a warning.
CPU_CACHE_SHARE = 0.25  # cache.memory_fraction on a CPU, of free memory, if it says nothing
RENAMED = {"wire.choice": "wire.load_balancing", "scheduler.pressure": "scheduler.preemption"}


MAX_PORT = 65535
MAX_WORKERS = 256


def _key(
    default: Any,
    help: str,
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    is_file_name: bool = False,
) -> Any:
    metadata = {
        "help": help, "choices": choices, "minimum": minimum, "maximum": maximum, "is_file_name": is_file_name,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The model: where it is and in which number formats it is loaded."""

    path: str = _key("", "checkpoint folder, .gguf file, hub id or short name (qwen3-0.6b); empty: the embedded model")
    served_name: str = _key("", "model's name on /v1/models; empty: the folder's name")
    dtype: str = _key(
        "auto",
        "number format of the weights; auto: float32 on CPU, the checkpoint's own on CUDA",
        ("auto", "float32", "float16", "bfloat16"),
    )
    max_model_len: int = _key(0, "longest prompt plus output in tokens; 0: the model's own limit", minimum=0)
    load_format: str = _key(
        "auto", "dummy: random weights of the config's shapes, for measuring speed", ("auto", "dummy")
    )
    quantization: str = _key(
        "none",
        "quantize the weights at load; none also loads checkpoints that are quantized already",
        ("none", "fp8", "fp8_tensor", "fp8_block", "int8", "int8_w8a8", "int4"),
    )
    pooling: str = _key(
        "auto",
        "embeddings: the final hidden state of the last token, or of the first (cls), or the mean over the prompt; "
        "auto: as the model's own "
        "files for sentence-transformers say, with the layers behind it, else last",
        ("auto", "last", "mean", "cls"),
    )
    adapters: str = _key(
        "", "folder of LoRA adapters, one sub-folder each; each is served as a model of its sub-folder's name"
    )
    max_adapter_rank: int = _key(64, "largest rank of a LoRA adapter", minimum=1)


@dataclass(frozen=True)
class EngineConfig:
    """The engine process: device, sizes of a step, watchdogs."""

    name: str = _key(
        "engine", "name of this engine, part of the socket's file name: letters, digits, _, - and .", is_file_name=True
    )
    executor: str = _key(
        "torch",
        "what computes: torch, onnx (ONNX Runtime), remote (a device elsewhere, section remote), upstream (another "
        "server, section upstream), or the name of an installed entry point of the group inferengine.executors",
    )
    device: str = _key("auto", "where the model runs", ("auto", "cpu", "cuda"))
    tensor_parallel: int = _key(
        1, "devices that share each layer of the model; on a CPU, processes (rank 0 and its workers)", (1, 2, 4, 8)
    )
    threads: int = _key(0, "CPU threads for the model; 0: chosen by the size of a step, at most all cores", minimum=0)
    max_num_seqs: int = _key(0, "most sequences in one step; 0: 64 on CPU, 512 on CUDA", minimum=0)
    max_num_batched_tokens: int = _key(
        0,
        "token budget of one step; 0: 512 on CPU, 8192 on CUDA, 32768 there for small bidirectional encoders",
        minimum=0,
    )
    overlap: str = _key("auto", "schedule step n+1 while step n runs; auto: on CUDA", ("auto", "on", "off"))
    cuda_graphs: bool = _key(True, "run decode steps, and small steps with prompts, as CUDA graphs")
    deterministic: bool = _key(False, "outputs do not change by one bit with what else is in the batch")
    seed: int = _key(0, "seed of requests without one; 0: a new one at each start", minimum=0)
    drain_timeout_s: float = _key(30.0, "how long running requests may go on after SIGTERM", minimum=0)
    frozen_after_s: float = _key(
        20.0, "end the engine when its loop or its I/O thread makes no progress for this long", minimum=0.1
    )
    stall_factor: float = _key(
        20.0,
        "a step that takes this many times its expected duration is a stall, and the engine restarts; 0: never",
        minimum=0,
    )
    stall_min_s: float = _key(0.0, "a step below this duration is never a stall; 0: 2 on CUDA, 30 on CPU", minimum=0)
    peak_gb_per_s: float = _key(
        0.0,
        "memory bandwidth of the device, for the metric of the roofline's share; 0: from its data sheet, or measured",
        minimum=0,
    )
    peak_tflops: float = _key(
        0.0,
        "arithmetic throughput of the device in the model's number format, for the same metric; 0: likewise",
        minimum=0,
    )
    tune: str = _key(
        "auto",
        "choose kernels by measuring the model's products, attention and experts on this card, within this many "
        "seconds at the first start; auto: 20 for the products of a model of 1 GiB or more, 0: only tables that "
        "exist, off: fixed rules",
    )
    check_memory: bool = _key(True, "refuse a model that does not fit into free memory; false: load it nevertheless")
    metrics_port: int = _key(
        0, "port on 127.0.0.1 for Prometheus metrics of the engine alone; 0: none", minimum=0, maximum=MAX_PORT
    )


@dataclass(frozen=True)
class UpstreamConfig:
    """With engine.executor = upstream: the OpenAI-compatible servers that compute."""

    url: str = _key("", "servers, comma-separated, such as http://127.0.0.1:8080; the least loaded gets a request")
    command: str = _key("", "command line that starts the server at upstream.url; it is restarted when it ends")
    model: str = _key("", "model's name at the servers; empty: the first that each lists")
    api_key_file: str = _key("", "file with the API key for the servers; empty: none is sent")
    fields: str = _key(
        "auto",
        "sampling fields beyond OpenAI's that the servers honour, comma-separated; auto: all (those of vLLM) where "
        "they give token ids, else none",
    )
    start_timeout_s: float = _key(600.0, "how long the engine waits at its start for a server to answer", minimum=0.1)
    wait_s: float = _key(30.0, "how long a request waits while no server is up", minimum=0)
    read_timeout_s: float = _key(300.0, "longest silence of a server on an open request", minimum=0.1)


@dataclass(frozen=True)
class RemoteConfig:
    """With engine.executor = remote: a device in another process or machine, lent by `inferengine executor`."""

    address: str = _key("", "engine: the device's host:port, or unix:PATH")
    listen: str = _key("127.0.0.1:50051", "device: host:port or unix:PATH to listen on; port 0: any free one")
    connect_timeout_s: float = _key(60.0, "engine: how long it waits for the device at its start", minimum=0.1)
    step_timeout_s: float = _key(120.0, "engine: a device that gives no result for this long is lost", minimum=0.1)
    tls_ca: str = _key(
        "", "PEM file of the authority that signed the other side's certificate; the device then asks for one"
    )
    tls_certificate: str = _key("", "PEM file with this side's certificate chain")
    tls_key: str = _key("", "PEM file with this side's private key")


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache: its blocks, their memory and their reuse."""

    block_size: int = _key(0, "tokens per KV block; 0: 16 on CPU, 64 on CUDA", (0, 8, 16, 32, 64, 128))
    num_blocks: int = _key(0, "number of KV blocks; 0: from measured free memory", minimum=0)
    memory_fraction: float = _key(
        0.0, "share of the device's memory to use; 0: 0.92 on CUDA, 0.25 of free RAM on CPU", minimum=0, maximum=1
    )
    prefix_caching: bool = _key(True, "reuse the KV blocks of equal prefixes")
    watermark: float = _key(
        0.01, "share of blocks that stays free when a waiting request is admitted", minimum=0, maximum=1
    )
    eviction: str = _key("lru", "which cached prefix is evicted first: least recently used, or oldest", ("lru", "fifo"))
    layout: str = _key(
        "paged",
        "contiguous: each sequence reserves blocks for the longest length (to measure what paging gains)",
        ("paged", "contiguous"),
    )
    swap_gib: float = _key(0.0, "host memory for the KV of preempted requests (scheduler.preemption = swap)", minimum=0)
    snapshot_gib: float = _key(
        0.0,
        "memory for snapshots of the states of models with recurrences or convolutions, with which equal prefixes are "
        "reused; 0: 1/16 of the device's, on a CPU at most 1",
        minimum=0,
    )
    dtype: str = _key("auto", "number format of the KV cache; auto: the model's, fp8: e4m3", ("auto", "fp8"))
    events: bool = _key(False, "publish stored and removed blocks for cache-aware routers")
    events_address: str = _key(
        "",
        "tcp://HOST:PORT where they are published, and repeated at the next port, without keys, which such routers do "
        "not know; empty: beside STATUS, with the wire's keys",
    )
    events_topic: str = _key("", "their topic, kv@POD@MODEL; empty: the engine's and the model's name")


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler: order of the queue, preemption, chunked prefill, limits of the queue."""

    policy: str = _key(
        "fair",
        "order of the waiting queue; fair: equal shares for tenants, in each for addresses, in each of these for "
        "users, and first come first served for one user",
        ("fair", "fcfs", "priority", "shortest", "deadline", "static"),
    )
    preemption: str = _key(
        "preempt",
        "when KV blocks run out: preempt (compute again later), swap (to host memory) or reject",
        ("preempt", "swap", "reject"),
    )
    chunked_prefill: bool = _key(True, "split long prompts over several steps, so that decoding continues meanwhile")
    prefill_chunk: int = _key(0, "most prompt tokens of one request in one step; 0: the step's token budget", minimum=0)
    itl_target_ms: float = _key(
        -1.0,
        "target for the duration of steps that decode: prompt chunks are cut to meet it; 0: none; below 0: 60, or "
        "three times a step without prompts where that is longer, and none in inferengine.LLM",
    )
    max_num_decodes: int = _key(0, "most decoding sequences in one step; 0: engine.max_num_seqs", minimum=0)
    max_queued_requests: int = _key(1024, "waiting requests above which new ones are rejected", minimum=1)
    max_queued_tokens: int = _key(2_000_000, "waiting prompt tokens above which new requests are rejected", minimum=1)
    max_tenant_requests: int = _key(0, "most unfinished requests of one tenant; 0: no limit per tenant", minimum=0)


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculative decoding: where draft tokens come from and how many there are."""

    method: str = _key(
        "auto",
        "source of draft tokens; ngram: repeated text, draft: a draft model, auto: draft for the embedded model on a "
        "CPU, else none",
        ("auto", "none", "ngram", "draft"),
    )
    draft_model: str = _key(
        "", "folder or hub id of the draft model, also used by auto; empty: the embedded draft model"
    )
    max_drafts: int = _key(8, "most draft tokens of one sequence in a step", minimum=1)
    max_running: int = _key(0, "no draft tokens while more sequences run; 0: 16, with auto 2", minimum=0)


@dataclass(frozen=True)
class WireConfig:
    """ZeroMQ: addresses, flow control, leases, encryption, load balancing."""

    socket: str = _key("", "the engine's ZeroMQ address; empty: ipc in the runtime directory")
    tcp: str = _key("", "additional address, such as tcp://127.0.0.1:5555")
    window: int = _key(64, "most unacknowledged STEP messages of one connection", minimum=1)
    stall_limit_s: float = _key(
        30.0, "cancel the requests of a client that acknowledges nothing, or is silent, for this long", minimum=0.1
    )
    heartbeat_s: float = _key(
        2.0,
        "interval of heartbeats; a client whose connection is gone for this long, or that misses 3 of them and cannot "
        "be reached, has its requests cancelled, but for detached ones",
        minimum=0.05,
    )
    resume_ttl_s: float = _key(60.0, "how long finished outputs are kept for ATTACH", minimum=0)
    resume_wait_s: float = _key(
        120.0, "front ends: how long an open request waits for another engine when its own is lost", minimum=0
    )
    max_message_bytes: int = _key(16 * 1024 * 1024, "largest frame accepted", minimum=4096)
    status_interval_s: float = _key(0.25, "interval of STATUS messages on PUB while requests run", minimum=0.05)
    curve_secret_file: str = _key("", "CURVE key pair for TCP (inferengine keygen), of the engine or of a client")
    curve_clients_file: str = _key("", "engine: file with the public keys of the clients that may connect over TCP")
    curve_engine_key: str = _key("", "clients: public key of the engine that they connect to over TCP")
    engines: str = _key(
        "",
        "front ends: addresses of several engines, comma-separated; also dns+tcp://NAME:PORT, "
        "srv+tcp://_SERVICE._tcp.NAME and file:PATH, which are looked up again and again; empty: wire.socket",
    )
    discovery_s: float = _key(
        5.0, "front ends: interval at which names and files of wire.engines are read", minimum=0.1
    )
    load_balancing: str = _key(
        "auto",
        "front ends: how one of several engines is chosen for a request: in turn, by load, or by the prompt's "
        "beginning and load; auto: prefix_affinity for the engines of up.engines, else power_of_two",
        ("auto", "round_robin", "power_of_two", "prefix_affinity"),
    )
    hedge_share: float = _key(
        0.0,
        "front ends: most requests, as a part of all, that get a second run at another engine when no output has come "
        "for longer than 95 % of requests of their size took; 0: none",
        minimum=0,
        maximum=1,
    )


@dataclass(frozen=True)
class LimitsConfig:
    """Limits of one request, checked by the engine and by the front ends."""

    max_n: int = _key(16, "most choices (n) of one request", minimum=1)
    max_stop_strings: int = _key(16, "most stop strings of one request", minimum=0)
    max_stop_characters: int = _key(256, "longest stop string, in characters", minimum=1)
    max_logit_bias: int = _key(1024, "most entries of logit_bias", minimum=0)
    max_logprobs: int = _key(20, "most alternatives per position", minimum=0)
    max_prompt_logprobs: int = _key(
        1_000_000,
        "most prompt log-probabilities in one answer: prompt tokens x (1 + alternatives) x choices",
        minimum=1,
    )
    max_prompts: int = _key(256, "most prompts in one /v1/completions call", minimum=1)
    max_embedding_inputs: int = _key(2048, "most inputs in one /v1/embeddings call", minimum=1)
    max_grammar_bytes: int = _key(256 * 1024, "largest schema, regular expression or grammar, in bytes", minimum=1)
    grammar_timeout_s: float = _key(5.0, "longest that a request waits for its grammar to compile", minimum=0.1)
    grammar_compile_s: float = _key(
        1.0, "most processor time to compile one grammar; above it the grammar is refused", minimum=0.01
    )
    grammar_memory_mib: int = _key(
        256, "most memory to compile one grammar; above it the grammar is refused", minimum=16
    )
    grammar_token_ms: float = _key(
        3.0, "processor time that a grammar may take per token of a request, beyond an allowance of 0.1 s", minimum=0.01
    )
    json_whitespace: str = _key(
        "compact",
        "space between the tokens of JSON output, where a request does not say: compact (at most one after , and :) or "
        "any (up to 12 between all tokens)",
        ("compact", "any"),
    )
    max_text_characters: int = _key(4_000_000, "longest prompt in characters, before it is tokenized", minimum=1)


@dataclass(frozen=True)
class HttpConfig:
    """The HTTP front end."""

    host: str = _key("127.0.0.1", "address to listen on")
    port: int = _key(8000, "port; 0: any free one", minimum=0, maximum=MAX_PORT)
    max_body_bytes: int = _key(8 * 1024 * 1024, "largest request body", minimum=1024)
    request_timeout_s: float = _key(600.0, "longest duration of one request", minimum=0.1)
    keep_alive_s: float = _key(15.0, "interval of SSE keep-alive comments", minimum=1)
    uds: str = _key("", "listen on this unix socket instead of host and port")
    workers: int = _key(
        0,
        "processes that share the listening socket; 0: one for every four cores, at least 1 and at most 4",
        minimum=0,
        maximum=MAX_WORKERS,
    )
    tool_parser: str = _key(
        "auto",
        "format of the model's tool calls; auto: detected from its chat template",
        (
            *("auto", "hermes", "llama3_json", "mistral", "mistral_args", "pythonic", "qwen3_coder", "glm45"),
            *("deepseek_v3", "deepseek_v31", "kimi_k2", "phi4_mini", "granite", "harmony"),
            *("seed_oss", "minimax_m2", "cohere", "gemma4"),
        ),
    )
    reasoning_parser: str = _key(
        "auto",
        "separate reasoning from the answer, by the marks of this format; auto: as the chat template has them",
        ("auto", "think", "mistral", "seed_oss", "granite", "kimi", "harmony", "cohere", "gemma4", "off"),
    )
    rerank: str = _key(
        "auto",
        "how /v1/rerank and /v1/score judge: the model's yes against its no (Qwen3-Reranker), or the cosine of "
        "embeddings; auto: yes_no where the model's name has rerank in it",
        ("auto", "yes_no", "cosine"),
    )
    cors_origins: str = _key("", "web origins that may call this API, comma-separated; *: any; empty: none")
    max_header_bytes: int = _key(64 * 1024, "largest request line plus headers", minimum=1024)
    max_in_flight: int = _key(
        0, "most unfinished requests of all workers, above which requests get 503; 0: no limit", minimum=0
    )
    allow_public: bool = _key(
        False, "allow an address that other machines reach without API keys, for use behind a proxy that checks them"
    )
    allowed_hosts: str = _key(
        "",
        "without API keys: additional host names that requests may name, comma-separated; localhost and this machine's "
        "addresses are always allowed; *.example.com: names below it, *: any",
    )
    trusted_proxies: str = _key(
        "127.0.0.0/8,::1,unix",
        "proxies whose X-Forwarded-Proto says whether a client uses https: addresses or networks, comma-separated, and "
        "unix for those that connect to http.uds; empty: none. A client's address is never read from a header",
    )
    header_timeout_s: float = _key(
        10.0,
        "longest time for a request's headers to arrive, and for a new connection to send its first byte",
        minimum=0.1,
    )
    body_timeout_s: float = _key(60.0, "longest time for a request's body to arrive", minimum=0.1)
    body_progress_timeout_s: float = _key(
        15.0, "close a connection whose body brings less than 1 KiB in this time", minimum=0.1
    )
    idle_timeout_s: float = _key(75.0, "close a connection without a request after this time", minimum=0.1)
    max_connections: int = _key(
        0, "most connections of one worker; 0: from the process's limit of open files", minimum=0
    )
    max_connections_per_address: int = _key(
        0,
        "most connections from one address; 0: half of them, and no limit for this machine's own addresses",
        minimum=0,
    )
    files_folder: str = _key(
        "", "folder for uploaded files and batches; empty: one of the engine's name in ~/.local/state/inferengine"
    )
    max_file_bytes: int = _key(64 * 1024 * 1024, "largest file that may be uploaded for a batch", minimum=1024)
    max_stored_bytes: int = _key(1024**3, "most bytes of files and batches that are kept for one tenant", minimum=1024)
    batch_in_flight: int = _key(
        16, "most requests of batches that run at once; they hold back while other requests wait", minimum=1
    )
    tls_certificate: str = _key("", "PEM file with the certificate chain, for https; empty: http")
    tls_key: str = _key("", "PEM file with the private key; empty: in the file of the certificate")


@dataclass(frozen=True)
class UpConfig:
    """What `inferengine up` starts."""

    engines: int = _key(
        1,
        "engines behind the front ends, each on its own engine.tensor_parallel cards; on a CPU they share its cores; "
        "0: as many as the cards allow",
        minimum=0,
    )


@dataclass(frozen=True)
class WsConfig:
    """The websocket front end and the chat page."""

    host: str = _key("127.0.0.1", "address to listen on")
    port: int = _key(8001, "port; 0: any free one", minimum=0, maximum=MAX_PORT)
    workers: int = _key(1, "processes that share the listening socket", minimum=1, maximum=MAX_WORKERS)
    max_requests: int = _key(64, "most unfinished requests on one socket", minimum=1)
    max_message_bytes: int = _key(4 * 1024 * 1024, "largest frame accepted", minimum=1024)
    send_queue_messages: int = _key(
        256, "largest window of unacknowledged frames that a socket gets (hello)", minimum=1
    )
    origins: str = _key("", "additional web origins that may open a socket, comma-separated; *: any")
    max_sockets: int = _key(4096, "most open sockets of all workers, above which new ones get 503", minimum=1)
    allow_public: bool = _key(
        False, "allow an address that other machines reach without API keys, for use behind a proxy that checks them"
    )
    allowed_hosts: str = _key(
        "",
        "without API keys: additional host names that requests may name, comma-separated; localhost and this machine's "
        "addresses are always allowed; *.example.com: names below it, *: any",
    )
    header_timeout_s: float = _key(
        10.0, "longest time for a socket's handshake, or for another request's headers, to arrive", minimum=0.1
    )
    idle_timeout_s: float = _key(
        75.0, "close a connection that is no socket after this time without a request", minimum=0.1
    )
    max_connections: int = _key(
        0, "most connections of one worker, sockets and others; 0: from the process's limit of open files", minimum=0
    )
    max_connections_per_address: int = _key(
        0,
        "most connections from one address; 0: half of them, and no limit for this machine's own addresses",
        minimum=0,
    )
    tls_certificate: str = _key("", "PEM file with the certificate chain, for wss; empty: ws")
    tls_key: str = _key("", "PEM file with the private key; empty: in the file of the certificate")


@dataclass(frozen=True)
class AuthConfig:
    """API keys."""

    keys_file: str = _key("", "file of API keys for both front ends (inferengine keygen); empty: no keys are asked for")


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and how."""

    level: str = _key("info", "lowest level that is logged", ("debug", "info", "warning", "error"))
    format: str = _key("text", "text for people, json for log collectors", ("text", "json"))
    requests: bool = _key(False, "the engine also logs one line per finished request, without its text")


@dataclass(frozen=True)
class TraceConfig:
    """OpenTelemetry."""

    enabled: bool = _key(
        False, "send OpenTelemetry spans of front ends and engine, as the OTEL_* environment variables say"
    )
    endpoint: str = _key("", "collector's URL for OTLP over HTTP, with /v1/traces; empty: OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True)
class Config:
    """The whole configuration: one attribute for each section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    wire: WireConfig = field(default_factory=WireConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    ws: WsConfig = field(default_factory=WsConfig)
    up: UpConfig = field(default_factory=UpConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    log: LogConfig = field(default_factory=LogConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    def with_values(self, **sections: Mapping[str, Any]) -> Config:
        """Return a copy with some keys changed: `config.with_values(http={"port": 0})`. Checked like any other
        input."""
        flat = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
        return _apply(self, flat, "call")

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Return every key with its value, as printed at start and served by /stats."""
        return dataclasses.asdict(self)


def keys() -> dict[str, dataclasses.Field[Any]]:
    """Return every `section.key` of the configuration with its dataclass field, in the file's order."""
    table: dict[str, dataclasses.Field[Any]] = {}
    for section in dataclasses.fields(Config):
        for item in dataclasses.fields(_section_type(section.name)):
            table[f"{section.name}.{item.name}"] = item
    return table


def load(
    file: str | os.PathLike[str] | None = None,
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Build the configuration. `flags` maps `section.key` to text; `environment` defaults to the process's.

    Raises ConfigError naming the key for unknown keys, wrong types and values out of range.
    """
    config = Config()
    if file is not None:
        config = _apply(config, flatten(read_toml(Path(file))), "file", f" (in {Path(file).name})")
    found = from_environment(variables() if environment is None else environment, keys(), RENAMED)
    config = _apply(config, found, "environment", " (from the environment)")
    return _apply(config, dict(flags or {}), "flag")


def parse_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split `--section.key value` and `--section.key=value` from the rest. A bool flag may stand alone. Raises
    ConfigError for an unknown key or a missing value."""
    known = keys()
    flags: dict[str, str] = {}
    rest: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in name:
            rest.append(argument)
            continue
        name = current_name(name, RENAMED, "--{}")
        if name not in known:
            raise ConfigError(f"--{name}", f"no such key{suggestion(name, known, '--')}")
        if not equals:
            follows = arguments[position] if position < len(arguments) else None
            if known[name].type == "bool" and (follows is None or follows.startswith("--")):
                value = "true"
            elif follows is None:
                raise ConfigError(f"--{name}", "a value must follow")
            else:
                value = follows
                position += 1
        flags[name] = value
    return flags, rest


def engine_address(config: Config) -> str:
    """Return the ROUTER address that clients connect to. Raises ConfigError for a wire.socket that is none."""
    if config.wire.socket:
        check_address("wire.socket", config.wire.socket)
    return config.wire.socket or f"ipc://{runtime_directory() / (config.engine.name + '.sock')}"


def engine_addresses(config: Config) -> list[str]:
    """Return the ROUTER addresses of all engines that a front end spreads its requests over."""
    return [address.strip() for address in config.wire.engines.split(",") if address.strip()] or [
        engine_address(config)
    ]


def load_balancing(config: Config) -> str:
    """Return the policy by which a front end spreads its requests: wire.load_balancing, `auto` resolved."""
    return "power_of_two" if config.wire.load_balancing == "auto" else config.wire.load_balancing


def status_address(config: Config) -> str:
    """Return the PUB address, always derived from the engine's: `<engine address>.status`, or the next TCP port."""
    address = engine_address(config)
    if address.startswith("tcp://"):
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + 1}"
    return f"{address}.status"


def child_environment(config: Config) -> dict[str, str]:
    """Return the environment for a child process that must run with exactly this configuration."""
    inherited = {name: value for name, value in variables().items() if not name.startswith(ENVIRONMENT_PREFIX)}
    for section, values in config.resolved().items():
        for key, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            inherited[f"{ENVIRONMENT_PREFIX}{section}_{key}".upper()] = text
    return inherited


def to_toml(config: Config) -> str:
    """Return the resolved configuration as a TOML file with each key's help and what it takes as a comment."""
    lines: list[str] = []
    table = keys()
    for section, values in config.resolved().items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            text = (
                json.dumps(value, ensure_ascii=False)  # a TOML basic string escapes as JSON does
                if isinstance(value, str)
                else str(value).lower()
                if isinstance(value, bool)
                else str(value)
            )
            item = table[f"{section}.{key}"]
            values_taken = f" ({taken})" if (taken := allowed(item)) else ""
            lines.append(f"{key} = {text}  # {item.metadata['help']}{values_taken}")
        lines.append("")
    return "\n".join(lines)


def describe(config: Config) -> dict[str, dict[str, Any]]:
    """Return every `section.key` with its value, default, type, what it takes and its meaning, for programs."""
    values = config.resolved()
    return {
        name: {
            "value": values[name.partition(".")[0]][item.name],
            "default": item.default,
            "type": str(item.type),
            "choices": list(item.metadata["choices"]) or None,
            "minimum": item.metadata["minimum"],
            "maximum": item.metadata["maximum"],
            "help": item.metadata["help"],
        }
        for name, item in keys().items()
    }


def _apply(config: Config, values: Mapping[str, Any], source: str, place: str = "") -> Config:
    """Return the configuration with these values. `place` is added to error messages: where the value comes from."""
    table = keys()
    changed: dict[str, dict[str, Any]] = {}
    for given, raw in values.items():
        name = current_name(given, RENAMED, "{}" + place)
        if name not in table:
            raise ConfigError(name, f"no such key in the {source}{suggestion(name, table)}")
        if name != given and name in values:
            raise ConfigError(given, f"is the old name of {name}, which is given too{place}")
        section, _, key = name.partition(".")
        try:
            changed.setdefault(section, {})[key] = convert(name, table[name], raw)
        except ConfigError as error:
            raise ConfigError(name, error.message + place) from None
    sections = {name: dataclasses.replace(getattr(config, name), **items) for name, items in changed.items()}
    return dataclasses.replace(config, **sections)


@functools.cache  # evaluating the annotations takes a millisecond, for each section of each configuration
def _section_type(name: str) -> type[Any]:
    return typing.cast("type[Any]", typing.get_type_hints(Config)[name])
