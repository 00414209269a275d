// @ts-check
/** The sampling parameters in the settings: as they are typed, and as a request has them. Touches no element. */

import { SAMPLING_FIELDS } from "./sampling_fields.js";

/** What the page does not offer: it shows one choice. */
const LEFT_OUT = ["n"];

/** The names of the parameters that the page offers. */
export const SAMPLING_NAMES = Object.keys(SAMPLING_FIELDS).filter((name) => !LEFT_OUT.includes(name));

/** How a parameter is typed. @returns {"number" | "boolean" | "texts" | "ids" | "id_lists" | "bias"} */
export function kindOf(name) {
  const { type, items } = SAMPLING_FIELDS[name].schema;
  if (type === "integer" || type === "number") return "number";
  if (type === "boolean") return "boolean";
  if (type === "array") return items.type === "array" ? "id_lists" : "ids";
  return type === "object" ? "bias" : "texts";
}

/** The settings of parameters that were not touched: null for a number, an empty text for a list. */
export const DEFAULT_SAMPLING = Object.fromEntries(SAMPLING_NAMES.map((name) => {
  const kind = kindOf(name);
  return [name, kind === "number" ? null : kind === "boolean" ? SAMPLING_FIELDS[name].default : ""];
}));

const READERS = { texts: readTexts, ids: readIds, id_lists: readIdLists, bias: readBias };

/** Read one parameter as it was typed; undefined where nothing was. Throws an Error that says what is wrong. */
export function readParam(name, value) {
  const kind = kindOf(name);
  if (kind === "number") return value ?? undefined;
  if (kind === "boolean") return value === SAMPLING_FIELDS[name].default ? undefined : value;
  return value.trim() || (kind === "texts" && value) ? READERS[kind](value) : undefined;
}

/** The sampling parameters of a request: those that are set. Throws an Error that names what is wrong. */
export function samplingParams(settings) {
  const params = {};
  for (const name of SAMPLING_NAMES) {
    try {
      const value = readParam(name, settings[name]);
      if (value !== undefined) params[name] = value;
    } catch (error) {
      throw new Error(`${name}: ${error.message}`);
    }
  }
  return params;
}

/** One text a line. `\n`, `\t` and `\\` stand for a line break, a tab and a backslash. */
function readTexts(value) {
  const escapes = { n: "\n", t: "\t", "\\": "\\" };
  return value.split("\n").filter((line) => line !== "").map((line) => line.replace(/\\([nt\\])/g, (_, letter) => escapes[letter]));
}

function readIds(value) {
  return value.split(/[\s,]+/).filter(Boolean).map((word) => {
    if (!/^\d{1,9}$/.test(word)) throw new Error(`“${word.slice(0, 20)}” is no token id. Write whole numbers, separated by commas.`);
    return Number(word);
  });
}

function readIdLists(value) {
  return value.split("\n").filter((line) => line.trim()).map(readIds);
}

function readBias(value) {
  const pairs = value.split(/[\n,]+/).filter((line) => line.trim()).map((line) => {
    const found = /^\s*(\d{1,9})\s*[:=\s]\s*([+-]?\d+(?:\.\d+)?)\s*$/.exec(line);
    if (!found || Math.abs(Number(found[2])) > 100) throw new Error(`“${line.trim().slice(0, 20)}” is no bias. Write “token id: number from -100 to 100”, one a line.`);
    return [found[1], Number(found[2])];
  });
  return Object.fromEntries(pairs);
}
