/** Types of client.js, the browser client of the InferEngine websocket. Protocol: docs/websocket.md. */

/** A message of a conversation, as in OpenAI's API. */
export interface Message {
  role: "system" | "user" | "assistant" | "tool" | string;
  /** Null only beside `tool_calls`. */
  content: string | { type: "text"; text: string }[] | null;
  /** Of an assistant that called tools. */
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  /** Of a tool's result: the call that it answers. */
  tool_call_id?: string;
}

/** A function that the model may call; `parameters` is the JSON schema of an object. */
export interface Tool {
  type: "function";
  function: { name: string; description?: string; parameters?: object };
}

/** A call, whole; `arguments` are JSON text. */
export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** What a delta adds to the call number `index`: its first entry has `id` and the name, each more of the arguments. */
export interface ToolCallDelta {
  index: number;
  id?: string;
  type?: "function";
  function: { name?: string; arguments: string };
}

/** As in docs/parameters.md. What is left out has the engine's default. */
export interface SamplingParams {
  /** most tokens of the output, within the model's length; whole number in [1, 2^63 - 1] */
  max_tokens?: number;
  /** before so many tokens nothing ends the output; at most max_tokens; whole number in [0, 2^63 - 1] */
  min_tokens?: number;
  /** logits are divided by it; at or below 1e-5 the likeliest token is taken; number in [0, 2] */
  temperature?: number;
  /** draw from the smallest set whose probability reaches it (nucleus); number in (0, 1] */
  top_p?: number;
  /** draw from so many likeliest tokens; 0 or -1: off; whole number in [-1, 2147483647] */
  top_k?: number;
  /** leave out tokens less likely than this share of the likeliest; number in [0, 1] */
  min_p?: number;
  /** logits of tokens in prompt or output are divided by it if positive, else multiplied (Keskar et al. 2019); 1 changes nothing; number in [0.01, 100] */
  repetition_penalty?: number;
  /** subtracted once from the logits of tokens that the output has (OpenAI); number in [-2, 2] */
  presence_penalty?: number;
  /** subtracted from a token's logit for each time the output has it (OpenAI); number in [-2, 2] */
  frequency_penalty?: number;
  /** equal seeds give equal draws, whatever else runs in the batch; whole number in [-(2^63 - 1), 2^63 - 1] */
  seed?: number;
  /** choices; above 1 needs a temperature above 0; whole number in [1, 16] */
  n?: number;
  /** texts that end the output; not even the beginning of one is shown; text of at most 256 or list of text of at most 256, at most 16 */
  stop?: string | string[];
  /** show the text or token that ended the output; true, false */
  include_stop_str_in_output?: boolean;
  /** leave special tokens out of the text; true, false */
  skip_special_tokens?: boolean;
  /** token ids that end the output, besides the model's own; list of whole number in [0, ...), at most 1024 */
  stop_token_ids?: number[];
  /** go on past the model's own end; true, false */
  ignore_eos?: boolean;
  /** added to the logits of these token ids, before the temperature; object of number in [-100, 100] */
  logit_bias?: Record<string, number>;
  /** only these token ids may come; list of whole number in [0, ...), at most 524288 */
  allowed_token_ids?: number[];
  /** token sequences that must not come in the output; list of list of whole number in [0, ...), at most 32, at most 256 */
  bad_words_ids?: number[][];
  /** alternatives per token, from the model's own logits; 0: the token's own alone; whole number in [0, 20] */
  logprobs?: number;
}

export interface GenerateOptions {
  /** Exactly one of these three. */
  prompt?: string;
  messages?: Message[];
  promptIds?: number[];
  params?: SamplingParams;
  /** 32 hexadecimal digits; sending the same one again attaches instead of running twice. */
  requestId?: string;
  model?: string;
  /** Lower is sooner. */
  priority?: number;
  cacheSalt?: string;
  deadlineSeconds?: number;
  /** Run on while the connection is away (default: true). */
  detached?: boolean;
  returnTokenIds?: boolean;
  label?: string;
  /** W3C's, of the span that this request is a part of; for the service's OpenTelemetry spans. */
  traceparent?: string;
  /** What the answer must match, as in OpenAI's API. */
  responseFormat?: { type: "text" | "json_object" } | { type: "json_schema"; json_schema: { name?: string; schema: object } };
  /** The same in vLLM's words: exactly one of these. */
  structuredOutputs?: { json?: object | string; json_object?: boolean; regex?: string; choice?: string[]; grammar?: string };
  /** The following only with `messages`, as in /v1/chat/completions. */
  tools?: Tool[];
  toolChoice?: "none" | "auto" | "required" | { type: "function"; function: { name: string } };
  /** More than one call in an answer (default: true). */
  parallelToolCalls?: boolean;
  /** Tell what the model thought (default: true). */
  includeReasoning?: boolean;
  reasoningEffort?: string;
  chatTemplateKwargs?: Record<string, unknown>;
  documents?: object[];
  addGenerationPrompt?: boolean;
  continueFinalMessage?: boolean;
}

export interface ResumeOptions {
  requestId: string;
  /** Tokens already received, one count per choice. */
  cursors?: number[];
  /** `contextIds` of the generation. */
  contextIds?: number[];
  /** The parameters of the request: its stop strings and special tokens shape the text. */
  params?: SamplingParams;
  returnTokenIds?: boolean;
}

export interface Delta {
  choice: number;
  text: string;
  /** Tokens of this choice so far: what `resume` wants. */
  cursor: number;
  /** What the model wrote for itself before it answered. */
  reasoning?: string;
  toolCalls?: ToolCallDelta[];
  tokenIds?: number[];
  logprobs?: unknown[];
}

export interface Usage {
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  /** Guesses ahead that were right, and wrong; absent where the engine did not guess. */
  accepted_prediction_tokens?: number;
  rejected_prediction_tokens?: number;
}

export interface Timings {
  queued_ms: number;
  first_token_ms: number;
  total_ms: number;
}

export interface Choice {
  text: string;
  /** Empty where the model thought nothing, or it was not to be told. */
  reasoning: string;
  /** Their arguments are whole JSON unless finishReason says that the answer was cut. */
  toolCalls: ToolCall[];
  /** tool_calls: the answer ended by itself and waits for the results of its calls. */
  finishReason: "stop" | "tool_calls" | "length" | "cancelled";
  /** The stop string or stop token id that ended it, or null. */
  stop?: string | number | null;
  usage: Usage;
  /** Null when a stop string ended the choice before the engine told its figures. */
  timings: Timings | null;
}

export interface Result {
  requestId: string;
  choices: Choice[];
}

export interface EngineState {
  state: "STARTING" | "READY" | "DRAINING" | "STOPPING" | "UNAVAILABLE";
  /** Phase and share, while STARTING. */
  progress: [string, number] | null;
  /** Changes with every start of the engine. */
  epoch: string | null;
  name: string | null;
}

export interface ModelInfo {
  name: string;
  fingerprint: string;
  vocab_size: number;
  max_model_len: number;
  /** Whether it has a chat template; null until its files were fetched. */
  chat: boolean | null;
  /** Its own sampling parameters, used where a request says nothing; null until its files were fetched. */
  defaults: Record<string, number> | null;
}

export interface StateFrame {
  type: "hello" | "state";
  engine: EngineState;
  model: ModelInfo | null;
  limits: Record<string, number>;
}

/** Every figure is null where the engine does not tell it. */
export interface Stats {
  type: "stats";
  state: EngineState["state"];
  running: number | null;
  waiting: number | null;
  tokens_per_s: number | null;
  prompt_tokens_per_s: number | null;
  /** Shares from 0 to 1. */
  kv_usage: number | null;
  prefix_hit_rate: number | null;
  preemptions: number | null;
  completed: number | null;
  uptime_s: number | null;
}

export class InferEngineError extends Error {
  code: string;
  field: string | null;
  retryable: boolean;
  retryAfterSeconds: number | null;
  remedy: string;
}

export class Generation implements AsyncIterable<Delta> {
  readonly id: string;
  readonly requestId: string;
  /** Kept up to date: store them to resume from another page. */
  readonly cursors: number[];
  readonly contextIds: number[] | undefined;
  readonly accepted: { request_id: string; prompt_tokens: number; n: number; attached: boolean } | null;
  /** Rejects with InferEngineError. */
  readonly result: Promise<Result>;
  cancel(): void;
  [Symbol.asyncIterator](): AsyncIterator<Delta>;
}

export class InferEngineSocket extends EventTarget {
  constructor(url: string, options?: { window?: number; WebSocket?: typeof WebSocket; apiKey?: string });
  /** Show this key from now on, "" for none. The connection is made anew. */
  useKey(apiKey: string): void;
  readonly url: string;
  readonly hello: StateFrame | null;
  readonly status: "connecting" | "open" | "closed";
  generate(options: GenerateOptions): Generation;
  resume(options: ResumeOptions): Generation;
  subscribeStats(intervalSeconds?: number): void;
  /** Connect now instead of at the next attempt. */
  retryNow(): void;
  close(): void;
}

export function newRequestId(): string;

/** Put the entries of a delta into the calls so far. */
export function addToolCalls(calls: ToolCall[], entries: ToolCallDelta[]): void;
