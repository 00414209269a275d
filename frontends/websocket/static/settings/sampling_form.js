// @ts-check
/** The inputs of the sampling parameters, made from the server's own list: a new parameter appears by itself. */

import { make } from "../elements.js";
import { SAMPLING_FIELDS } from "./sampling_fields.js";
import { SAMPLING_NAMES, kindOf } from "./sampling_params.js";

/** These are always shown; the others are folded. */
const FIRST = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop"];
const ELSEWHERE = ["logprobs"];
const SLIDERS = { temperature: 0.05, top_p: 0.05 };
const OFF = { temperature: 1, top_p: 1 }; // positions of sliders without a value and without a default of the model
const OFF_AT_ZERO = ["top_k", "min_p"];
const LABELS = {
  temperature: "Temperature", top_p: "Top-p", top_k: "Top-k", min_p: "Min-p", max_tokens: "Max tokens", min_tokens: "Min tokens",
  seed: "Seed", stop: "Stop strings", repetition_penalty: "Repetition penalty", presence_penalty: "Presence penalty",
  frequency_penalty: "Frequency penalty", include_stop_str_in_output: "Show the stop string", skip_special_tokens: "Hide special tokens",
  stop_token_ids: "Stop token ids", ignore_eos: "Ignore the end token", logit_bias: "Logit bias", allowed_token_ids: "Allowed token ids",
  bad_words_ids: "Forbidden token sequences", logprobs: "Token probabilities",
};
const HELP = {
  temperature: "0 always picks the most likely token. Higher is more varied.",
  top_p: "Only the most likely tokens that together reach this probability are used",
  seed: "The same seed with the same settings gives the same answer",
  stop: "One a line; the answer ends before it. \\n stands for a line break.",
  top_k: "", min_p: "", max_tokens: "",
};
const PLACEHOLDERS = { max_tokens: "as many as fit", seed: "random", ids: "42, 1337", bias: "42: -100", id_lists: "42 7\n1337" };

/** The label of a parameter; its name where the page knows no better one. */
export function labelOf(name) {
  return LABELS[name] ?? name;
}

/** Fill the two containers with one input for each parameter. */
export function buildSamplingForm(first, rest) {
  const names = [...FIRST, ...SAMPLING_NAMES.filter((name) => !FIRST.includes(name) && !ELSEWHERE.includes(name))];
  let pair = null;
  for (const name of names) {
    const container = FIRST.includes(name) ? first : rest;
    const field = fieldOf(name);
    const isShort = kindOf(name) === "number" && !(name in SLIDERS) && name !== "seed";
    if (!isShort) {
      container.append(field);
      pair = null;
    } else if (pair && pair.parentElement === container) {
      pair.append(field);
      pair = null;
    } else {
      pair = make("div", "pair");
      pair.append(field);
      container.append(pair);
    }
  }
}

/** Show the model's default in an input that has no value of its own. */
export function showDefault(input, defaults) {
  const { name } = input;
  const standard = defaults[name] ?? SAMPLING_FIELDS[name].default;
  if (name in SLIDERS) {
    input.dataset.own = "";
    input.value = defaults[name] ?? OFF[name];
  } else input.placeholder = PLACEHOLDERS[name] ?? (standard === null || (OFF_AT_ZERO.includes(name) && standard <= 0) ? "off" : String(standard));
}

function fieldOf(name) {
  const kind = kindOf(name);
  return kind === "boolean" ? checkOf(name) : kind === "number" ? numberOf(name) : textOf(name, kind);
}

function numberOf(name) {
  const { type, minimum, maximum, exclusiveMinimum } = SAMPLING_FIELDS[name].schema;
  const input = make("input");
  const isSlider = name in SLIDERS;
  input.type = isSlider ? "range" : "number";
  input.min = String(minimum ?? (isSlider ? SLIDERS[name] : exclusiveMinimum));
  input.max = String(maximum);
  input.step = String(SLIDERS[name] ?? (type === "integer" ? 1 : "any"));
  if (!isSlider) input.inputMode = type === "integer" && minimum >= 0 ? "numeric" : "text";
  return wrap(name, input, isSlider);
}

function textOf(name, kind) {
  const input = make("textarea");
  input.rows = 2;
  input.className = "code";
  input.spellcheck = false;
  input.placeholder = PLACEHOLDERS[kind] ?? "none";
  return wrap(name, input, false);
}

function wrap(name, input, hasOutput) {
  const field = make("div", "field");
  const label = make("label", "name", labelOf(name));
  Object.assign(input, { id: `p-${name}`, name });
  label.htmlFor = input.id;
  field.append(label);
  if (hasOutput) {
    const output = make("output");
    output.htmlFor.add(input.id);
    field.append(output);
  }
  const error = make("small", "error");
  error.id = `${input.id}-error`;
  error.setAttribute("role", "status");
  input.setAttribute("aria-describedby", error.id);
  field.append(input, ...help(name), error);
  return field;
}

function checkOf(name) {
  const label = make("label", "check");
  const input = make("input");
  Object.assign(input, { id: `p-${name}`, name, type: "checkbox" });
  label.append(input, make("span", "name", labelOf(name)), ...help(name));
  return label;
}

function help(name) {
  const { meaning } = SAMPLING_FIELDS[name];
  const text = HELP[name] ?? meaning.charAt(0).toUpperCase() + meaning.slice(1);
  return text ? [make("small", "", text)] : [];
}
