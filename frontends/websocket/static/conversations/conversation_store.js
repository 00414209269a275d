// @ts-check
/**
 * Conversations, stored in this browser and shared by all tabs of this page. A change reads and writes its records in
 * one transaction and tells the other tabs which conversations to read again. Touches no element.
 */

import { newRequestId } from "../client.js";
import { Database } from "./database.js";
import { readLegacy, removeLegacy } from "./legacy.js";
import { Thread } from "./thread.js";

const SAVE_MS = 400; // a streaming answer changes many times a second
const TITLE_CHARACTERS = 60;
const KEEP_DELETED_MS = 30 * 24 * 3600 * 1000;
const MAX_RESULTS = 100;
const SNIPPET_BEFORE = 24;
const SNIPPET_CHARACTERS = 110;

/** @typedef {import("./thread.js").Message} Message */
/**
 * @typedef {{ id: string, title: string, created: number, updated: number, changed?: number, pinned?: boolean,
 *   system?: string, settings?: object, leaf: string | null, deleted?: number }} Conversation
 */

/** All conversations, and the messages of those that were opened. */
export class ConversationStore {
  constructor(database = new Database()) {
    this.database = database;
    /** Pinned ones first, then the newest. @type {Conversation[]} */
    this.conversations = [];
    /** Deleted ones, the latest first. They can be restored for 30 days. @type {Conversation[]} */
    this.deleted = [];
    /** Called when another tab has changed something: onChange(ids of conversations). */
    this.onChange = (/** @type {string[]} */ _ids) => {};
    /** Messages that this tab is writing: their objects here are newer than what is stored. @type {Set<string>} */
    this.live = new Set();
    /** @type {Map<string, Conversation>} */
    this._byId = new Map();
    /** @type {Map<string, Thread>} */
    this._threads = new Map();
    /** @type {Map<string, { message: Message, timer: number }>} */
    this._timers = new Map();
    this._lastTime = 0;
    this._channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("inferengine.conversations");
  }

  /** Read the list. `system`: the system prompt of conversations that earlier versions stored. */
  async open(system = "") {
    await this.database.open();
    const legacy = readLegacy(system);
    if (legacy.length) {
      await this._merge(legacy);
      if (this.database.isOpen && !this.database.numUnsaved) removeLegacy();
    }
    for (const conversation of await this.database.read((view) => view.all("conversations"))) this._byId.set(conversation.id, conversation);
    const outdated = [...this._byId.values()].filter(({ deleted }) => deleted && deleted < Date.now() - KEEP_DELETED_MS);
    if (outdated.length) await this.purge(outdated);
    this._sort();
    globalThis.addEventListener?.("pagehide", () => this.saveNow());
    if (this._channel) this._channel.onmessage = ({ data }) => this._refresh(data.ids);
  }

  /** The conversation of this id, or null. */
  find(id) {
    const conversation = this._byId.get(id);
    return conversation && !conversation.deleted ? conversation : null;
  }

  /** The messages of a conversation, read when they are first needed. */
  async load(conversation) {
    const known = this._threads.get(conversation.id);
    if (known) return known;
    const messages = await this.database.read((view) => view.all("messages", "conversation", conversation.id));
    return this._threads.get(conversation.id) ?? this._keep(conversation, messages);
  }

  /** The messages of a conversation that was loaded or created. @returns {Thread} */
  thread(conversation) {
    return this._threads.get(conversation.id) ?? this._keep(conversation, []);
  }

  /** Messages whose answers were being written when they were last saved. @returns {Promise<Message[]>} */
  pending() {
    return this.database.read((view) => view.all("messages", "pending"));
  }

  // -- changes ------------------------------------------------------------------------------------------------------

  /** Add a conversation, titled after its first message. */
  create(firstText, system, settings = {}) {
    const now = this._now();
    const conversation = { id: newRequestId(), title: titleOf(firstText), created: now, updated: now, system, settings, leaf: null };
    this._keep(conversation, []);
    this._byId.set(conversation.id, conversation);
    return conversation; // stored with its first message
  }

  /** Add messages, each below the one before it, the first below `parent`. */
  append(conversation, parent, list) {
    const thread = this.thread(conversation);
    /** @type {Message[]} */
    const records = [];
    for (const fields of list) {
      const time = this._now();
      records.push({ id: newRequestId(), conversation: conversation.id, parent, created: time, changed: time, ...fields });
      parent = records.at(-1)?.id ?? null;
    }
    for (const record of records) thread.add(record);
    thread.leaf = parent;
    this._change(conversation, { leaf: parent, updated: this._now(), deleted: 0 }, (view) => {
      for (const record of records) view.put("messages", record);
    });
    return records;
  }

  /** Show the branch of this version of a message. */
  showVersion(conversation, message) {
    const thread = this.thread(conversation);
    thread.leaf = thread.newestLeaf(message.id);
    this._change(conversation, { leaf: thread.leaf });
  }

  /** Show the branch that contains a message, as it is when it does already. */
  showMessage(conversation, message) {
    const { leaf } = this.thread(conversation);
    if (!this.thread(conversation).isBelow(leaf, message.id)) this.showVersion(conversation, message);
  }

  /** Give a conversation another title. */
  rename(conversation, title) {
    if (title.trim()) this._change(conversation, { title: title.trim().slice(0, 300) });
  }

  /** Keep a conversation above the others, or no longer. */
  pin(conversation, pinned) {
    this._change(conversation, { pinned });
  }

  /** Set the system prompt of a conversation. */
  setSystem(conversation, system) {
    this._change(conversation, { system });
  }

  /** Set what the next answers of a conversation are asked for with; see settings/chat_settings.js. */
  setSettings(conversation, settings) {
    this._change(conversation, { settings });
  }

  /** Delete a conversation. It can be restored for 30 days. */
  remove(conversation) {
    this._change(conversation, { deleted: Date.now() });
  }

  /** Undo a deletion. */
  restore(conversation) {
    this._change(conversation, { deleted: 0 });
  }

  /** Delete conversations and their messages for good. */
  async purge(conversations) {
    const ids = conversations.map(({ id }) => id);
    for (const id of ids) {
      this._byId.delete(id);
      this._threads.delete(id);
    }
    this._sort();
    await this.database.write(async (view) => {
      for (const id of ids) {
        for (const message of await view.all("messages", "conversation", id)) view.delete("messages", message.id);
        view.delete("conversations", id);
      }
    });
    this._tell(ids);
  }

  /** Save an answer that is being written, within 400 ms. */
  saveSoon(message) {
    if (this._timers.has(message.id)) return;
    this._timers.set(message.id, { message, timer: setTimeout(() => this._save(message), SAVE_MS) });
  }

  /** Save an answer that has ended. If another tab that followed it was first, take its record and resolve to true. */
  async saveEnd(message) {
    const stored = await this._save(message);
    if (stored && !stored.pending) Object.assign(message, stored);
    return stored !== undefined;
  }

  /** Save at once what `saveSoon` has not saved yet. */
  saveNow() {
    for (const { message, timer } of this._timers.values()) {
      clearTimeout(timer);
      this._save(message);
    }
  }

  /** Save, unless what is stored is further. @returns {Promise<Message | undefined>} what is stored then */
  async _save(message) {
    clearTimeout(this._timers.get(message.id)?.timer);
    this._timers.delete(message.id);
    const stored = await this.database.write(async (view) => {
      const before = await view.get("messages", message.id);
      const isSame = before && before.request === message.request;
      const isFurther = isSame && (!before.pending || (message.pending && (before.pending.cursor ?? 0) > (message.pending.cursor ?? 0)));
      if (isFurther) return before;
      message.changed = this._now();
      view.put("messages", message);
      return undefined;
    });
    if (!stored) this._tell([message.conversation]);
    return stored;
  }

  // -- all of them --------------------------------------------------------------------------------------------------

  /** Find conversations by their title and messages. @returns {Promise<{ conversation: Conversation, message?: Message, snippet: string }[]>} */
  async search(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return [];
    const results = new Map();
    for (const conversation of this.conversations) {
      if (conversation.title.toLowerCase().includes(wanted)) results.set(conversation, { conversation, snippet: "" });
    }
    await this.database.each("messages", (message) => {
      const at = message.content.toLowerCase().indexOf(wanted);
      const conversation = at < 0 ? null : this.find(message.conversation);
      const found = results.get(conversation);
      if (!conversation || (found && (!found.message || found.message.created > message.created))) return;
      results.set(conversation, { conversation, message, snippet: snippet(message.content, at) });
    });
    return this.conversations.filter((item) => results.has(item)).slice(0, MAX_RESULTS).map((item) => results.get(item));
  }

  /** Conversations with all their messages, for a file. @param {Conversation[]} conversations */
  async withMessages(conversations) {
    const messages = new Map(conversations.map(({ id }) => [id, /** @type {Message[]} */ ([])]));
    await this.database.each("messages", (message) => messages.get(message.conversation)?.push(message));
    return conversations.map((conversation) => {
      const thread = this._threads.get(conversation.id);
      const list = (messages.get(conversation.id) ?? []).map((message) => (this.live.has(message.id) && thread?.messages.get(message.id)) || message);
      return { ...conversation, leaf: thread?.leaf ?? conversation.leaf, messages: list.sort((a, b) => a.created - b.created) };
    });
  }

  /** Add what is not here yet. Nothing that is stored is replaced. Resolves to the numbers of what was added. */
  async importAll(conversations) {
    const added = await this._merge(conversations);
    await this._refresh(conversations.map(({ id }) => id));
    this._tell(conversations.map(({ id }) => id));
    return added;
  }

  /** The sizes of all records in bytes (as JSON), and what the browser allows where it says so. */
  async usage() {
    let bytes = 0;
    for (const store of ["conversations", "messages"]) await this.database.each(store, (record) => (bytes += JSON.stringify(record).length));
    const estimate = await navigator.storage?.estimate?.().catch(() => null);
    return { bytes, quota: estimate?.quota ?? null };
  }

  // -- inside -------------------------------------------------------------------------------------------------------

  _merge(conversations) {
    return this.database.write(async (view) => {
      const added = { conversations: 0, messages: 0 };
      const stored = new Map((await view.all("conversations")).map((conversation) => [conversation.id, conversation]));
      const known = await view.ids("messages");
      for (const { messages, ...conversation } of conversations) {
        const before = stored.get(conversation.id);
        if (!before || before.deleted) view.put("conversations", { ...conversation, ...before, deleted: 0, changed: Date.now() });
        if (!before) added.conversations++;
        for (const message of messages) {
          if (known.has(message.id)) continue;
          known.add(message.id);
          view.put("messages", { ...message, conversation: conversation.id });
          added.messages++;
        }
      }
      return added;
    });
  }

  _keep(conversation, messages) {
    const thread = new Thread(messages, conversation.leaf);
    if (conversation.leaf === null || !thread.messages.has(conversation.leaf)) thread.leaf = thread.newestLeaf(null) ?? null;
    this._threads.set(conversation.id, thread);
    return thread;
  }

  /** Change fields of a conversation here and, in one transaction with `more`, in the storage. */
  async _change(conversation, fields, more = (/** @type {any} */ _view) => {}) {
    Object.assign(conversation, fields, { changed: this._now() });
    this._byId.set(conversation.id, conversation);
    this._sort();
    const { changed } = conversation;
    await this.database.write(async (view) => {
      const stored = await view.get("conversations", conversation.id);
      view.put("conversations", { ...(stored ?? conversation), ...fields, changed });
      more(view);
    });
    this._tell([conversation.id]);
  }

  /** Read what another tab has changed. */
  async _refresh(ids) {
    const loaded = ids.filter((id) => this._threads.has(id));
    const [conversations, messages] = await this.database.read(async (view) => [
      await Promise.all(ids.map((id) => view.get("conversations", id))),
      await Promise.all(loaded.map((id) => view.all("messages", "conversation", id))),
    ]);
    for (const [index, id] of ids.entries()) {
      const known = this._byId.get(id);
      if (!conversations[index]) this._byId.delete(id);
      else if (!known) this._byId.set(id, conversations[index]);
      else if ((known.changed ?? 0) <= (conversations[index].changed ?? 0)) Object.assign(known, conversations[index]);
    }
    for (const [index, id] of loaded.entries()) this._refreshThread(id, messages[index]);
    this._sort();
    this.onChange(ids);
  }

  _refreshThread(id, messages) {
    const thread = this._threads.get(id);
    if (!thread) return;
    for (const message of messages) {
      const known = thread.messages.get(message.id);
      if (!this.live.has(message.id) && (known?.changed ?? 0) <= (message.changed ?? 0)) thread.add(message);
    }
    const leaf = this._byId.get(id)?.leaf;
    if (leaf && thread.messages.has(leaf) && thread.isBelow(leaf, thread.leaf)) thread.leaf = leaf; // else: this tab shows another branch
  }

  _tell(ids) {
    this._channel?.postMessage({ ids });
  }

  _sort() {
    const all = [...this._byId.values()];
    this.conversations = all.filter(({ deleted }) => !deleted).sort((a, b) => Number(b.pinned ?? false) - Number(a.pinned ?? false) || b.updated - a.updated);
    this.deleted = all.filter(({ deleted }) => deleted).sort((a, b) => (b.deleted ?? 0) - (a.deleted ?? 0));
  }

  /** The time, later with each call. */
  _now() {
    this._lastTime = Math.max(Date.now(), this._lastTime + 1);
    return this._lastTime;
  }
}

/** The title of a conversation that begins with this message. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_CHARACTERS ? `${line.slice(0, TITLE_CHARACTERS - 1).trimEnd()}…` : line;
}

function snippet(text, at) {
  const start = Math.max(0, at - SNIPPET_BEFORE);
  const part = text.slice(start, start + SNIPPET_CHARACTERS).replace(/\s+/g, " ");
  return `${start ? "…" : ""}${part}${start + SNIPPET_CHARACTERS < text.length ? "…" : ""}`;
}
