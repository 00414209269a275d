// @ts-check
/** The settings, stored in this browser and shared by all tabs of this page. Touches no element. */

import { DEFAULT_SETTINGS as CHAT_DEFAULTS, readSettings } from "./settings/chat_settings.js";

const KEY = "inferengine.settings";

/** The settings of new chats, their system prompt, and the API key of all. */
export const DEFAULT_SETTINGS = { ...CHAT_DEFAULTS, system: "", key: "" };

/** Reads the settings at the start, and writes changes back. */
export class SettingsStore {
  constructor(storage = safeStorage()) {
    this._storage = storage;
    this.settings = this._read();
    /** Called when another tab has changed them. */
    this.onChange = () => {};
    globalThis.addEventListener?.("storage", ({ key }) => {
      if (key !== KEY) return;
      this.settings = this._read();
      this.onChange();
    });
  }

  /** Store what differs from the settings that were read; another tab may have changed the others since. */
  save(settings) {
    const changed = Object.entries(settings).filter(([name, value]) => value !== this.settings[name]);
    this.settings = settings;
    if (!changed.length) return;
    try {
      this._storage.setItem(KEY, JSON.stringify({ ...this._read(), ...Object.fromEntries(changed) }));
    } catch {
      // storage is full or off: the settings hold for this page
    }
  }

  _read() {
    try {
      const { system = "", key = "", ...chat } = JSON.parse(this._storage.getItem(KEY) ?? "{}");
      return { ...readSettings(chat), system: String(system), key: String(key) };
    } catch {
      return { ...DEFAULT_SETTINGS };
    }
  }
}

/** localStorage where it is allowed, else a Map that lasts as long as the page. */
export function safeStorage(name = "localStorage") {
  try {
    globalThis[name].getItem("");
    return globalThis[name];
  } catch {
    const items = new Map();
    return {
      getItem: (key) => items.get(key) ?? null,
      setItem: (key, value) => void items.set(key, value),
      removeItem: (key) => void items.delete(key),
    };
  }
}
