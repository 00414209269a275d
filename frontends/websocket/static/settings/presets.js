// @ts-check
/** Named settings: some that the page brings, and the reader's own, stored in this browser. Touches no element. */

import { changedSettings, readSettings } from "./chat_settings.js";

const KEY = "inferengine.presets";
const MAX_PRESETS = 100;
const MAX_NAME_CHARACTERS = 60;

const BUILT_IN = [
  { name: "Model's defaults", settings: {} },
  { name: "Exact: always the likeliest token", settings: { temperature: 0 } },
  { name: "Varied", settings: { temperature: 1.1, top_p: 0.95, min_p: 0.05 } },
];

/** Reads the presets when they are needed: another tab may have changed them. */
export class Presets {
  /** @param {{ getItem(key: string): string | null, setItem(key: string, value: string): void }} storage */
  constructor(storage) {
    this._storage = storage;
  }

  /** All presets: `{name, settings, isOwn}`. */
  all() {
    return [...BUILT_IN.map((preset) => ({ ...preset, isOwn: false })), ...this._own().map((preset) => ({ ...preset, isOwn: true }))]
      .map(({ settings, ...preset }) => ({ ...preset, settings: readSettings(settings) }));
  }

  /** Store settings under a name; one of that name is replaced. Throws an Error that says what is wrong. */
  save(name, settings) {
    const wanted = name.trim().slice(0, MAX_NAME_CHARACTERS);
    if (!wanted) throw new Error("Give the preset a name.");
    if (BUILT_IN.some((preset) => preset.name === wanted)) throw new Error("This name belongs to a preset of the page. Choose another one.");
    const others = this._own().filter((preset) => preset.name !== wanted);
    if (others.length >= MAX_PRESETS) throw new Error(`${MAX_PRESETS} presets are stored, the most that may be. Delete one first.`);
    this._write([...others, { name: wanted, settings: changedSettings(settings) }]);
    return wanted;
  }

  /** Delete a preset of the reader's own. */
  remove(name) {
    this._write(this._own().filter((preset) => preset.name !== name));
  }

  _own() {
    try {
      const stored = JSON.parse(this._storage.getItem(KEY) ?? "[]");
      return Array.isArray(stored) ? stored.filter((preset) => typeof preset?.name === "string") : [];
    } catch {
      return [];
    }
  }

  _write(presets) {
    try {
      this._storage.setItem(KEY, JSON.stringify(presets));
    } catch {
      throw new Error("The browser does not store this preset: its storage is full or switched off.");
    }
  }
}
