# One image for every part: `docker run IMAGE engine`, `... http`, `... ws`, or `... up` for all of them.
# CPU:  docker build -t inferengine .
# GPU:  docker build -t inferengine:gpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# Another base with pip and Python 3.11 or newer on Debian: --build-arg BASE=...
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# gcc: Triton compiles its launcher on the first start of a GPU engine.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --create-home --home-dir /var/lib/inferengine inferengine \
    && install -d -o inferengine -g inferengine -m 0750 /run/inferengine

WORKDIR /opt/inferengine
COPY constraints.txt pyproject.toml README.md LICENSE ./
# What it depends on first, with no code yet: a change of the code alone does not fetch torch again.
RUN mkdir inferengine frontends \
    && pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" --constraint constraints.txt ".[all]" \
    && rm -rf build
COPY inferengine inferengine
COPY frontends frontends
RUN pip install --no-cache-dir --no-deps --force-reinstall . && rm -rf build

USER inferengine
WORKDIR /var/lib/inferengine
# What benchmarks name in their results: --build-arg REVISION="$(git describe --always --dirty --abbrev=12)"
ARG REVISION=""
ENV PYTHONUNBUFFERED=1 \
    INFERENGINE_REVISION=$REVISION \
    HF_HOME=/var/lib/inferengine/huggingface \
    INFERENGINE_WIRE_SOCKET=ipc:///run/inferengine/engine.sock \
    INFERENGINE_HTTP_HOST=0.0.0.0 \
    INFERENGINE_WS_HOST=0.0.0.0
VOLUME ["/run/inferengine", "/var/lib/inferengine"]
EXPOSE 8000 8001
# Longer than engine.drain_timeout_s: stop with `docker stop -t 45`.
STOPSIGNAL SIGTERM
# Its loop turned lately, loading included. A container of one front end asks the engine behind the shared socket.
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s CMD ["inferengine", "ping"]
ENTRYPOINT ["inferengine"]
# Without a command no key is asked for, and the port that `docker run -p` publishes decides who can reach it: publish on
# 127.0.0.1. With one, `docker run IMAGE up MODEL`, it wants INFERENGINE_AUTH_KEYS_FILE, or the same two flags.
CMD ["up", "--http.allow_public", "--ws.allow_public"]
