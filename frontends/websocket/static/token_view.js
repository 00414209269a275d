// @ts-check
/** The tokens of an answer, coloured by their probability; the alternatives of each on hover, focus and touch. */

import { make } from "./elements.js";

const MAX_STORED = 20_000; // tokens of a message that are kept
const STEPS = [0.9, 0.6, 0.3, 0.1]; // below each the colour is stronger

/** @typedef {[string, number, [string, number][]]} StoredToken text, log-probability, alternatives */

/** Add what a delta says of its tokens to a message. */
export function addTokens(message, logprobs) {
  const tokens = (message.tokens ??= []);
  for (const { token, logprob, top, top_tokens: texts } of logprobs) {
    if (tokens.length >= MAX_STORED) return;
    tokens.push([token, round(logprob), top.map(([, other], index) => [texts[index], round(other)])]);
  }
}

/** Check the tokens of an imported message. Throws an Error that names the place. */
export function readTokens(value, place) {
  const isPair = (pair) => typeof pair?.[0] === "string" && Number.isFinite(pair[1]);
  if (!Array.isArray(value) || !value.every((token) => isPair(token) && Array.isArray(token[2]) && token[2].every(isPair))) {
    throw new Error(`${place} must be a list of tokens with their log-probabilities.`);
  }
  return value.slice(0, MAX_STORED).map(([text, logprob, top]) => [text, logprob, top.slice(0, 20).map(([other, its]) => [other, its])]);
}

/** Create the view of an answer's tokens. The arrow keys move from one to the next. @param {StoredToken[]} tokens */
export function tokenView(tokens) {
  const view = make("div", "tokens");
  view.setAttribute("role", "group");
  view.setAttribute("aria-label", "Tokens with their probabilities. The arrow keys move between them.");
  const text = make("div", "token-text");
  const tip = make("div", "token-tip");
  tip.setAttribute("role", "status");
  const spans = tokens.map(([token, logprob], index) => {
    const span = make("span", `token p${STEPS.filter((step) => Math.exp(logprob) < step).length}`, token);
    span.dataset.index = String(index);
    span.tabIndex = index ? -1 : 0;
    return span;
  });
  text.append(...spans);
  view.append(text, tip);
  const show = (target) => {
    const span = target instanceof Element ? target.closest(".token") : null;
    if (!span) return;
    view.querySelector(".token.shown")?.classList.remove("shown");
    span.classList.add("shown");
    tip.replaceChildren(...alternatives(tokens[Number(span.dataset.index)]));
  };
  view.addEventListener("pointerover", ({ target }) => show(target));
  view.addEventListener("click", ({ target }) => show(target));
  view.addEventListener("focusin", ({ target }) => show(target));
  view.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const span = event.target instanceof Element ? event.target.closest(".token") : null;
    const next = step && span ? spans[Number(span.dataset.index) + step] : null;
    if (!next) return;
    event.preventDefault();
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  if (tokens.length) show(spans[0]);
  return view;
}

/** The token and its alternatives, each with its probability, the likeliest first. */
function alternatives([text, logprob, top]) {
  const isListed = top.some(([other, its]) => other === text && its === logprob);
  const rows = (isListed ? top : [...top, [text, logprob]]).toSorted((a, b) => b[1] - a[1]);
  const list = make("ol");
  for (const [other, its] of rows) {
    const row = make("li", other === text && its === logprob ? "chosen" : "");
    const share = Math.exp(its);
    const bar = make("meter");
    bar.value = share;
    bar.setAttribute("aria-hidden", "true");
    row.append(make("code", "", visible(other)), bar, make("span", "", percent(share)));
    list.append(row);
  }
  return [list];
}

/** A token with its white space made visible. */
function visible(text) {
  return text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥") || "(no text)";
}

function percent(share) {
  return share >= 0.1 ? `${Math.round(share * 100)} %` : share >= 0.001 ? `${(share * 100).toFixed(1)} %` : "< 0.1 %";
}

function round(logprob) {
  return Math.round(logprob * 1e4) / 1e4;
}
