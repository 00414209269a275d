// @ts-check
/** The settings, stored in this browser and shared by all tabs of this page. Touches no element. */

const KEY = "inferengine.settings";

/** `schema` and `tools` as they were typed; see answer_format.js. A number that is null takes the model's default. */
export const DEFAULT_SETTINGS = { system: "", temperature: null, top_p: null, top_k: null, max_tokens: null, seed: null,
  json: false, schema: "", tools: "", tool_choice: "auto", key: "" };

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
      return { ...DEFAULT_SETTINGS, ...JSON.parse(this._storage.getItem(KEY) ?? "{}") };
    } catch {
      return { ...DEFAULT_SETTINGS };
    }
  }
}

/** The sampling parameters of a request: the settings that are set. */
export function paramsOf(settings) {
  const params = {};
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) if (settings[name] !== null) params[name] = settings[name];
  return params;
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
