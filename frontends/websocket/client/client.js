// @ts-check
/**
 * Client of the InferEngine websocket for browsers: many generations over one socket, in one module without a build
 * step. node.js is the same for Node.js; package.json makes an npm package of both.
 * It reconnects automatically, resumes running generations without losing or repeating a character, and acknowledges
 * handled frames so that they do not pile up in a slow page. Types: client.d.ts. Protocol: docs/websocket.md.
 *
 *   const engine = new InferEngineSocket("ws://127.0.0.1:8001/v1/ws");
 *   const answer = engine.generate({ messages: [{ role: "user", content: "Who are you?" }] });
 *   for await (const delta of answer) console.log(delta.text);
 *   console.log((await answer.result).choices[0].usage);
 */

const SUBPROTOCOL = "inferengine.v1.json";
const KEY_SUBPROTOCOL = "inferengine.key."; // a browser cannot send headers with a websocket
const WINDOW = 64;
const FIRST_RETRY_MS = 250;
const LONGEST_RETRY_MS = 5000;
const SILENCE_MS = 20_000; // without a frame for so long a ping is sent
const PONG_WAIT_MS = 8_000;
/** Options of `generate` that have another key in the frame. */
const FRAME_KEYS = {
  promptIds: "prompt_ids",
  cacheSalt: "cache_salt",
  deadlineSeconds: "deadline_s",
  returnTokenIds: "return_token_ids",
  responseFormat: "response_format",
  structuredOutputs: "structured_outputs",
  jsonWhitespace: "json_whitespace",
  toolChoice: "tool_choice",
  parallelToolCalls: "parallel_tool_calls",
  includeReasoning: "include_reasoning",
  reasoningEffort: "reasoning_effort",
  chatTemplateKwargs: "chat_template_kwargs",
  addGenerationPrompt: "add_generation_prompt",
  continueFinalMessage: "continue_final_message",
};
const TOO_LARGE = 1009; // RFC 6455: the message is larger than the server accepts
const TOO_LARGE_ERROR = {
  code: "request_too_large",
  message: "The message is larger than the server takes.",
  remedy: "Send a shorter one, or begin a new conversation.",
};
const LOST_ERROR = { code: "cancelled", message: "The connection was lost.", remedy: "Ask again." };
const CLOSED_ERROR = {
  code: "engine_unavailable",
  message: "The client was closed.",
  remedy: "Use another client. Its resume() reads a detached request on, which still runs.",
};

/** An error of the service. `code` is stable, `field` names what to change. */
export class InferEngineError extends Error {
  constructor({ code, message, field = null, retryable = false, retry_after_s = null, remedy = "" }) {
    super(message);
    this.name = "InferEngineError";
    this.code = code;
    this.field = field;
    this.retryable = retryable;
    this.retryAfterSeconds = retry_after_s;
    this.remedy = remedy;
  }
}

/** 128 random bits as 32 hexadecimal digits. A request with this id runs once, however often it is sent. */
export function newRequestId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Merge streamed `tool_calls` entries into a list of calls `{id, name, arguments}`, arguments as JSON text. */
export function addToolCalls(calls, entries) {
  for (const { index, id, function: { name, arguments: text } } of entries) {
    if (name !== undefined) calls[index] = { id, name, arguments: text };
    else calls[index].arguments += text;
  }
}

/** One request: iterate it for its deltas, await `result` for the complete answer, call `cancel()` to stop it. */
export class Generation {
  constructor(socket, id, frame, cursors) {
    this.id = id;
    this.requestId = frame.request_id;
    this.accepted = null; // the accepted frame, when it has arrived
    this.contextIds = frame.context_ids; // needed to resume, beside the cursors
    this.cursors = cursors;
    this.frame = frame;
    this._socket = socket;
    this._queue = [];
    this._wake = null;
    this._over = false;
    this._cancelled = false;
    this._error = null;
    this._choices = [];
    this.result = new Promise((resolve, reject) => {
      this._resolve = resolve;
      this._reject = reject;
    });
    this.result.catch(() => {}); // an iterating reader gets the error there
  }

  /** Stop. The result then has finishReason "cancelled" and the text so far. */
  cancel() {
    if (this._over) return;
    this._cancelled = true; // without a connection: sent again after the reconnect
    this._socket._send({ type: "cancel", id: this.id });
  }

  async *[Symbol.asyncIterator]() {
    while (true) {
      while (this._queue.length) yield this._queue.shift();
      if (this._error) throw this._error;
      if (this._over) return;
      await new Promise((wake) => (this._wake = wake));
    }
  }

  _choice(index) {
    return (this._choices[index] ??= { text: "", reasoning: "", toolCalls: [], finishReason: null, usage: null, timings: null });
  }

  /** Handle new text. After a resume the end of an ended choice arrives again; it is ignored. */
  _delta(frame) {
    const choice = this._choice(frame.choice);
    if (choice.finishReason) return;
    this.cursors[frame.choice] = frame.cursor;
    const delta = { choice: frame.choice, text: frame.text, cursor: frame.cursor };
    choice.text += frame.text;
    if (frame.reasoning_content) choice.reasoning += delta.reasoning = frame.reasoning_content;
    if (frame.tool_calls) addToolCalls(choice.toolCalls, (delta.toolCalls = frame.tool_calls));
    if (frame.token_ids) delta.tokenIds = frame.token_ids;
    if (frame.logprobs) delta.logprobs = frame.logprobs;
    if (delta.text || delta.reasoning || delta.toolCalls || delta.tokenIds?.length || delta.logprobs?.length) this._queue.push(delta);
    this._notify();
  }

  _done(frame) {
    this._delta(frame); // it carries the last text
    const choice = this._choice(frame.choice);
    choice.finishReason = frame.finish_reason;
    choice.stop = frame.stop;
    choice.usage = frame.usage;
    choice.timings = frame.timings;
    const wanted = this.accepted?.n ?? this.cursors.length;
    for (let index = 0; index < wanted; index++) if (!this._choices[index]?.finishReason) return false;
    this._over = true;
    this._resolve({ requestId: this.requestId, choices: this._choices });
    this._notify();
    return true;
  }

  _fail(error) {
    if (this._over) return;
    this._over = true;
    this._error = error;
    this._reject(error);
    this._notify();
  }

  _notify() {
    this._wake?.();
    this._wake = null;
  }
}

/**
 * The connection. Events: `status` (detail: "connecting" | "open" | "closed"), `hello` and `state` (detail: the
 * frame), `stats` (detail: the figures), `problem` (detail: InferEngineError that belongs to no request).
 */
export class InferEngineSocket extends EventTarget {
  constructor(url, { window = WINDOW, WebSocket = globalThis.WebSocket, apiKey = "" } = {}) {
    super();
    this.url = url;
    this.hello = null; // the last hello frame: model, limits, engine
    this.status = "connecting";
    this._window = window;
    this._apiKey = apiKey;
    this._WebSocket = WebSocket;
    this._socket = null;
    this._generations = new Map();
    this._statsInterval = null;
    this._nextId = 1;
    this._retries = 0;
    this._numHandled = 0;
    this._numAcknowledged = 0;
    this._timer = null;
    this._silenceTimer = null;
    this._closed = false;
    globalThis.addEventListener?.("online", () => this.retryNow());
    this._connect();
  }

  /** Start a request. `detached` (the default here): it runs on while the connection is broken. */
  generate({ requestId = newRequestId(), detached = true, params = {}, ...rest }) {
    const frame = { type: "generate", request_id: requestId, detached, params };
    for (const [name, value] of Object.entries(rest)) if (value !== undefined) frame[FRAME_KEYS[name] ?? name] = value;
    return this._start(frame, new Array(params.n ?? 1).fill(0));
  }

  /** Read an earlier request of this page or another on from `cursors`. */
  resume({ requestId, cursors = [0], contextIds = [], params = {}, returnTokenIds = false }) {
    const frame = { type: "resume", request_id: requestId, context_ids: contextIds, detached: true, params,
      return_token_ids: returnTokenIds };
    return this._start(frame, [...cursors]);
  }

  /** Request the engine's figures at this interval, as `stats` events. 0 ends it. */
  subscribeStats(intervalSeconds = 1) {
    this._statsInterval = intervalSeconds || null;
    this._send(this._statsFrame());
  }

  /** Use this API key from now on, "" for none. Reconnects. */
  useKey(apiKey) {
    if (apiKey === this._apiKey) return;
    this._apiKey = apiKey;
    if (this._socket) this._socket.close(1000);
    else this.retryNow();
  }

  /** Close the connection for good. Every open generation fails here; detached requests run on at the server. */
  close() {
    this._closed = true;
    clearTimeout(this._timer);
    clearTimeout(this._silenceTimer);
    this._socket?.close(1000);
    for (const generation of this._generations.values()) generation._fail(new InferEngineError(CLOSED_ERROR));
    this._generations.clear();
  }

  _start(frame, cursors) {
    const id = `r${this._nextId++}`;
    const generation = new Generation(this, id, frame, cursors);
    if (this._closed) {
      generation._fail(new InferEngineError(CLOSED_ERROR));
      return generation;
    }
    this._generations.set(id, generation);
    this._sendGeneration(generation);
    return generation;
  }

  /** Send a request that was not accepted yet again as it was (its id makes that safe), or resume it. */
  _sendGeneration(generation) {
    const { id, frame, cursors } = generation;
    if (!generation.accepted && frame.type === "generate") {
      this._send({ ...frame, id });
      return;
    }
    const { request_id, params, detached, return_token_ids } = frame;
    const context_ids = generation.contextIds ?? [];
    this._send({ type: "resume", id, request_id, cursors, context_ids, params, detached, return_token_ids });
  }

  _connect() {
    this._setStatus("connecting");
    const protocols = this._apiKey ? [SUBPROTOCOL, KEY_SUBPROTOCOL + this._apiKey] : [SUBPROTOCOL];
    const socket = new this._WebSocket(this.url, protocols);
    this._socket = socket;
    socket.onopen = () => this._opened();
    socket.onerror = () => {}; // `onclose` follows; Node's `ws` ends the program for an error that nobody handles
    socket.onmessage = (event) => this._socket === socket && this._received(event.data);
    socket.onclose = (event) => this._socket === socket && this._lost(event.code);
  }

  _opened() {
    this._retries = 0;
    this._numHandled = this._numAcknowledged = 0;
    this._setStatus("open");
    this._send({ type: "hello", window: this._window });
    if (this._statsInterval) this._send(this._statsFrame());
    for (const generation of this._generations.values()) {
      this._sendGeneration(generation);
      if (generation._cancelled) this._send({ type: "cancel", id: generation.id });
    }
    this._watchSilence();
  }

  _lost(code) {
    clearTimeout(this._silenceTimer);
    this._socket = null;
    this._setStatus("closed");
    for (const [id, generation] of this._generations) {
      const tooLarge = code === TOO_LARGE && !generation.accepted; // sending it again would fail the same way
      if (!tooLarge && (generation.frame.detached || !generation.accepted)) continue;
      this._generations.delete(id);
      generation._fail(new InferEngineError(tooLarge ? TOO_LARGE_ERROR : LOST_ERROR));
    }
    if (this._closed) return;
    const longest = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** this._retries++);
    this._timer = setTimeout(() => this._connect(), longest * (0.5 + Math.random() / 2));
  }

  /** Reconnect now, without waiting for the next attempt. */
  retryNow() {
    if (this._socket || this._closed) return;
    clearTimeout(this._timer);
    this._connect();
  }

  /** Detect a dead connection: after SILENCE_MS without a frame send a ping, without an answer reconnect. */
  _watchSilence() {
    clearTimeout(this._silenceTimer);
    this._silenceTimer = setTimeout(() => {
      this._send({ type: "ping", nonce: "life" });
      this._silenceTimer = setTimeout(() => {
        const socket = this._socket;
        this._lost();
        socket?.close();
      }, PONG_WAIT_MS);
    }, SILENCE_MS);
  }

  _received(data) {
    this._watchSilence();
    const frame = JSON.parse(data);
    const generation = frame.id == null ? null : this._generations.get(frame.id);
    switch (frame.type) {
      case "hello":
        this.hello = frame;
        this._emit("hello", frame);
        break;
      case "state":
        if (this.hello) Object.assign(this.hello, { engine: frame.engine, model: frame.model, limits: frame.limits });
        this._emit("state", frame);
        break;
      case "stats":
        this._emit("stats", frame);
        break;
      case "accepted":
        if (generation) Object.assign(generation, { accepted: frame, contextIds: frame.context_ids });
        break;
      case "window":
        this._window = frame.window || this._window; // the server may grant less than requested
        break;
      case "delta":
        generation?._delta(frame);
        this._acknowledge();
        break;
      case "done":
        if (generation?._done(frame)) this._generations.delete(frame.id);
        this._acknowledge();
        break;
      case "error": {
        const error = new InferEngineError(frame.error);
        if (!generation) this._emit("problem", error);
        this._generations.delete(frame.id);
        generation?._fail(error);
        break;
      }
    }
  }

  _acknowledge() {
    this._numHandled++;
    if (this._numHandled - this._numAcknowledged < this._window / 2) return;
    this._numAcknowledged = this._numHandled;
    this._send({ type: "ack", frames: this._numHandled });
  }

  _statsFrame() {
    const on = this._statsInterval !== null;
    return { type: "stats", subscribe: on, ...(on && { interval_s: this._statsInterval }) };
  }

  _send(frame) {
    if (this._socket?.readyState === 1) this._socket.send(JSON.stringify(frame));
  }

  _setStatus(status) {
    this.status = status;
    this._emit("status", status);
  }

  _emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
