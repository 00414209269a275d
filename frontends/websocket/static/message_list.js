// @ts-check
/** The messages of the open conversation: builds and updates their elements. */

import { drawCalls, drawReasoning, isJson, jsonElement, pretty } from "./answer_parts.js";
import { icon, make } from "./elements.js";
import { renderMarkdown } from "./render_markdown.js";

const MAX_DRAWING_SHARE = 0.3; // of the time, while an answer streams

/** Draws messages and calls the actions of their buttons. */
export class MessageList {
  /** `actions`: copy(text, button), edit(index, text), retry(index), sendResults(results). */
  constructor(log, actions) {
    this._log = log;
    this._actions = actions;
    this._views = [];
    this._isPlanned = false;
    this._nextDraw = 0;
    this._dirty = new Set();
  }

  /** Draw all `messages`. `busy`: the last one is still being written. Tool results are drawn with their calls. */
  show(messages, busy) {
    this._dirty.clear();
    this._results = new Map(messages.filter(({ role }) => role === "tool").map(({ callId, content }) => [callId, content]));
    this._last = messages.length - 1;
    this._views = messages.map((message, index) => this._build(message, index, busy && index === this._last));
    this._log.replaceChildren(...this._views.filter(({ message }) => message.role !== "tool").map((view) => view.element));
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
    if (view && this._dirty.has(view.message)) this._drawAnswer(view, true);
    this._dirty.clear();
    this.onDrawn?.();
    const end = performance.now();
    this._nextDraw = end + (end - start) * (1 / MAX_DRAWING_SHARE - 1);
  }

  _build(message, index, busy) {
    const element = make("article", `message ${message.role}${busy ? " streaming" : ""}`);
    element.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
    if (busy) element.setAttribute("aria-busy", "true");
    const body = make("div", "body");
    const view = { message, element, body, index };
    if (message.role !== "assistant") {
      element.append(body);
      body.textContent = message.content;
      element.append(this._userFoot(message, index, element));
    } else {
      Object.assign(view, { reasoning: make("div", "reasoning"), calls: make("div", "tool-calls") });
      element.append(view.reasoning, body, view.calls);
      this._drawAnswer(view, busy);
      if (message.failure) element.append(failure(message.failure, () => this._actions.retry(index)));
      element.append(busy ? make("div", "message-foot") : this._assistantFoot(message, index));
    }
    return view;
  }

  _drawAnswer({ message, body, reasoning, calls, index }, busy) {
    const { content, toolCalls = [] } = message;
    drawReasoning(reasoning, message.reasoning ?? "", busy && !content && !toolCalls.length);
    if (content && (message.json ? !toolCalls.length : !busy && isJson(content))) {
      body.replaceChildren(jsonElement(busy ? content : pretty(content)));
    } else renderMarkdown(body, content, { streaming: busy });
    body.hidden = !content && (toolCalls.length > 0 || !busy);
    const awaitsResults = !busy && index === this._last && message.finishReason === "tool_calls";
    drawCalls(calls, toolCalls, this._results, awaitsResults ? this._actions.sendResults : null);
  }

  _userFoot(message, index, element) {
    const foot = make("div", "message-foot");
    foot.append(
      button("Edit", "edit", () => this._edit(message, index, element)),
      button("Copy", "copy", (target) => this._actions.copy(message.content, target)),
    );
    return foot;
  }

  _assistantFoot(message, index) {
    const foot = make("div", "message-foot");
    if (message.content) foot.append(button("Copy answer", "copy", (target) => this._actions.copy(message.content, target)));
    if (!message.failure) foot.append(button("Try again", "retry", () => this._actions.retry(index)));
    const line = figuresLine(message);
    if (line) foot.append(make("span", "figures-line", line));
    return foot;
  }

  _edit(message, index, element) {
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
      const view = this._build(message, index, false);
      this._views[index] = view;
      element.replaceWith(view.element);
      view.element.querySelector("button")?.focus();
    };
    cancel.addEventListener("click", close);
    box.addEventListener("submit", (event) => {
      event.preventDefault();
      if (input.value.trim()) this._actions.edit(index, input.value);
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
