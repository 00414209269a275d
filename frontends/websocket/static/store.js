// @ts-check
/** Conversations and settings, stored in this browser. Touches no element. */

const CONVERSATIONS = "inferengine.conversations";
const SETTINGS = "inferengine.settings";
const MOST_CONVERSATIONS = 200;
const TITLE_CHARACTERS = 60;

/** `schema` and `tools` as they were typed; see answer_format.js. A number that is null takes the model's default. */
export const DEFAULT_SETTINGS = { system: "", temperature: null, top_p: null, top_k: null, max_tokens: null, seed: null,
  json: false, schema: "", tools: "", tool_choice: "auto", key: "" };

/**
 * @typedef {{ role: "user" | "assistant" | "tool", content: string, figures?: object, finishReason?: string, json?: boolean,
 *   reasoning?: string, toolCalls?: { id: string, name: string, arguments: string }[], callId?: string, failure?: { message: string, remedy?: string }, pending?: { requestId: string, params: object } }} StoredMessage
 * @typedef {{ id: string, title: string, updated: number, messages: StoredMessage[] }} Conversation
 */

/** Reads both at the start, and writes changes back. */
export class Store {
  constructor(storage = safeStorage()) {
    this._storage = storage;
    this._timer = null;
    /** @type {Conversation[]} newest first */
    this.conversations = this._read(CONVERSATIONS, []).filter((item) => item?.id && Array.isArray(item.messages));
    this.settings = { ...DEFAULT_SETTINGS, ...this._read(SETTINGS, {}) };
    globalThis.addEventListener?.("pagehide", () => this.saveNow());
  }

  /** The conversation of this id, or null. */
  find(id) {
    return this.conversations.find((conversation) => conversation.id === id) ?? null;
  }

  /** Add a conversation, titled after its first message. */
  create(firstText) {
    const conversation = { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: titleOf(firstText), updated: Date.now(), messages: [] };
    this.conversations.unshift(conversation);
    this.conversations.length = Math.min(this.conversations.length, MOST_CONVERSATIONS);
    return conversation;
  }

  /** Delete a conversation. */
  remove(id) {
    this.conversations = this.conversations.filter((conversation) => conversation.id !== id);
    this.saveNow();
  }

  /** Move a conversation to the top of the list. */
  touch(conversation) {
    conversation.updated = Date.now();
    this.conversations = [conversation, ...this.conversations.filter((item) => item !== conversation)];
    this.save();
  }

  /** Store the settings. */
  saveSettings(settings) {
    this.settings = settings;
    this._write(SETTINGS, settings);
  }

  /** Save within 400 ms: a streaming answer changes many times a second. */
  save() {
    this._timer ??= setTimeout(() => this.saveNow(), 400);
  }

  /** Save at once. Drops the older half of the conversations while the storage is full. */
  saveNow() {
    clearTimeout(this._timer);
    this._timer = null;
    let kept = this.conversations;
    while (!this._write(CONVERSATIONS, kept) && kept.length > 1) kept = kept.slice(0, Math.ceil(kept.length / 2));
  }

  _read(key, otherwise) {
    try {
      return JSON.parse(this._storage.getItem(key)) ?? otherwise;
    } catch {
      return otherwise;
    }
  }

  _write(key, value) {
    try {
      this._storage.setItem(key, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }
}

/** The sampling parameters of a request: the settings that are set. */
export function paramsOf(settings) {
  const params = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) if (settings[name] !== null) params[name] = settings[name];
  return params;
}

/** The title of a conversation that begins with this message. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1).trimEnd()}…` : line;
}

/** localStorage where it is allowed, else a Map that lasts as long as the page. */
function safeStorage() {
  try {
    localStorage.getItem("");
    return localStorage;
  } catch {
    const items = new Map();
    return { getItem: (key) => items.get(key) ?? null, setItem: (key, value) => void items.set(key, value) };
  }
}
