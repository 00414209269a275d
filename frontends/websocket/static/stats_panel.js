// @ts-check
/** The engine's live statistics, with a minute of history as sparklines. */

import { formatMs, formatRate } from "./message_list.js";

const HISTORY = 60;
const WIDTH = 120;
const HEIGHT = 36;
const STATES = { READY: "ready", STARTING: "starting", DRAINING: "finishing running requests", STOPPING: "stopping", UNAVAILABLE: "not reachable" };

/** Shows the statistics of the engine and of the last answer. */
export class StatsPanel {
  constructor(document) {
    this._find = (id) => document.getElementById(id);
    this._rates = [];
    this._kv = [];
  }

  /** Show a stats frame. */
  show(stats) {
    this._push(this._rates, stats.tokens_per_s);
    this._push(this._kv, stats.kv_usage);
    this._text("f-rate", stats.tokens_per_s, formatRate);
    this._text("f-kv", stats.kv_usage, percent);
    this._text("f-running", stats.running);
    this._text("f-waiting", stats.waiting);
    this._text("f-prefix", stats.prefix_hit_rate, percent);
    this._text("f-preempted", stats.preemptions);
    draw(this._find("spark-rate"), this._rates, Math.max(10, ...this._rates) * 1.1);
    draw(this._find("spark-kv"), this._kv, Math.max(0.02, ...this._kv) * 1.1);
    this.showState(stats.state);
  }

  /** Show the engine's state. */
  showState(state) {
    this._find("panel-state").textContent = stateText(state);
  }

  /** Show the figures of the latest answer. */
  showAnswer(figures) {
    this._text("a-ttft", figures?.firstTokenMs, formatMs);
    this._text("a-rate", figures?.tokensPerS, formatRate);
    this._text("a-prompt", figures?.promptTokens);
    this._text("a-tokens", figures?.tokens);
  }

  _push(series, value) {
    series.push(value ?? 0);
    if (series.length > HISTORY) series.shift();
  }

  _text(id, value, format = String) {
    this._find(id).textContent = value == null ? "–" : format(value);
  }
}

/** The words for a state of the engine. */
export function stateText(state) {
  return STATES[state] ?? "";
}

function percent(share) {
  return share > 0 && share < 0.1 ? `${(share * 100).toFixed(1)} %` : `${Math.round(share * 100)} %`;
}

function draw(svg, series, top) {
  const step = WIDTH / (HISTORY - 1);
  const start = HISTORY - series.length;
  const points = series.map((value, index) => {
    const y = HEIGHT - 1 - (Math.min(value, top) / top) * (HEIGHT - 4);
    return `${((start + index) * step).toFixed(2)},${y.toFixed(2)}`;
  });
  const line = `M${points.join("L")}`;
  svg.querySelector(".line").setAttribute("d", line);
  svg.querySelector(".area").setAttribute("d", `${line}L${WIDTH},${HEIGHT}L${(start * step).toFixed(2)},${HEIGHT}Z`);
}
