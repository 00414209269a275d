// @ts-check
/** The answers that are being written: starts, follows, resumes and stops them. Touches no element. */

import { apiMessages } from "./answer_format.js";
import { InferEngineError, addToolCalls } from "./client.js";
import { addTokens } from "./token_view.js";
import { answerOptions, isJsonFormat } from "./settings/chat_settings.js";
import { samplingParams } from "./settings/sampling_params.js";

/** @typedef {import("./conversations/conversation_store.js").Conversation} Conversation */
/** @typedef {import("./conversations/thread.js").Message} Message */

/** Answers by conversation. They continue when another conversation is opened. */
export class Answers {
  /** `events`: changed(conversation), written(conversation, message), ended(conversation, message). */
  constructor(engine, store, settings, events) {
    this._engine = engine;
    this._store = store;
    this._settings = settings;
    this._events = events;
    /** @type {Map<string, { generation: any, message: Message }>} */
    this._running = new Map();
  }

  /** The message that is being written in a conversation, or undefined. */
  runningIn(conversation) {
    return conversation ? this._running.get(conversation.id)?.message : undefined;
  }

  /** Stop the answer of a conversation. Its text so far is kept. */
  stop(conversation) {
    if (conversation) this._running.get(conversation.id)?.generation.cancel();
  }

  /** Answer the message `parent` with a new version of the answer. `again`: a failed answer whose record is used again. */
  start(conversation, parent, again = null) {
    this.stop(conversation);
    const path = this._store.thread(conversation).path(parent);
    const request = this._prepare(conversation, path, path.at(-1)?.role === "tool");
    const fields = { role: "assistant", content: "", ...(request.isJson && { json: true }), ...(request.failure && { failure: request.failure }) };
    this._send(conversation, parent, fields, request, again);
  }

  /** Continue an answer that ended too early, as a new version of it. */
  continueAnswer(conversation, message) {
    this.stop(conversation);
    const request = this._prepare(conversation, this._store.thread(conversation).path(message.id), true);
    const { role, content, reasoning, tokens } = message;
    const fields = { role, content, ...(reasoning && { reasoning }), ...(tokens && { tokens: [...tokens] }), ...(request.failure && { failure: request.failure }) };
    const options = { ...request.options, responseFormat: undefined, structuredOutputs: undefined, continueFinalMessage: true, addGenerationPrompt: false };
    this._send(conversation, message.parent, fields, { ...request, options });
  }

  /** Resume answers that were being written when a page was left. `messages`: as the store has them. */
  async resume(messages) {
    for (const { id, conversation: conversationId } of messages) {
      const conversation = this._store.find(conversationId);
      if (!conversation || this._running.has(conversationId)) continue;
      const message = (await this._store.load(conversation)).messages.get(id);
      if (message?.pending && !this._running.has(conversationId)) this._resume(conversation, message, false);
    }
  }

  /** Follow an answer that another tab has begun, when its message is on the branch that is shown. */
  followOtherTab(conversation) {
    const message = this._store.thread(conversation).path().at(-1);
    if (message?.pending?.accepted && !this._running.has(conversation.id)) this._resume(conversation, message, true);
  }

  _resume(conversation, message, isOtherTabs) {
    const { requestId, cursor = 0, contextIds, params } = message.pending;
    message.request = requestId;
    this._follow(conversation, message, this._engine.resume({ requestId, cursors: [cursor], contextIds, params }), null, isOtherTabs);
  }

  /** The request after these messages, or why there is none. `hasResults`: no tool call is forced. */
  _prepare(conversation, path, hasResults) {
    const settings = this._settings.of(conversation);
    const system = (conversation.system ?? "").trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...apiMessages(path)];
    try {
      return { messages, params: samplingParams(settings), options: answerOptions(settings, hasResults), isJson: isJsonFormat(settings) };
    } catch (error) {
      return { failure: { message: sentence(error.message), remedy: "Correct it under Parameters." } };
    }
  }

  _send(conversation, parent, fields, { messages, params, options, failure }, again = null) {
    let generation = null;
    if (!failure) {
      const { continueFinalMessage, addGenerationPrompt, ...others } = options;
      const continues = this._engine.hello?.model?.chat === false; // a model without a chat template continues a text
      generation = this._engine.generate({
        ...(continues ? { prompt: messages.map((turn) => turn.content).join("\n\n") } : { messages, continueFinalMessage, addGenerationPrompt }),
        ...others,
        params,
        label: "chat",
      });
      Object.assign(fields, { request: generation.requestId, pending: { requestId: generation.requestId, params } });
    }
    let message = again;
    if (message) {
      delete message.failure;
      Object.assign(message, fields);
      this._store.saveSoon(message);
    } else [message] = this._store.append(conversation, parent, [fields]);
    if (generation) this._follow(conversation, message, generation, performance.now(), false);
    else this._events.changed(conversation);
  }

  /** Read a generation into its message until it ends. `started` is null for a resumed one. */
  async _follow(conversation, message, generation, started, isOtherTabs) {
    const own = { generation, message };
    this._running.set(conversation.id, own);
    this._store.live.add(message.id);
    this._events.changed(conversation);
    let first = null;
    try {
      for await (const delta of generation) {
        first ??= performance.now();
        message.content += delta.text;
        if (delta.reasoning) message.reasoning = (message.reasoning ?? "") + delta.reasoning;
        if (delta.logprobs) addTokens(message, delta.logprobs);
        if (delta.toolCalls) addToolCalls((message.toolCalls ??= []), delta.toolCalls);
        Object.assign(message.pending, { cursor: delta.cursor, contextIds: generation.contextIds, accepted: true, promptTokens: generation.accepted?.prompt_tokens });
        this._store.saveSoon(message);
        this._events.written(conversation, message);
      }
      const [choice] = (await generation.result).choices;
      message.finishReason = choice.finishReason;
      message.figures = figuresOf(choice, started, first);
    } catch (error) {
      if (!(error instanceof InferEngineError)) throw error;
      if (isOtherTabs) { // the tab that began it says what is wrong
        this._leave(conversation, own);
        this._store.live.delete(message.id);
        return;
      }
      message.failure = { message: sentence(error.message), remedy: remedyOf(error) };
    }
    delete message.pending;
    this._leave(conversation, own);
    this._events.ended(conversation, message);
    if (await this._store.saveEnd(message)) this._events.changed(conversation);
    this._store.live.delete(message.id);
  }

  _leave(conversation, own) {
    if (this._running.get(conversation.id) === own) this._running.delete(conversation.id);
    this._events.changed(conversation);
  }
}

/** The figures of an answer: as this page measured them, or of a resumed answer as the engine did. */
function figuresOf({ usage, timings }, started, first) {
  const seconds = timings ? (timings.total_ms - timings.first_token_ms) / 1000 : 0;
  return {
    firstTokenMs: started !== null && first !== null ? first - started : timings?.first_token_ms,
    tokensPerS: usage.completion_tokens > 1 && seconds > 0 ? (usage.completion_tokens - 1) / seconds : null,
    promptTokens: usage.prompt_tokens,
    tokens: usage.completion_tokens,
  };
}

function remedyOf(error) {
  if (error.retryAfterSeconds) return `Try again in ${Math.ceil(error.retryAfterSeconds)} s.`;
  return error.field ? `${error.remedy} Field: ${error.field}.` : error.remedy;
}

/** A text as a sentence: a capital at its beginning, a full stop at its end. */
export function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
