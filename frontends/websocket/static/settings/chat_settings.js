// @ts-check
/** The settings of one chat: their defaults, how they are stored, and the options of a request. Touches no element. */

import { readSchema, readTools, toolNames } from "../answer_format.js";
import { DEFAULT_SAMPLING } from "./sampling_params.js";

export const FORMATS = ["text", "json", "schema", "choice", "regex", "grammar"];
const TOOL_CHOICES = ["auto", "required", "none"];
const MAX_TEXT_CHARACTERS = 200_000;

/** Texts are stored as they were typed. `model` "" is the served one. `one_call`: no more than one tool call an answer. */
export const DEFAULT_SETTINGS = {
  ...DEFAULT_SAMPLING,
  model: "", reasoning_effort: "",
  format: "text", schema: "", choice: "", regex: "", grammar: "",
  tools: "", tool_choice: "auto", one_call: false,
};

/** Read stored settings: whatever is unknown or of another type has its default. */
export function readSettings(stored) {
  const settings = { ...DEFAULT_SETTINGS };
  if (stored === null || typeof stored !== "object") return settings;
  for (const [name, standard] of Object.entries(DEFAULT_SETTINGS)) {
    const value = stored[name];
    if (standard === null ? Number.isFinite(value) : typeof value === typeof standard) {
      settings[name] = typeof value === "string" ? value.slice(0, MAX_TEXT_CHARACTERS) : value;
    }
  }
  if (stored.json === true && stored.format === undefined) settings.format = settings.schema.trim() ? "schema" : "json"; // earlier versions
  if (!FORMATS.includes(settings.format)) settings.format = "text";
  return settings;
}

/** What differs from the defaults: this is stored with a conversation. */
export function changedSettings(settings) {
  return Object.fromEntries(Object.entries(DEFAULT_SETTINGS).filter(([name, value]) => settings[name] !== value).map(([name]) => [name, settings[name]]));
}

/** Whether two settings ask for the same. */
export function sameSettings(one, other) {
  return Object.keys(DEFAULT_SETTINGS).every((name) => one[name] === other[name]);
}

/** Read the text of an answer format. Throws an Error that says what is wrong. */
export const FORMAT_READERS = {
  schema(text) {
    const schema = readSchema(text);
    if (!schema) throw new Error("Write a JSON schema, such as {\"type\": \"object\"}.");
    return schema;
  },
  choice(text) {
    const choices = text.split("\n").map((line) => line.trim()).filter(Boolean);
    if (!choices.length) throw new Error("Write the answers to choose from, one a line.");
    return [...new Set(choices)];
  },
  regex(text) {
    if (!text) throw new Error("Write a regular expression, such as [A-Z][a-z]+ \\d{4}.");
    return text;
  },
  grammar(text) {
    if (!text.trim()) throw new Error("Write a grammar, such as root ::= \"yes\" | \"no\".");
    return text;
  },
};

/**
 * The options of `generate` for these settings, sampling parameters aside. Throws an Error where a text in them is not
 * valid. `hasResults`: tool results were just added. No call is forced then, or the model would never answer.
 */
export function answerOptions(settings, hasResults) {
  const options = {};
  if (settings.model) options.model = settings.model;
  if (settings.reasoning_effort) options.reasoningEffort = settings.reasoning_effort;
  const { format } = settings;
  if (format === "json") options.responseFormat = { type: "json_object" };
  else if (format === "schema") {
    options.responseFormat = { type: "json_schema", json_schema: { name: "answer", schema: FORMAT_READERS.schema(settings.schema) } };
  } else if (format !== "text") options.structuredOutputs = { [format]: FORMAT_READERS[format](settings[format]) };
  const tools = readTools(settings.tools);
  if (tools.length) {
    const named = toolNames(tools).includes(settings.tool_choice);
    options.tools = tools;
    if (settings.one_call) options.parallelToolCalls = false;
    if (named && !hasResults) options.toolChoice = { type: "function", function: { name: settings.tool_choice } };
    else if (TOOL_CHOICES.includes(settings.tool_choice) && !hasResults) options.toolChoice = settings.tool_choice;
  }
  return options;
}

/** Whether answers of this format are JSON. */
export function isJsonFormat(settings) {
  return settings.format === "json" || settings.format === "schema";
}
