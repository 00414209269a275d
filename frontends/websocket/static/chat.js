// @ts-check
/** The chat page: wires the browser client, the store and the parts of the page together. */

import { InferEngineError, InferEngineSocket } from "./client.js";
import { icon, make } from "./markdown.js";
import { MessageList } from "./messages.js";
import { Panel, stateText } from "./panel.js";
import { SettingsDrawer } from "./settings.js";
import { Store, paramsOf } from "./store.js";

const EXAMPLES = [
  ["A question about itself", "Who are you?"],
  ["A short story", "Tell me a story about a fox"],
  ["How serving works", "What is continuous batching?"],
  ["Text to JSON", "Extract the name and city as JSON: My name is Anna and I live in Lisbon."],
];
const NEAR_END_PX = 80;
const WIDE = matchMedia("(min-width: 1181px)");

const $ = (id) => document.getElementById(id);
const store = new Store();
const panel = new Panel(document);
const drawer = new SettingsDrawer(document, store);
const engine = new InferEngineSocket(new URL("v1/ws", location.href.replace(/^http/, "ws")).href, {
  apiKey: store.settings.key,
});
const messages = new MessageList($("log"), { copy, edit, retry });
/** Answers being written: conversation id → generation. A conversation in the background goes on. */
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
  const items = store.conversations.map((conversation) => {
    const item = make("li", "conversation");
    item.classList.toggle("current", conversation === current);
    item.classList.toggle("busy", running.has(conversation.id));
    const name = make("button", "open", conversation.title);
    name.type = "button";
    if (conversation === current) name.setAttribute("aria-current", "page");
    name.addEventListener("click", () => open(conversation));
    const remove = make("button", "icon delete");
    remove.type = "button";
    remove.setAttribute("aria-label", `Delete “${conversation.title}”`);
    remove.append(icon("trash"));
    remove.addEventListener("click", () => {
      running.get(conversation.id)?.cancel();
      running.delete(conversation.id);
      store.remove(conversation.id);
      if (conversation === current) open(null);
      else drawConversations();
    });
    item.append(name, remove);
    return item;
  });
  $("conversations").replaceChildren(...items);
}

// -- asking and answering -------------------------------------------------------------------------------------------

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
  $("composer-input").focus(); // the button that was pressed is gone
}

function retry(index) {
  stop();
  current.messages.length = index;
  answer(current);
  $("composer-input").focus();
}

function answer(conversation) {
  const history = conversation.messages
    .filter((message) => message.role === "user" || message.content)
    .map(({ role, content }) => ({ role, content }));
  const system = store.settings.system.trim();
  const params = paramsOf(store.settings);
  const turns = system ? [{ role: "system", content: system }, ...history] : history;
  const continues = engine.hello?.model?.chat === false; // a model without a chat template only goes on with a text
  const generation = engine.generate({
    ...(continues ? { prompt: turns.map((turn) => turn.content).join("\n\n") } : { messages: turns }),
    params,
    responseFormat: store.settings.json ? { type: "json_object" } : undefined,
    label: "chat",
  });
  const message = { role: "assistant", content: "", pending: { requestId: generation.requestId, params } };
  conversation.messages.push(message);
  store.touch(conversation);
  follow(conversation, message, generation, performance.now());
}

/** Read a generation into its message until it ends. `started` is null for one that is resumed. */
async function follow(conversation, message, generation, started) {
  running.set(conversation.id, generation);
  if (conversation === current) draw();
  else drawConversations();
  let first = null;
  try {
    for await (const delta of generation) {
      first ??= performance.now();
      message.content += delta.text;
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
    $("live").textContent = message.failure ? "The answer failed." : "Answer complete.";
  } else drawConversations();
}

/** What this page saw, where it saw it; of a resumed answer, what the engine measured. */
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
  return error.field ? `${error.remedy} It is ${error.field}.` : error.remedy;
}

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

function stop() {
  running.get(current?.id)?.cancel();
}

/** Answers that were being written when the page was left go on where they were. */
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

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = $("composer-input");
  if (running.has(current?.id)) {
    if (event.submitter) stop(); // the button; Enter alone must not stop an answer
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
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    return; // no permission, or not a secure context
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
    // it holds for this page
  }
});
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

const BLINK_MS = 700; // a connection that is back sooner is not worth a word
const PROBLEM_MS = 8000;
let noticeTimer = null;

/** One line above the conversation: what is wrong, what to do, and a button where there is something to press. */
function notice(text, action = null) {
  $("notice-text").textContent = text;
  $("notice-action").hidden = !action;
  $("notice-action").onclick = action;
  $("notice").hidden = !text;
}

function showEngine() {
  const open = engine.status === "open";
  const state = open ? engine.hello?.engine.state ?? "" : "";
  const model = engine.hello?.model;
  $("engine-dot").dataset.state = state || (engine.hello ? "UNAVAILABLE" : "");
  if (model || !engine.hello) $("model-name").textContent = model?.name ?? "Connecting";
  else $("model-name").textContent = "Engine";
  const progress = engine.hello?.engine.progress;
  const share = state === "STARTING" && progress?.[1] ? ` ${Math.round(progress[1] * 100)} %` : "";
  $("model-state").textContent = state === "READY" ? "" : open ? `${stateText(state)}${share}` : "";
  if (model) {
    $("empty-note").textContent = model.chat === false
      ? `${model.name} has no chat template: it goes on with your text instead of answering it.`
      : `Answers come from ${model.name}, served by this engine.`;
  }
  panel.showState(open ? state : "UNAVAILABLE");
  showTrouble(open, state);
}

function showTrouble(open, state) {
  clearTimeout(noticeTimer);
  if (!open) {
    const text = engine.hello
      ? "The connection was lost. Trying again by itself."
      : "This page cannot connect. If the server asks for an API key, enter it under Parameters.";
    const tell = () => notice(text, () => engine.retryNow());
    noticeTimer = setTimeout(tell, BLINK_MS);
  } else if (state === "UNAVAILABLE") {
    noticeTimer = setTimeout(
      () => notice("The engine is not reachable. Start it with “inferengine up”; this page notices by itself."),
      BLINK_MS,
    );
  } else if (state === "DRAINING") {
    notice("The engine is about to stop: running answers finish, new ones have to wait.");
  } else notice("");
}

engine.addEventListener("hello", () => {
  showEngine();
  resumePending();
});
engine.addEventListener("state", showEngine);
engine.addEventListener("stats", (event) => panel.show(event.detail));
engine.addEventListener("status", showEngine);
engine.addEventListener("problem", ({ detail }) => {
  notice(`${sentence(detail.message)} ${detail.remedy}`.trim());
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(() => notice(""), PROBLEM_MS);
});

draw();
showEngine();
grow();
if (!matchMedia("(pointer: coarse)").matches) $("composer-input").focus();
