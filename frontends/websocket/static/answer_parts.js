// @ts-check
/** Parts of an answer beside its text: reasoning, tool calls with results, and JSON. Text enters as text nodes. */

import { codeElement, icon, make } from "./elements.js";

const ONE_LINE = 72;
const JSON_TOKEN = /("(?:\\.|[^"\\])*")(\s*:)?|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\b(?:true|false|null)\b/g;

/** Create a block of JSON with coloured keys and values. */
export function jsonElement(text, label = "JSON") {
  const block = codeElement("", label);
  const code = block.querySelector("code");
  let at = 0;
  for (const found of text.matchAll(JSON_TOKEN)) {
    code.append(text.slice(at, found.index));
    const token = found[1] ?? found[0];
    const kind = found[1] === undefined ? "j-value" : found[2] === undefined ? "j-text" : "j-key";
    code.append(make("span", kind, token), found[2] ?? "");
    at = found.index + found[0].length;
  }
  code.append(text.slice(at));
  return block;
}

/** Format JSON with line breaks, or on one line of at most `most` characters. Text that is not valid JSON is returned. */
export function pretty(text, most = 0) {
  try {
    const lines = JSON.stringify(JSON.parse(text), null, 1); // strings contain no line breaks: they are escaped
    const line = lines.replace(/([{[])\n */g, "$1").replace(/\n *([}\]])/g, "$1").replace(/\n */g, " ");
    return line.length <= most ? line : JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Whether `text` is a valid JSON object or list. */
export function isJson(text) {
  if (!/^\s*[{[]/.test(text)) return false;
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
}

/** Draw the reasoning. It is open while `thinking`, and afterwards stays as the reader leaves it. */
export function drawReasoning(element, text, thinking) {
  element.hidden = !text;
  if (!text) return;
  if (!element.firstChild) {
    const details = make("details");
    details.append(make("summary"), make("div", "thought"));
    element.append(details);
  }
  const [summary, thought] = element.firstChild.children;
  if (element._thinking !== thinking) {
    element._thinking = thinking;
    element.firstChild.open = thinking;
    summary.textContent = thinking ? "Thinking…" : "Reasoning";
  }
  thought.textContent = text;
}

/**
 * Draw tool calls, each with its result. `results` maps ids of calls to texts. `onResults`, where results are
 * missing, is called with a list of `{callId, content}`.
 */
export function drawCalls(element, calls, results, onResults) {
  element.hidden = !calls.length;
  if (!calls.length) return;
  const form = make(onResults ? "form" : "div", "calls");
  const inputs = [];
  for (const call of calls) {
    const card = make("section", "call");
    card.setAttribute("aria-label", `Call to ${call.name}`);
    const head = make("div", "call-head");
    head.append(icon("tool"), make("strong", "", call.name), make("span", "", stateOf(call, results, onResults)));
    card.append(head, jsonElement(pretty(call.arguments, ONE_LINE), "arguments"));
    if (results.has(call.id)) card.append(resultOf(results.get(call.id)));
    else if (onResults) card.append(resultInput(call, inputs));
    form.append(card);
  }
  if (onResults) {
    form.append(make("button", "primary", calls.length > 1 ? "Send the results" : "Send the result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      onResults(inputs.map(({ callId, input }) => ({ callId, content: input.value })));
    });
  }
  element.replaceChildren(form);
}

function stateOf(call, results, onResults) {
  if (results.has(call.id)) return "called";
  if (onResults) return "waiting for a result";
  return isJson(call.arguments) ? "" : "incomplete";
}

function resultOf(text) {
  return isJson(text) ? jsonElement(pretty(text, ONE_LINE), "result") : codeElement(text, "result");
}

function resultInput(call, inputs) {
  const label = make("label", "call-result", "Result");
  const input = make("textarea");
  input.required = true;
  input.rows = 2;
  input.placeholder = `Enter the result of ${call.name}`;
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    input.form.requestSubmit();
  });
  label.append(input);
  inputs.push({ callId: call.id, input });
  return label;
}
