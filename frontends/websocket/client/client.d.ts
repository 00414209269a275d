/** Types of client.js, the browser client of the InferEngine websocket. Protocol: docs/websocket.md.
 *
 * scripts/parameter_reference makes SamplingParams, GenerateOptions and ResumeOptions. */

/** A message of a conversation, as in OpenAI's API. */
export interface Message {
  role: "system" | "user" | "assistant" | "tool" | string;
  /** Null only where there are `tool_calls`. */
  content: string | { type: "text"; text: string }[] | null;
  /** The calls of an assistant message. */
  tool_calls?: { id: string; type: "function"; function: { name: string; arguments: string } }[];
  /** In a tool's result: the id of its call. */
  tool_call_id?: string;
}

/** A function that the model may call; `parameters` is the JSON schema of an object. */
export interface Tool {
  type: "function";
  function: { name: string; description?: string; parameters?: object };
}

/** A complete call; `arguments` are JSON text. */
export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** What a delta adds to call number `index`. The first entry of a call has its `id` and name; each entry continues the
 * arguments. */
export interface ToolCallDelta {
  index: number;
  id?: string;
  type?: "function";
  function: { name?: string; arguments: string };
}

/** As in docs/parameters.md. A parameter that is left out has the model's default, else the engine's. */
export interface SamplingParams {
  /** most tokens of the output, within the model's length; whole number in [1, 2^63 - 1] */
  max_tokens?: number;
  /** before so many tokens nothing but the end of a grammar ends the output; at most max_tokens; whole number in [0, 2^63 - 1] */
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
  /** show the text or token that ended the output */
  include_stop_str_in_output?: boolean;
  /** leave special tokens out of the text */
  skip_special_tokens?: boolean;
  /** token ids that end the output, besides the model's own; list of whole number in [0, ...), at most 1024 */
  stop_token_ids?: number[];
  /** go on past the model's own end */
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

/** Exactly one of `messages`, `prompt` and `promptIds`. What stands before `prompt`, and `includeReasoning`, is for
 * `messages` only, as in /v1/chat/completions. */
export interface GenerateOptions {
  /** the conversation, through the model's chat template */
  messages?: Message[];
  /** functions, and custom tools, which take a text, that may be called */
  tools?: Tool[];
  /** whether, or which, to call */
  toolChoice?: "none" | "auto" | "required" | { type: "function"; function: { name: string } };
  /** more than one call in an answer; default: true */
  parallelToolCalls?: boolean;
  /** end the prompt where the assistant begins */
  addGenerationPrompt?: boolean;
  /** end the prompt inside the last message */
  continueFinalMessage?: boolean;
  /** variables for the chat template */
  chatTemplateKwargs?: Record<string, unknown>;
  /** given to the chat template */
  documents?: object[];
  /** given to the chat template */
  reasoningEffort?: string;
  /** a text to continue */
  prompt?: string;
  /** token ids to continue; list of whole number in [0, ...) */
  promptIds?: number[];
  /** sampling parameters; what is left out has the model's default */
  params?: SamplingParams;
  /** chosen at random; sending the same one again reads the same request, which runs once; text that matches ^[0-9a-f]{32}$; default: a new one */
  requestId?: string;
  /** the model or adapter; absent: the served model */
  model?: string;
  /** lower is sooner; whole number in [-2147483648, 2147483647] */
  priority?: number;
  /** requests share cached prefixes only with those of the same salt; text of at most 256 */
  cacheSalt?: string;
  /** requests of one session go to one engine where there are several; text of at most 256 */
  session?: string;
  /** seconds after which the engine ends the request; number in [0.001, 86400] */
  deadlineSeconds?: number;
  /** run on while no socket reads the request; default: true */
  detached?: boolean;
  /** resume when the engine is lost; false: end with engine_restarted; default: true */
  resubmit?: boolean;
  /** token ids beside the text */
  returnTokenIds?: boolean;
  /** name of the request in logs and traces; text of at most 256 */
  label?: string;
  /** W3C traceparent of the span that this request is a part of; text of at most 256 */
  traceparent?: string;
  /** send the model's reasoning; default: true */
  includeReasoning?: boolean;
  /** what the answer must match, in OpenAI's form */
  responseFormat?: { type: "text" | "json_object" } | { type: "json_schema"; json_schema: { name?: string; schema: object } };
  /** what the answer must match, in vLLM's form: exactly one of these */
  structuredOutputs?: { json?: object | string; json_object?: boolean; regex?: string; choice?: string[]; grammar?: string };
  /** space in JSON: at most one after , and :, or any; `any`, `compact` */
  jsonWhitespace?: "any" | "compact";
}

export interface ResumeOptions {
  /** that of the accepted frame; text that matches ^[0-9a-f]{32}$ */
  requestId: string;
  /** tokens already received, one count for each choice; list of whole number in [0, 4294967295], at most 4096 */
  cursors?: number[];
  /** those of the accepted frame; list of whole number in [0, 4294967295], at most 16 */
  contextIds?: number[];
  /** those of the request: stop strings and special tokens change the text */
  params?: SamplingParams;
  /** token ids beside the text */
  returnTokenIds?: boolean;
}

export interface Delta {
  choice: number;
  text: string;
  /** Tokens of this choice so far, for `resume`. */
  cursor: number;
  /** New text of the reasoning before the answer. */
  reasoning?: string;
  toolCalls?: ToolCallDelta[];
  tokenIds?: number[];
  /** One for each new token, where `params.logprobs` asks for them. */
  logprobs?: TokenLogprobs[];
}

export interface TokenLogprobs {
  /** The token's text; part of a character is U+FFFD. */
  token: string;
  logprob: number;
  /** 1 is the likeliest token. */
  rank: number;
  /** Token ids and log-probabilities of the likeliest tokens. */
  top: [number, number][];
  /** The texts of `top`. */
  top_tokens: string[];
}

export interface Usage {
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  /** Draft tokens that were accepted, and rejected; absent without speculative decoding. */
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
  /** Empty where the model did not reason, or `includeReasoning` is false. */
  reasoning: string;
  /** Their arguments are complete JSON unless finishReason is "length" or "cancelled". */
  toolCalls: ToolCall[];
  /** "tool_calls": the model called tools and needs their results. */
  finishReason: "stop" | "tool_calls" | "length" | "cancelled";
  /** The stop string or stop token id that ended it, or null. */
  stop?: string | number | null;
  usage: Usage;
  /** Null where a stop string ended the choice and the engine did not report them in time. */
  timings: Timings | null;
}

export interface Result {
  requestId: string;
  choices: Choice[];
}

export interface EngineState {
  state: "STARTING" | "READY" | "DRAINING" | "STOPPING" | "UNAVAILABLE";
  /** Phase and fraction done, while STARTING. */
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
  /** LoRA adapters that a request may name as its model. */
  adapters: string[];
  /** Whether it has a chat template; null until its files were fetched. */
  chat: boolean | null;
  /** Its own sampling parameters, used for those that a request leaves out; null until its files were fetched. */
  defaults: Record<string, number> | null;
}

export interface StateFrame {
  type: "hello" | "state";
  engine: EngineState;
  model: ModelInfo | null;
  limits: Record<string, number>;
}

/** A figure is null where the engine does not report it. */
export interface Stats {
  type: "stats";
  state: EngineState["state"];
  running: number | null;
  waiting: number | null;
  tokens_per_s: number | null;
  prompt_tokens_per_s: number | null;
  /** Fractions from 0 to 1. */
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
  /** Kept up to date. Store them to resume from another page. */
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
  /** Use this API key from now on, "" for none. Reconnects. */
  useKey(apiKey: string): void;
  readonly url: string;
  readonly hello: StateFrame | null;
  readonly status: "connecting" | "open" | "closed";
  generate(options: GenerateOptions): Generation;
  resume(options: ResumeOptions): Generation;
  subscribeStats(intervalSeconds?: number): void;
  /** Reconnect now, without waiting for the next attempt. */
  retryNow(): void;
  /** Close for good. Open generations end with InferEngineError; detached requests run on at the server. */
  close(): void;
}

export function newRequestId(): string;

/** Merge the entries of a delta into a list of calls. */
export function addToolCalls(calls: ToolCall[], entries: ToolCallDelta[]): void;
