// @ts-check
/** Conversations as files: JSON to export and import everything, Markdown to read. */

import { readFiles, withFiles } from "../composer/attached_files.js";
import { changedSettings, readSettings } from "../settings/chat_settings.js";
import { readTokens } from "../token_view.js";

const FORMAT = "inferengine.conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "tool"];
const TEXTS = ["content", "reasoning", "callId", "finishReason"];
const NUMBERS = ["firstTokenMs", "tokensPerS", "promptTokens", "tokens"];

/** The JSON of conversations with their messages, all branches included. The ids of requests stay here. */
export function toJson(conversations) {
  const stored = conversations.map(({ messages, changed: _, deleted: __, ...conversation }) => ({
    ...conversation,
    messages: messages.map(({ pending: _pending, request: _request, changed: _changed, conversation: _id, ...message }) => message),
  }));
  return JSON.stringify({ format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations: stored }, null, 1);
}

/** Read a file of `toJson`. Throws an Error that names what is wrong. */
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON. Choose one that this page has exported.");
  }
  if (file?.format !== FORMAT) throw new Error(`This is no export of this page: “format” must be “${FORMAT}”.`);
  if (file.version !== VERSION) throw new Error(`The export has version ${file.version}; this page reads version ${VERSION}.`);
  return list(file.conversations, "conversations").map((item, index) => readConversation(item, `conversations[${index}]`));
}

function readConversation(item, place) {
  const messages = list(item?.messages, `${place}.messages`).map((message, index) => readMessage(message, `${place}.messages[${index}]`));
  const known = new Set();
  for (const message of messages.sort((a, b) => a.created - b.created)) {
    if (message.parent !== null && !known.has(message.parent)) message.parent = null; // no circles
    known.add(message.id);
  }
  return {
    id: id(item.id, `${place}.id`),
    title: string(item.title, `${place}.title`).slice(0, 300),
    created: number(item.created, `${place}.created`),
    updated: number(item.updated, `${place}.updated`),
    pinned: item.pinned === true,
    system: item.system === undefined ? "" : string(item.system, `${place}.system`),
    ...(item.settings && { settings: changedSettings(readSettings(item.settings)) }),
    leaf: known.has(item.leaf) ? item.leaf : messages.at(-1)?.id ?? null,
    messages,
  };
}

function readMessage(item, place) {
  if (!ROLES.includes(item?.role)) throw new Error(`${place}.role must be one of ${ROLES.join(", ")}.`);
  const message = {
    id: id(item.id, `${place}.id`),
    parent: item.parent === null ? null : id(item.parent, `${place}.parent`),
    created: number(item.created, `${place}.created`),
    role: item.role,
  };
  string(item.content, `${place}.content`);
  for (const name of TEXTS) if (item[name] !== undefined) message[name] = string(item[name], `${place}.${name}`);
  if (item.json === true) message.json = true;
  if (item.files !== undefined) message.files = readFiles(item.files, `${place}.files`);
  if (item.tokens !== undefined) message.tokens = readTokens(item.tokens, `${place}.tokens`);
  if (item.figures) message.figures = Object.fromEntries(NUMBERS.filter((name) => Number.isFinite(item.figures[name])).map((name) => [name, item.figures[name]]));
  if (item.toolCalls !== undefined) {
    message.toolCalls = list(item.toolCalls, `${place}.toolCalls`).map((call, index) => ({
      id: id(call?.id, `${place}.toolCalls[${index}].id`),
      name: string(call.name, `${place}.toolCalls[${index}].name`),
      arguments: string(call.arguments, `${place}.toolCalls[${index}].arguments`),
    }));
  }
  if (item.failure) message.failure = { message: string(item.failure.message, `${place}.failure.message`), remedy: String(item.failure.remedy ?? "") };
  return message;
}

function list(value, place) {
  if (!Array.isArray(value)) throw new Error(`${place} must be a list.`);
  return value;
}

function string(value, place) {
  if (typeof value !== "string") throw new Error(`${place} must be a text.`);
  return value;
}

function number(value, place) {
  if (!Number.isFinite(value)) throw new Error(`${place} must be a number.`);
  return value;
}

function id(value, place) {
  if (!/^[\w-]{1,200}$/.test(string(value, place))) throw new Error(`${place} is no id.`);
  return value;
}

/** The branch that is shown, as Markdown. */
export function toMarkdown({ title, system = "" }, path) {
  const parts = [`# ${title}`];
  if (system.trim()) parts.push("## System prompt", system.trim());
  for (const message of path) {
    if (message.role === "tool") parts.push("## Tool result", fenced(message.content));
    else parts.push(message.role === "user" ? "## You" : "## Answer");
    if (message.role !== "tool" && (message.content || message.files)) parts.push(message.json ? fenced(message.content, "json") : withFiles(message.content.trim(), message.files));
    for (const call of message.toolCalls ?? []) parts.push(`Calls \`${call.name}\`:`, fenced(call.arguments, "json"));
  }
  return `${parts.join("\n\n")}\n`;
}

/** A code block whose fence is longer than any in the text. */
function fenced(text, language = "") {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** A file name of a title. */
export function fileName(title, ending) {
  const name = title.normalize("NFKC").replace(/[^\p{L}\p{N} _-]+/gu, " ").replace(/\s+/g, " ").trim().slice(0, 60);
  return `${name || "conversation"}.${ending}`;
}

/** Let the browser save a text as a file. */
export function saveFile(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
