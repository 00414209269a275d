// @ts-check
/** The chat page: wires the browser client, the store and the parts of the page together. */

import { InferEngineError, InferEngineSocket, addToolCalls } from "./client.js";
import { ConversationList } from "./conversation_list.js";
import { copyText } from "./copy_text.js";
import { make } from "./elements.js";
import { EngineStatus } from "./engine_status.js";
import { answerOptions, readTools, apiMessages } from "./answer_format.js";
import { MessageList } from "./message_list.js";
import { StatsPanel } from "./stats_panel.js";
import { SettingsDrawer } from "./settings_drawer.js";
import { Store, paramsOf } from "./store.js";

const EXAMPLES = [
  ["About the model", "Who are you?"],
  ["A short story", "Tell me a story about a fox"],
  ["How serving works", "What is continuous batching?"],
  ["Text to JSON", "Extract the name and city as JSON: My name is Anna and I live in Lisbon."],
];
const NEAR_END_PX = 80;
const WIDE = matchMedia("(min-width: 1181px)");

const $ = (id) => document.getElementById(id);
const store = new Store();
const panel = new StatsPanel(document);
const drawer = new SettingsDrawer(document, store);
const engine = new InferEngineSocket(new URL("v1/ws", location.href.replace(/^http/, "ws")).href, {
  apiKey: store.settings.key,
});
const engineStatus = new EngineStatus(document, engine, panel);
const messages = new MessageList($("log"), { copy, edit, retry, sendResults });
const conversationList = new ConversationList($("conversations"), { open, remove });
/** Answers being written: conversation id → generation. They continue when another conversation is opened. */
const running = new Map();
let current = store.find(location.hash.slice(1));
let following = true; // the view stays at the end until the reader scrolls up

// -- conversations ------------------------------------------------------------------------------------------------

function open(conversation) {
  current = conversation;
  history.replaceState(null, "", conversation ? `#${conversation.id}` : location.pathname);
  following = true;
  document.body.classList.remove("sidebar-open");
  draw();
  $("composer-input").focus();
}

function draw() {
  const empty = !current || !current.messages.length;
  $("empty").hidden = !empty;
  messages.show(current?.messages ?? [], running.has(current?.id));
  document.title = current ? `${current.title} · InferEngine` : "InferEngine";
  const last = current?.messages.findLast((message) => message.figures);
  panel.showAnswer(last?.figures);
  drawConversations();
  drawComposer();
  drawScrim();
  stayAtEnd();
}

function drawConversations() {
  conversationList.show(store.conversations, current, (conversation) => running.has(conversation.id));
}

function remove(conversation) {
  running.get(conversation.id)?.cancel();
  running.delete(conversation.id);
  store.remove(conversation.id);
  if (conversation === current) open(null);
  else drawConversations();
}

// -- requests and answers -------------------------------------------------------------------------------------------

function send(text) {
  const conversation = current ?? store.create(text);
  conversation.messages.push({ role: "user", content: text });
  if (!current) {
    current = conversation;
    history.replaceState(null, "", `#${conversation.id}`);
  }
  following = true;
  answer(conversation);
}

function edit(index, text) {
  stop();
  current.messages.length = index;
  send(text);
  $("composer-input").focus(); // the pressed button was removed
}

function retry(index) {
  stop();
  current.messages.length = index;
  answer(current);
  $("composer-input").focus();
}

/** Append the results of tool calls as the conversation's next messages, and ask the model to continue. */
function sendResults(results) {
  for (const { callId, content } of results) current.messages.push({ role: "tool", callId, content });
  following = true;
  answer(current);
  $("composer-input").focus();
}

function answer(conversation) {
  const { settings } = store;
  const params = paramsOf(settings);
  const message = { role: "assistant", content: "" };
  const system = settings.system.trim();
  const turns = [...(system ? [{ role: "system", content: system }] : []), ...apiMessages(conversation.messages)];
  const continues = engine.hello?.model?.chat === false; // a model without a chat template continues a text
  let options;
  try {
    options = answerOptions(settings, conversation.messages.at(-1)?.role === "tool");
  } catch (error) {
    options = null;
    message.failure = { message: sentence(error.message), remedy: "Correct it under Parameters, Answer format." };
  }
  conversation.messages.push(message);
  store.touch(conversation);
  if (!options) {
    draw();
    return;
  }
  if (options.responseFormat) message.json = true;
  const generation = engine.generate({
    ...(continues ? { prompt: turns.map((turn) => turn.content).join("\n\n") } : { messages: turns }),
    ...options,
    params,
    label: "chat",
  });
  message.pending = { requestId: generation.requestId, params };
  follow(conversation, message, generation, performance.now());
}

/** Read a generation into its message until it ends. `started` is null for a resumed one. */
async function follow(conversation, message, generation, started) {
  running.set(conversation.id, generation);
  if (conversation === current) draw();
  else drawConversations();
  let first = null;
  try {
    for await (const delta of generation) {
      first ??= performance.now();
      message.content += delta.text;
      if (delta.reasoning) message.reasoning = (message.reasoning ?? "") + delta.reasoning;
      if (delta.toolCalls) addToolCalls((message.toolCalls ??= []), delta.toolCalls);
      Object.assign(message.pending, { cursor: delta.cursor, contextIds: generation.contextIds });
      store.save();
      if (conversation === current) messages.updateLast(message);
    }
    const [choice] = (await generation.result).choices;
    message.finishReason = choice.finishReason;
    message.figures = figuresOf(choice, started, first);
  } catch (error) {
    if (!(error instanceof InferEngineError)) throw error;
    message.failure = { message: sentence(error.message), remedy: remedyOf(error) };
  }
  delete message.pending;
  if (running.get(conversation.id) === generation) running.delete(conversation.id);
  store.saveNow();
  if (conversation === current) {
    draw();
    const callsTools = message.finishReason === "tool_calls";
    $("live").textContent = message.failure ? "The answer failed." : callsTools ? "The model called tools." : "Answer complete.";
  } else drawConversations();
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

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

function stop() {
  running.get(current?.id)?.cancel();
}

/** Resume the answers that were being written when the page was left. */
function resumePending() {
  for (const conversation of store.conversations) {
    const message = conversation.messages.at(-1);
    if (!message?.pending || running.has(conversation.id)) continue;
    const { requestId, cursor = 0, contextIds, params } = message.pending;
    follow(conversation, message, engine.resume({ requestId, cursors: [cursor], contextIds, params }), null);
  }
}

// -- composer -------------------------------------------------------------------------------------------------------

function drawComposer() {
  const busy = running.has(current?.id);
  const button = $("send");
  button.classList.toggle("busy", busy);
  button.setAttribute("aria-label", busy ? "Stop" : "Send");
  button.disabled = !busy && !$("composer-input").value.trim();
}

function grow() {
  const input = $("composer-input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  drawComposer();
}

/** Show the answer format and the tools under the message box. Each button opens its field. */
function drawModes() {
  const { json, schema, tools } = store.settings;
  const modes = [];
  if (json) modes.push([schema.trim() ? "JSON with a schema" : "JSON", "json"]);
  try {
    const { length } = readTools(tools);
    if (length) modes.push([length === 1 ? "1 tool" : `${length} tools`, "tools"]);
  } catch {
    modes.push(["Invalid tools", "tools"]);
  }
  const buttons = modes.map(([text, field]) => {
    const button = make("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => drawer.openAt(field));
    return button;
  });
  $("modes").replaceChildren(...buttons);
  $("modes").hidden = !modes.length;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = $("composer-input");
  if (running.has(current?.id)) {
    if (event.submitter) stop(); // the button was pressed; Enter must not stop an answer
    return;
  }
  const text = input.value.trim();
  if (!text) return;
  input.value = "";
  grow();
  send(text);
});
$("composer-input").addEventListener("input", grow);
$("composer-input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || drawer.isOpen) return;
  const typing = event.target instanceof HTMLElement && event.target.matches("input, textarea, select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("composer-input").focus();
  } else if (event.key === "Escape") {
    if (!closeDrawers()) stop();
  }
});

// -- page -----------------------------------------------------------------------------------------------------------

async function copy(text, button) {
  if (!(await copyText(text))) {
    $("live").textContent = "The browser does not allow copying.";
    return;
  }
  const use = button.querySelector("use");
  const before = use.getAttribute("href");
  if (before === "#i-check") return;
  use.setAttribute("href", "#i-check");
  $("live").textContent = "Copied.";
  setTimeout(() => use.setAttribute("href", before), 1200);
}

function stayAtEnd() {
  const scroll = $("scroll");
  if (following) scroll.scrollTop = scroll.scrollHeight;
  $("to-end").hidden = following;
}
messages.onDrawn = stayAtEnd;

$("scroll").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  following = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  $("to-end").hidden = following;
}, { passive: true });
$("to-end").addEventListener("click", () => {
  following = true;
  stayAtEnd();
  $("composer-input").focus();
});
$("log").addEventListener("click", (event) => {
  const button = event.target instanceof Element ? event.target.closest("[data-copy]") : null;
  if (button) copy(button.closest("pre").querySelector("code").textContent, button);
});

function drawScrim() {
  const { classList } = document.body;
  $("scrim").hidden = !classList.contains("sidebar-open") && (WIDE.matches || !classList.contains("panel-open"));
  const shown = WIDE.matches ? !classList.contains("panel-closed") : classList.contains("panel-open");
  $("toggle-panel").setAttribute("aria-expanded", String(shown));
  engine.subscribeStats(shown ? 1 : 0);
}

function closeDrawers() {
  const { classList } = document.body;
  const wasOpen = classList.contains("sidebar-open") || (!WIDE.matches && classList.contains("panel-open"));
  classList.remove("sidebar-open");
  if (!WIDE.matches) classList.remove("panel-open");
  drawScrim();
  return wasOpen;
}

$("new-chat").addEventListener("click", () => open(null));
$("open-sidebar").addEventListener("click", () => {
  document.body.classList.add("sidebar-open");
  drawScrim();
  $("close-sidebar").focus();
});
for (const id of ["close-sidebar", "close-panel", "scrim"]) $(id).addEventListener("click", closeDrawers);
$("toggle-panel").addEventListener("click", () => {
  document.body.classList.toggle(WIDE.matches ? "panel-closed" : "panel-open");
  drawScrim();
});
WIDE.addEventListener("change", closeDrawers);
$("toggle-theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = dark ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("inferengine.theme", theme);
  } catch {
    // storage is off: the choice holds for this page
  }
});
drawer.onChange = drawModes;
drawer.onClose = () => {
  engine.useKey(store.settings.key);
  $("composer-input").focus();
};

for (const [kind, text] of EXAMPLES) {
  const example = make("button", "example");
  example.type = "button";
  example.append(make("small", "", kind), text);
  example.addEventListener("click", () => send(text));
  $("examples").append(example);
}

// -- engine ---------------------------------------------------------------------------------------------------------

function showEngine() {
  engineStatus.show();
  drawer.showDefaults(engine.hello?.model?.defaults);
}

engine.addEventListener("hello", () => {
  showEngine();
  resumePending();
});
engine.addEventListener("state", showEngine);
engine.addEventListener("stats", (event) => panel.show(event.detail));
engine.addEventListener("status", () => engineStatus.show());
engine.addEventListener("problem", ({ detail }) => engineStatus.showProblem(`${sentence(detail.message)} ${detail.remedy}`.trim()));

draw();
drawModes();
engineStatus.show();
grow();
if (!matchMedia("(pointer: coarse)").matches) $("composer-input").focus();
