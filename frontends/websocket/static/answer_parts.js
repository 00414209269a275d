// @ts-check
/** What an answer may hold beside text: thoughts, tool calls with their results, and JSON. Text enters as text only. */

import { codeElement, icon, make } from "./elements.js";

const ONE_LINE = 72;
const JSON_TOKEN = /("(?:\\.|[^"\\])*")(\s*:)?|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\b(?:true|false|null)\b/g;

/** A block of JSON, its keys and values told apart by colour. */
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

/** JSON with line breaks, or the text itself where it is not whole. What has at most `most` characters stays a line. */
export function pretty(text, most = 0) {
  try {
    const lines = JSON.stringify(JSON.parse(text), null, 1); // a string has no line break of its own in it
    const line = lines.replace(/([{[])\n */g, "$1").replace(/\n *([}\]])/g, "$1").replace(/\n */g, " ");
    return line.length <= most ? line : JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function isJson(text) {
  if (!/^\s*[{[]/.test(text)) return false;
  try {
    return typeof JSON.parse(text) === "object";
  } catch {
    return false;
  }
}

/** Draw what the model thought; open while there is nothing else to read, and as the reader left it afterwards. */
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
 * Draw tool calls, each with its result. `results` maps ids of calls to texts. `give`, where results are still to
 * come, takes a list of `{callId, content}`.
 */
export function drawCalls(element, calls, results, give) {
  element.hidden = !calls.length;
  if (!calls.length) return;
  const form = make(give ? "form" : "div", "calls");
  const inputs = [];
  for (const call of calls) {
    const card = make("section", "call");
    card.setAttribute("aria-label", `Call to ${call.name}`);
    const head = make("div", "call-head");
    head.append(icon("tool"), make("strong", "", call.name), make("span", "", stateOf(call, results, give)));
    card.append(head, jsonElement(pretty(call.arguments, ONE_LINE), "arguments"));
    if (results.has(call.id)) card.append(resultOf(results.get(call.id)));
    else if (give) card.append(resultInput(call, inputs));
    form.append(card);
  }
  if (give) {
    form.append(make("button", "primary", calls.length > 1 ? "Send the results" : "Send the result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      give(inputs.map(({ callId, input }) => ({ callId, content: input.value })));
    });
  }
  element.replaceChildren(form);
}

function stateOf(call, results, give) {
  if (results.has(call.id)) return "called";
  if (give) return "waiting for a result";
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
