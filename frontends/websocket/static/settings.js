// @ts-check
/** The drawer with the sampling parameters. */

import { DEFAULT_SETTINGS } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class SettingsDrawer {
  constructor(document, store) {
    this._dialog = document.getElementById("settings");
    this._form = document.getElementById("settings-form");
    this._store = store;
    document.getElementById("open-settings").addEventListener("click", () => this.open());
    document.getElementById("reset-settings").addEventListener("click", () => this._fill(DEFAULT_SETTINGS));
    this._form.addEventListener("input", () => this._changed());
    this._dialog.addEventListener("click", (event) => event.target === this._dialog && this._dialog.close());
    this._dialog.addEventListener("close", () => this.onClose?.());
    this._fill(store.settings);
  }

  get isOpen() {
    return this._dialog.open;
  }

  open() {
    this._dialog.showModal();
  }

  _fill(settings) {
    for (const [name, value] of Object.entries(settings)) {
      const input = this._form.elements.namedItem(name);
      if (input?.type === "checkbox") input.checked = value;
      else if (input) input.value = value ?? "";
    }
    this._changed();
  }

  _changed() {
    const { system, json, key } = this._form.elements;
    const settings = { ...this._store.settings, system: system.value, json: json.checked, key: key.value.trim() };
    for (const name of NUMBERS) {
      const input = this._form.elements.namedItem(name);
      if (input.validity.valid) settings[name] = input.value === "" ? null : input.valueAsNumber;
    }
    for (const output of this._form.querySelectorAll("output")) {
      output.textContent = Number(this._form.elements.namedItem(output.htmlFor[0]).value).toFixed(2);
    }
    this._store.saveSettings(settings);
  }
}
