// @ts-check
/** The messages of the open conversation: builds and updates their elements. */

import { drawCalls, drawReasoning, isJson, jsonElement, pretty } from "./answer_parts.js";
import { filesElement } from "./composer/attachments.js";
import { icon, make, setChildren } from "./elements.js";
import { renderMarkdown } from "./render_markdown.js";
import { tokenView } from "./token_view.js";

const MAX_DRAWING_SHARE = 0.3; // of the time, while an answer streams
const UNSHOWN = new Set(["changed", "pending", "request", "parent", "created"]);
const ENDED_EARLY = ["length", "cancelled"];

/** Draws messages and calls the actions of their buttons. */
export class MessageList {
  /** `actions`: copy(text, button), edit(message, text), retry(message), continueAnswer(message), sendResults(results),
   * showVersion(message, step). */
  constructor(log, actions) {
    this._log = log;
    this._actions = actions;
    this._views = [];
    this._isPlanned = false;
    this._nextDraw = 0;
    this._dirty = new Set();
    this._asTokens = new Set(); // ids of messages whose tokens are shown instead of their text
  }

  /**
   * Draw all `messages`; elements that would look the same stay, with what is typed into them. `busy`: the message that
   * is still being written. `versionsOf(message)`: its branches. Tool results are drawn with their calls.
   */
  show(messages, busy, versionsOf) {
    this._dirty.clear();
    const before = new Map(this._views.map((view) => [view.message.id, view]));
    this._results = new Map(messages.filter(({ role }) => role === "tool").map(({ callId, content }) => [callId, content]));
    this._views = messages.map((message, index) => {
      const versions = versionsOf(message);
      const place = { isLast: index === messages.length - 1, isBusy: message === busy, version: versions.indexOf(message), numVersions: versions.length };
      const results = (message.toolCalls ?? []).map(({ id }) => this._results.get(id));
      const key = JSON.stringify([message, place, results], (name, value) => (UNSHOWN.has(name) ? undefined : value));
      const drawn = before.get(message.id);
      if (!drawn || drawn.key !== key) return { ...this._build(message, place), key };
      return Object.assign(drawn, { message, place });
    });
    setChildren(this._log, this._views.filter(({ message }) => message.role !== "tool").map((view) => view.element));
  }

  /** The element of a message, or undefined. */
  elementOf(id) {
    return this._views.find(({ message }) => message.id === id)?.element;
  }

  /** Draw the last message again, at most once for each frame of the screen, and less often where drawing is slow. */
  updateLast(message) {
    this._dirty.add(message);
    if (this._isPlanned) return;
    this._isPlanned = true;
    const wait = this._nextDraw - performance.now();
    if (wait > 0) setTimeout(() => requestAnimationFrame(() => this._drawLast()), wait);
    else requestAnimationFrame(() => this._drawLast());
  }

  _drawLast() {
    const start = performance.now();
    this._isPlanned = false;
    const view = this._views.at(-1);
    if (view && this._dirty.has(view.message)) this._drawAnswer(view, view.place.isBusy);
    this._dirty.clear();
    this.onDrawn?.();
    const end = performance.now();
    this._nextDraw = end + (end - start) * (1 / MAX_DRAWING_SHARE - 1);
  }

  _build(message, place) {
    const element = make("article", `message ${message.role}${place.isBusy ? " streaming" : ""}`);
    element.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    if (place.isBusy) element.setAttribute("aria-busy", "true");
    const body = make("div", "body");
    const view = { message, element, body, place };
    if (message.role !== "assistant") {
      element.append(body);
      body.textContent = message.content;
      body.hidden = !message.content;
      if (message.files?.length) element.prepend(filesElement(message.files));
      element.append(this._userFoot(message, view));
    } else {
      Object.assign(view, { reasoning: make("div", "reasoning"), calls: make("div", "tool-calls") });
      element.append(view.reasoning, body, view.calls);
      this._drawAnswer(view, place.isBusy);
      if (message.failure) element.append(failure(message.failure, () => this._actions.retry(message)));
      element.append(place.isBusy ? make("div", "message-foot") : this._assistantFoot(message, place));
    }
    return view;
  }

  _drawAnswer({ message, body, reasoning, calls, place }, busy) {
    const { content, toolCalls = [] } = message;
    if (!busy && message.tokens && this._asTokens.has(message.id)) {
      for (const other of [reasoning, calls]) other.hidden = true;
      body.replaceChildren(tokenView(message.tokens));
      body.hidden = false;
      return;
    }
    drawReasoning(reasoning, message.reasoning ?? "", busy && !content && !toolCalls.length);
    if (content && (message.json ? !toolCalls.length : !busy && isJson(content))) {
      body.replaceChildren(jsonElement(busy ? content : pretty(content)));
    } else renderMarkdown(body, content, { streaming: busy });
    body.hidden = !content && (toolCalls.length > 0 || !busy);
    const awaitsResults = !busy && place.isLast && message.finishReason === "tool_calls";
    drawCalls(calls, toolCalls, this._results, awaitsResults ? this._actions.sendResults : null);
  }

  _userFoot(message, view) {
    const foot = make("div", "message-foot");
    foot.append(
      button("Edit", "edit", () => this._edit(message, view)),
      button("Copy", "copy", (target) => this._actions.copy(message.content, target)),
      ...this._versions(message, view.place),
    );
    foot.classList.toggle("has-versions", view.place.numVersions > 1);
    return foot;
  }

  _assistantFoot(message, place) {
    const foot = make("div", "message-foot");
    foot.append(...this._versions(message, place));
    if (message.content) foot.append(button("Copy answer", "copy", (target) => this._actions.copy(message.content, target)));
    if (!message.failure) foot.append(button("Try again", "retry", () => this._actions.retry(message)));
    if (message.tokens) foot.append(this._tokensButton(message));
    if (place.isLast && canContinue(message)) foot.append(button("Continue", "continue", () => this._actions.continueAnswer(message)));
    const line = figuresLine(message);
    if (line) foot.append(make("span", "figures-line", line));
    return foot;
  }

  _tokensButton(message) {
    const isShown = this._asTokens.has(message.id);
    const element = button(isShown ? "Show the text" : "Show the tokens", "tokens", () => {
      if (!this._asTokens.delete(message.id)) this._asTokens.add(message.id);
      this._redraw(message)?.querySelector("[data-tokens]")?.focus();
    });
    element.dataset.tokens = "";
    element.setAttribute("aria-pressed", String(isShown));
    return element;
  }

  /** Build the element of one message again. */
  _redraw(message) {
    const view = this._views.find((item) => item.message.id === message.id);
    if (!view) return undefined;
    const { element } = view;
    Object.assign(view, this._build(view.message, view.place));
    element.replaceWith(view.element);
    return view.element;
  }

  /** ‹ 2/3 ›, where there is more than one version. */
  _versions(message, { version, numVersions }) {
    if (numVersions < 2) return [];
    const box = make("span", "versions");
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `Version ${version + 1} of ${numVersions}`);
    const [older, newer] = [["Previous version", "older", -1], ["Next version", "newer", 1]].map(([label, symbol, step]) => {
      const element = button(label, symbol, () => this._actions.showVersion(message, step));
      element.dataset.step = String(step);
      element.disabled = version + step < 0 || version + step >= numVersions;
      return element;
    });
    box.append(older, make("span", "", `${version + 1}/${numVersions}`), newer);
    return [box];
  }

  _edit(message, view) {
    const { element } = view;
    const box = make("form", "edit-box");
    const input = make("textarea");
    input.value = message.content;
    input.setAttribute("aria-label", "Edit the message");
    const buttons = make("div");
    const cancel = make("button", "plain", "Cancel");
    cancel.type = "button";
    buttons.append(cancel, make("button", "primary", "Send"));
    box.append(input, buttons);
    const close = () => {
      const drawn = this._build(message, view.place);
      element.replaceWith(drawn.element);
      Object.assign(this._views.find(({ message: { id } }) => id === message.id) ?? {}, drawn);
      drawn.element.querySelector("button")?.focus();
    };
    cancel.addEventListener("click", close);
    box.addEventListener("submit", (event) => {
      event.preventDefault();
      if (input.value.trim() || message.files) this._actions.edit(message, input.value);
    });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) box.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    element.classList.add("editing");
    element.replaceChildren(box);
    input.focus();
    input.setSelectionRange(input.value.length, input.value.length);
  }
}

function button(label, symbol, action) {
  const element = make("button", "icon");
  element.type = "button";
  element.title = label;
  element.setAttribute("aria-label", label);
  element.append(icon(symbol));
  element.addEventListener("click", () => action(element));
  return element;
}

/** Whether the model can write on from the end of an answer: it has text, and no grammar that begins anew. */
function canContinue({ content, json, toolCalls = [], finishReason, failure: failed }) {
  return Boolean(content && !json && !toolCalls.length && (failed || ENDED_EARLY.includes(finishReason)));
}

function failure({ message, remedy }, retry) {
  const element = make("div", "failure", message);
  element.setAttribute("role", "alert");
  if (remedy) element.append(make("small", "", remedy));
  const again = make("button", "", "Try again");
  again.type = "button";
  again.addEventListener("click", retry);
  element.append(again);
  return element;
}

function figuresLine(message) {
  const { figures, finishReason } = message;
  const parts = [];
  if (figures?.firstTokenMs != null) parts.push(`first token ${formatMs(figures.firstTokenMs)}`);
  if (figures?.tokensPerS != null) parts.push(`${formatRate(figures.tokensPerS)} tokens/s`);
  if (figures?.tokens != null) parts.push(`${figures.tokens} tokens`);
  if (finishReason === "tool_calls") parts.push("called tools");
  if (finishReason === "length") parts.push("stopped at the token limit");
  if (finishReason === "cancelled") parts.push("stopped");
  return parts.join("  ·  ");
}

/** Format milliseconds: `420 ms`, `1.5 s`. */
export function formatMs(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

/** Format a rate with at most three digits. */
export function formatRate(rate) {
  return rate >= 100 ? Math.round(rate).toLocaleString("en") : rate.toFixed(rate >= 10 ? 0 : 1);
}
