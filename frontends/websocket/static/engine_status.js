// @ts-check
/** The bar at the top: the model, the state of its engine, and problems with the connection. */

import { stateText } from "./stats_panel.js";

const BLINK_MS = 700; // a connection that returns sooner is not reported
const PROBLEM_MS = 8000;
const LOST = "The connection was lost. Reconnecting automatically.";
const UNREACHABLE = "This page cannot connect. If the server asks for an API key, enter it under Parameters.";
const NOT_RUNNING = "The engine is not running. Start it with “inferengine up”. This page then connects automatically.";
const STOPPING = "The engine is shutting down. Running answers are finished; new requests are refused.";

/** Shows the state of the engine and of the connection to it. */
export class EngineStatus {
  /** `apiKey()`: the key that the page sends. */
  constructor(document, engine, panel, apiKey) {
    this._find = (id) => document.getElementById(id);
    this._engine = engine;
    this._panel = panel;
    this._apiKey = apiKey;
    this._timer = null;
  }

  /** Draw the current state of the socket. */
  show() {
    const { hello, status } = this._engine;
    const open = status === "open";
    const state = open ? hello?.engine.state ?? "" : "";
    const model = hello?.model;
    this._find("engine-dot").dataset.state = state || (hello ? "UNAVAILABLE" : "");
    if (model || !hello) this._find("model-name").textContent = model?.name ?? "Connecting";
    else this._find("model-name").textContent = "Engine";
    const progress = hello?.engine.progress;
    const share = state === "STARTING" && progress?.[1] ? ` ${Math.round(progress[1] * 100)} %` : "";
    this._find("model-state").textContent = state === "READY" ? "" : open ? `${stateText(state)}${share}` : "";
    if (model) {
      this._find("empty-note").textContent = model.chat === false
        ? `${model.name} has no chat template. It continues your text instead of answering.`
        : `Your messages are answered by ${model.name}, which runs on this server.`;
    }
    this._panel.showState(open ? state : "UNAVAILABLE");
    this._showConnection(open, state);
  }

  /** Show a problem for a few seconds that belongs to no answer. */
  showProblem(text) {
    clearTimeout(this._timer);
    this._notice(text);
    this._timer = setTimeout(() => this._notice(""), PROBLEM_MS);
  }

  _showConnection(open, state) {
    clearTimeout(this._timer);
    if (!open) {
      this._timer = setTimeout(() => this._showUnreachable(), BLINK_MS);
    } else if (state === "UNAVAILABLE") this._timer = setTimeout(() => this._notice(NOT_RUNNING), BLINK_MS);
    else this._notice(state === "DRAINING" ? STOPPING : "");
  }

  /** Show why there is no connection. A browser does not tell a page why a socket was refused, so ask the server. */
  async _showUnreachable() {
    const reconnect = () => this._engine.retryNow();
    if (this._engine.hello) {
      this._notice(LOST, reconnect);
      return;
    }
    let reason = "";
    try {
      const key = this._apiKey();
      const answer = await fetch("v1/ws", { method: "POST", headers: key ? { authorization: `Bearer ${key}` } : {} });
      reason = (await answer.json()).reason;
    } catch {
      // it cannot be reached over HTTP either
    }
    if (this._engine.status !== "open") this._notice(reason || UNREACHABLE, reconnect);
  }

  /** Show one line of text, with a button where there is an `action`. Empty text hides it. */
  _notice(text, action = null) {
    this._find("notice-text").textContent = text;
    this._find("notice-action").hidden = !action;
    this._find("notice-action").onclick = action;
    this._find("notice").hidden = !text;
  }
}
