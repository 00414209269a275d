// @ts-check
/** The chat page: wires the browser client, the store and the parts of the page together. */

import { Answers, sentence } from "./answers.js";
import { InferEngineSocket } from "./client.js";
import { ConversationList } from "./conversations/conversation_list.js";
import { ConversationStore } from "./conversations/conversation_store.js";
import { Drafts } from "./conversations/drafts.js";
import { fileName, saveFile, toJson, toMarkdown } from "./conversations/files.js";
import { StorageDialog } from "./conversations/storage_dialog.js";
import { toWebPage } from "./conversations/web_page.js";
import { copyText } from "./copy_text.js";
import { make } from "./elements.js";
import { EngineStatus } from "./engine_status.js";
import { readTools } from "./answer_format.js";
import { MessageList } from "./message_list.js";
import { StatsPanel } from "./stats_panel.js";
import { Attachments } from "./composer/attachments.js";
import { ContextMeter } from "./composer/context_meter.js";
import { Presets } from "./settings/presets.js";
import { SettingsDrawer } from "./settings/settings_drawer.js";
import { SettingsScope } from "./settings/settings_scope.js";
import { SettingsStore, safeStorage } from "./settings_store.js";
import { SystemPrompt } from "./system_prompt.js";
import { Toast } from "./toast.js";

/** @typedef {import("./conversations/conversation_store.js").Conversation} Conversation */

const EXAMPLES = [
  ["About the model", "Who are you?"],
  ["A short story", "Tell me a story about a fox"],
  ["How serving works", "What is continuous batching?"],
  ["Text to JSON", "Extract the name and city as JSON: My name is Anna and I live in Lisbon."],
];
const FORMAT_NAMES = { json: "JSON", schema: "JSON with a schema", choice: "One of these answers", regex: "Regular expression", grammar: "Grammar" };
/** What a screen reader is told at an answer's end, by its finish reason. */
const ENDS = { stop: "Answer complete.", tool_calls: "The model called tools.", length: "The answer reached the token limit.", cancelled: "Answer stopped." };
const NEAR_END_PX = 80;
const SEARCH_WAIT_MS = 120;
const WIDE = matchMedia("(min-width: 1181px)");

const $ = (id) => document.getElementById(id);
const settingsStore = new SettingsStore();
const store = new ConversationStore();
const drafts = new Drafts();
const toast = new Toast($("toast"));
const panel = new StatsPanel(document);
const settings = new SettingsScope(settingsStore, store, () => current);
const contextMeter = new ContextMeter(document);
store.database.onProblem = showStorageProblem;
store.database.onWriting = (is) => document.body.toggleAttribute("data-saving", is); // a page that is left then loses that
await store.open(settingsStore.settings.system);
const engine = new InferEngineSocket(new URL("v1/ws", location.href.replace(/^http/, "ws")).href, {
  apiKey: settingsStore.settings.key,
});
const engineStatus = new EngineStatus(document, engine, panel, () => settingsStore.settings.key);
const messages = new MessageList($("log"), { copy, edit, retry, continueAnswer, sendResults, showVersion });
const conversationList = new ConversationList($("conversations"), $("conversation-menu"), {
  open, remove, pin, save, redraw: drawConversations, rename: (conversation, title) => store.rename(conversation, title),
});
const storageDialog = new StorageDialog(document, store, drawAll);
const answers = new Answers(engine, store, settings, { changed, written, ended });
const systemPrompt = new SystemPrompt(document, (text) => {
  if (current) store.setSystem(current, text);
  else newSystem = text;
  drawModes();
});
/** The open conversation; null is a new chat. @type {Conversation | null} */
let current = null;
/** The system prompt of a new chat where it is not that of the settings. @type {string | null} */
let newSystem = null;
/** What the list shows while something is searched. */
let results = null;
let searchTimer = 0;
/** Answers that were being written when a page was left; null once they are resumed. */
let pending = store.pending();
const drawer = new SettingsDrawer(document, settings, new Presets(safeStorage()));
const attachments = new Attachments(document, { maxBytes: () => engine.hello?.limits?.max_message_bytes ?? Infinity, onChange: drawComposer });
let following = true; // the view stays at the end until the reader scrolls up

// -- conversations ------------------------------------------------------------------------------------------------

async function open(conversation, message = null) {
  if (conversation) await store.load(conversation);
  if (message) store.showMessage(conversation, message);
  current = conversation;
  newSystem = null;
  history.replaceState(null, "", conversation ? `#${conversation.id}` : location.pathname);
  following = !message;
  document.body.classList.remove("sidebar-open");
  $("composer-input").value = drafts.get(current?.id ?? "");
  attachments.open(current?.id ?? "");
  if (conversation && !pending) answers.followOtherTab(conversation);
  drawAll();
  grow();
  if (message) messages.elementOf(message.id)?.scrollIntoView({ block: "center" });
  if (!matchMedia("(pointer: coarse)").matches) $("composer-input").focus();
}

/** The messages that are shown. */
function path() {
  return current ? store.thread(current).path() : [];
}

function drawAll() {
  draw();
  drawModes();
  drawScrim();
}

function draw() {
  const shown = path();
  $("empty").hidden = shown.length > 0;
  $("chat-title").hidden = !shown.length;
  $("chat-title").textContent = current?.title ?? "";
  messages.show(shown, answers.runningIn(current), (message) => store.thread(current).versions(message));
  document.title = current ? `${current.title} · InferEngine` : "InferEngine";
  panel.showAnswer(shown.findLast((message) => message.figures)?.figures);
  drawConversations();
  drawComposer();
  stayAtEnd();
}

function drawConversations() {
  const isBusy = (conversation) => answers.runningIn(conversation) !== undefined;
  if (results) conversationList.showResults(results.filter(({ conversation }) => store.find(conversation.id)), current, isBusy);
  else conversationList.show(store.conversations, current, isBusy);
}

function pin(conversation) {
  store.pin(conversation, !conversation.pinned);
  drawConversations();
}

function remove(conversation) {
  answers.stop(conversation);
  store.remove(conversation);
  const wasOpen = conversation === current;
  if (wasOpen) open(null);
  else drawConversations();
  toast.show(`Deleted “${conversation.title}”. It is kept for 30 days.`, "Undo", () => {
    store.restore(conversation);
    if (wasOpen) open(conversation);
    else drawConversations();
  });
}

/** Save one conversation as a file. `kind`: json, md or html. */
async function save(conversation, kind) {
  const shown = (await store.load(conversation)).path();
  const name = fileName(conversation.title, kind);
  if (kind === "md") saveFile(name, "text/markdown", toMarkdown(conversation, shown));
  else if (kind === "html") saveFile(name, "text/html", toWebPage(conversation, shown));
  else saveFile(name, "application/json", toJson(await store.withMessages([conversation])));
}

/** Another tab has changed these conversations. */
store.onChange = (ids) => {
  if (current && !store.find(current.id)) {
    const deleted = current;
    toast.show(`“${deleted.title}” was deleted in another tab.`, "Undo", () => {
      store.restore(deleted);
      open(deleted);
    });
    open(null);
  } else if (current && ids.includes(current.id)) {
    if (!pending) answers.followOtherTab(current);
    draw();
    drawModes();
  } else drawConversations();
};

/** Show that the browser does not store what is written here. `error` null: it does again. */
function showStorageProblem(error) {
  const isFull = error?.name === "QuotaExceededError";
  $("storage-notice").hidden = !error;
  $("storage-text").textContent = !error ? "" : isFull
    ? "The browser's storage is full. What is written now is in this tab only and ends with it. Export it, or delete conversations for good."
    : `The browser does not store conversations (${error.message ?? error}). They end with this tab. Export what you need.`;
}

async function search() {
  const text = $("search").value;
  const found = text.trim() ? await store.search(text) : null;
  if ($("search").value !== text) return; // typed on meanwhile
  results = found;
  drawConversations();
}

// -- requests and answers -------------------------------------------------------------------------------------------

function send(text, files = []) {
  const isNew = !current;
  current ??= store.create(text || files[0].name, newSystem ?? settingsStore.settings.system, settings.ofNewChat());
  if (isNew) history.replaceState(null, "", `#${current.id}`);
  ask(store.thread(current).leaf, [userMessage(text, files)]);
  attachments.open(current.id);
}

function userMessage(text, files = []) {
  return { role: "user", content: text, ...(files.length && { files }) };
}

/** Add messages below `parent`, and let the model answer them. */
function ask(parent, added) {
  following = true;
  store.append(current, parent, added);
  answers.start(current, store.thread(current).leaf);
  $("composer-input").focus(); // the pressed button may be gone
}

function edit(message, text) {
  answers.stop(current);
  ask(message.parent, [userMessage(text, message.files)]);
}

function retry(message) {
  following = true;
  const isEmpty = message.failure && !message.content && !message.toolCalls?.length;
  answers.start(current, message.parent, isEmpty ? message : null);
  $("composer-input").focus();
}

function continueAnswer(message) {
  following = true;
  answers.continueAnswer(current, message);
  $("composer-input").focus();
}

/** Append the results of tool calls as the conversation's next messages, and ask the model to continue. */
function sendResults(list) {
  ask(store.thread(current).leaf, list.map(({ callId, content }) => ({ role: "tool", callId, content })));
}

/** Show the version before (-1) or after (1) this one of a message. */
function showVersion(message, step) {
  const versions = store.thread(current).versions(message);
  const version = versions[versions.indexOf(message) + step];
  if (!version) return;
  following = false;
  store.showVersion(current, version);
  draw();
  const buttons = messages.elementOf(version.id)?.querySelectorAll("[data-step]") ?? [];
  const [same] = [...buttons].filter((button) => button.dataset.step === String(step) && !button.disabled);
  (same ?? [...buttons].find((button) => !button.disabled))?.focus();
}

function changed(conversation) {
  if (conversation === current) draw();
  else drawConversations();
}

function written(conversation, message) {
  if (conversation === current && path().at(-1) === message) {
    messages.updateLast(message);
    drawContext();
  }
}

function ended(conversation, message) {
  if (conversation !== current) return;
  $("live").textContent = message.failure ? "The answer failed." : ENDS[message.finishReason] ?? "The answer ended early.";
}

// -- composer -------------------------------------------------------------------------------------------------------

function drawComposer() {
  const busy = answers.runningIn(current) !== undefined;
  const button = $("send");
  button.classList.toggle("busy", busy);
  button.setAttribute("aria-label", busy ? "Stop" : "Send");
  button.disabled = !busy && !$("composer-input").value.trim() && !attachments.files.length;
  drawContext();
}

function drawContext() {
  const unsent = attachments.files.reduce((sum, { text }) => sum + text.length, $("composer-input").value.length);
  contextMeter.show(path(), unsent, engine.hello?.model?.max_model_len ?? 0);
}

function grow() {
  const input = $("composer-input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  drawComposer();
}

/** Show the system prompt, the answer format and the tools under the message box. Each button opens its field. */
function drawModes() {
  const { format, tools, model, system } = settings.settings;
  const modes = [];
  systemPrompt.show(current ? current.system ?? "" : newSystem ?? system);
  if (systemPrompt.text) modes.push([`System prompt: ${systemPrompt.text}`, () => systemPrompt.open()]);
  if (model) modes.push([model, () => drawer.openAt("model")]);
  if (format !== "text") modes.push([FORMAT_NAMES[format], () => drawer.openAt(format === "json" ? "format" : format)]);
  try {
    const { length } = readTools(tools);
    if (length) modes.push([length === 1 ? "1 tool" : `${length} tools`, () => drawer.openAt("tools")]);
  } catch {
    modes.push(["Invalid tools", () => drawer.openAt("tools")]);
  }
  const buttons = modes.map(([text, action]) => {
    const button = make("button", "", text);
    button.type = "button";
    button.addEventListener("click", action);
    return button;
  });
  $("modes").replaceChildren(...buttons);
  $("modes").hidden = !modes.length;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = $("composer-input");
  if (answers.runningIn(current)) {
    if (event.submitter) answers.stop(current); // the button was pressed; Enter must not stop an answer
    return;
  }
  const text = input.value.trim();
  const files = attachments.take();
  if (!text && !files.length) return;
  drafts.set(current?.id ?? "", "");
  input.value = "";
  grow();
  send(text, files);
});
$("composer-input").addEventListener("input", () => {
  drafts.set(current?.id ?? "", $("composer-input").value);
  grow();
});
$("composer-input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || document.querySelector("dialog[open], :popover-open")) return;
  const typing = event.target instanceof HTMLElement && event.target.matches("input, textarea, select");
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    $("composer-input").focus();
  } else if (event.key === "Escape") {
    if (!closeDrawers()) answers.stop(current);
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
  if (following) scroll.scrollTop = path().length ? scroll.scrollHeight : 0;
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
$("search").addEventListener("input", () => {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(search, SEARCH_WAIT_MS);
});
$("search").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !$("search").value) return;
  event.preventDefault();
  $("search").value = "";
  search();
});
$("storage-export").addEventListener("click", () => storageDialog.exportAll());
addEventListener("hashchange", () => open(store.find(location.hash.slice(1))));
addEventListener("beforeunload", (event) => {
  if (store.database.numUnsaved) event.preventDefault(); // the browser asks
});
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
settingsStore.onChange = () => {
  drawer.show();
  engine.useKey(settingsStore.settings.key);
};
drawer.onClose = () => {
  engine.useKey(settingsStore.settings.key);
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
  drawer.showModel(engine.hello?.model ?? {});
  drawContext();
}

engine.addEventListener("hello", async () => {
  showEngine();
  const left = await pending;
  pending = null;
  if (left) answers.resume(left);
});
engine.addEventListener("state", showEngine);
engine.addEventListener("stats", (event) => panel.show(event.detail));
engine.addEventListener("status", () => engineStatus.show());
engine.addEventListener("problem", ({ detail }) => engineStatus.showProblem(`${sentence(detail.message)} ${detail.remedy}`.trim()));

engineStatus.show();
const early = $("composer-input").value.trim(); // typed while the storage was being opened
const first = store.find(location.hash.slice(1));
if (early) {
  const draft = drafts.get(first?.id ?? "").trim();
  drafts.set(first?.id ?? "", !draft || draft === early ? early : `${draft}\n${early}`); // a browser restores what it held
}
open(first);
