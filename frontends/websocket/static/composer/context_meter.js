// @ts-check
/** How much of the model's context the chat takes: exact up to the last answer, estimated for what is not sent yet. */

const FIRST_GUESS = 4; // characters of a token, until an answer says how many there are
const NEARLY_FULL = 0.85;

/** Draws a meter and a line of text. */
export class ContextMeter {
  constructor(document) {
    this._box = document.getElementById("context");
    this._meter = document.getElementById("context-meter");
    this._text = document.getElementById("context-text");
  }

  /** Draw it. `path`: the messages that are shown. `unsent`: characters of the draft. `most`: the model's length. */
  show(path, unsent, most) {
    this._box.hidden = !most || (!path.length && !unsent);
    if (this._box.hidden) return;
    const { tokens, isExact } = contextTokens(path, unsent);
    const share = tokens / most;
    this._meter.max = most;
    this._meter.high = most * NEARLY_FULL;
    this._meter.value = Math.min(tokens, most);
    const state = share > 1 ? "full" : share > NEARLY_FULL ? "nearly" : "";
    this._box.dataset.state = state;
    const count = `${isExact ? "" : "about "}${tokens.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
    this._text.textContent = state === "full" ? `${count}: more than the model takes. Shorten the message or begin a new chat.`
      : state ? `${count}: the context is nearly full` : count;
  }
}

/** Tokens of the messages and of `unsent` further characters. `isExact`: all of them were counted by the engine. */
export function contextTokens(path, unsent) {
  const last = path.findLastIndex(({ figures, pending }) => figures?.promptTokens != null || pending?.promptTokens != null);
  if (last < 0) {
    const characters = path.reduce((sum, message) => sum + charactersOf(message), unsent);
    return { tokens: Math.ceil(characters / FIRST_GUESS), isExact: characters === 0 };
  }
  const { figures, pending } = path[last];
  const counted = figures?.promptTokens != null ? figures.promptTokens + (figures.tokens ?? 0) : pending.promptTokens + (pending.cursor ?? 0);
  const known = path.slice(0, last + 1).reduce((sum, message) => sum + charactersOf(message), 0);
  const rest = path.slice(last + 1).reduce((sum, message) => sum + charactersOf(message), unsent);
  const perToken = Math.min(8, Math.max(1, known / Math.max(1, counted)));
  return { tokens: counted + Math.ceil(rest / perToken), isExact: rest === 0 };
}

function charactersOf({ content, reasoning = "", files = [], toolCalls = [] }) {
  const more = [...files.map(({ text }) => text), ...toolCalls.map((call) => call.arguments)];
  return content.length + reasoning.length + more.reduce((sum, text) => sum + text.length, 0);
}
