// @ts-check
/** The drawer with the sampling parameters and the form of the answer. */

import { EXAMPLE_TOOLS, namesOf, readSchema, readTools } from "./form.js";
import { DEFAULT_SETTINGS } from "./store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const OFF = { temperature: 1, top_p: 1 }; // where sliders stand that neither the person nor the model has set

export class SettingsDrawer {
  constructor(document, store) {
    this._dialog = document.getElementById("settings");
    this._form = document.getElementById("settings-form");
    this._store = store;
    this._defaults = {};
    document.getElementById("open-settings").addEventListener("click", () => this.open());
    document.getElementById("reset-settings").addEventListener("click", () =>
      this._fill({ ...DEFAULT_SETTINGS, key: this._store.settings.key }));
    document.getElementById("example-tools").addEventListener("click", () => {
      this._fill({ ...this._store.settings, tools: JSON.stringify(EXAMPLE_TOOLS, null, 2) });
      this._form.elements.namedItem("tools").focus();
    });
    this._form.addEventListener("input", (event) => {
      delete event.target.dataset.own;
      this._changed();
    });
    this._dialog.addEventListener("click", (event) => event.target === this._dialog && this._dialog.close());
    this._dialog.addEventListener("close", () => this.onClose?.());
    this._fill(store.settings);
  }

  /** The model's own parameters, shown where nothing else was chosen. */
  showDefaults(defaults) {
    this._defaults = defaults ?? {};
    for (const input of this._form.querySelectorAll("input[data-own]")) this._standAtDefault(input);
    this._form.elements.namedItem("top_k").placeholder = this._defaults.top_k || "off";
    this._tellNumbers();
  }

  get isOpen() {
    return this._dialog.open;
  }

  open() {
    this._dialog.showModal();
  }

  /** Open with one of the fields at hand. */
  openAt(name) {
    this.open();
    this._form.elements.namedItem(name).focus();
  }

  _fill(settings) {
    for (const [name, value] of Object.entries(settings)) {
      const input = this._form.elements.namedItem(name);
      if (input?.type === "checkbox") input.checked = value;
      else if (input?.type === "range" && value === null) this._standAtDefault(input);
      else if (input) input.value = value ?? "";
    }
    this._offerTools(settings.tool_choice);
    this._changed();
  }

  _changed() {
    const { system, json, schema, tools, key } = this._form.elements;
    const settings = { ...this._store.settings, system: system.value, json: json.checked, key: key.value.trim() };
    Object.assign(settings, { schema: schema.value, tools: tools.value });
    document.getElementById("schema-field").hidden = !json.checked;
    this._check(schema, readSchema);
    this._check(tools, readTools);
    this._offerTools(this._form.elements.namedItem("tool_choice").value);
    settings.tool_choice = this._form.elements.namedItem("tool_choice").value;
    for (const name of NUMBERS) {
      const input = this._form.elements.namedItem(name);
      const open = input.value === "" || "own" in input.dataset;
      if (input.validity.valid) settings[name] = open ? null : input.valueAsNumber;
    }
    this._tellNumbers();
    this._store.saveSettings(settings);
    this.onChange?.();
  }

  _standAtDefault(input) {
    input.dataset.own = "";
    input.value = this._defaults[input.name] ?? OFF[input.name];
  }

  _tellNumbers() {
    for (const output of this._form.querySelectorAll("output")) {
      const input = this._form.elements.namedItem(output.htmlFor[0]);
      output.textContent = `${"own" in input.dataset ? "model default, " : ""}${Number(input.value).toFixed(2)}`;
    }
  }

  /** Say beside a field what is wrong with its text. The dialog still closes: asking says it again. */
  _check(input, read) {
    const told = document.getElementById(`${input.id}-error`);
    try {
      read(input.value);
      told.textContent = "";
    } catch (error) {
      told.textContent = error.message;
    }
    input.setAttribute("aria-invalid", String(told.textContent !== ""));
  }

  /** The choices that the tools at hand leave: each of them can be demanded by name. */
  _offerTools(chosen) {
    const select = this._form.elements.namedItem("tool_choice");
    let names = [];
    try {
      names = namesOf(readTools(this._form.elements.namedItem("tools").value));
    } catch {
      // told beside the field
    }
    const fixed = [...select.options].filter((option) => !option.dataset.tool);
    const offered = names.map((name) => {
      const option = new Option(`Always ${name}`, name);
      option.dataset.tool = "yes";
      return option;
    });
    select.replaceChildren(...fixed, ...offered);
    select.value = chosen;
    if (select.selectedIndex < 0) select.value = "auto";
    document.getElementById("choice-field").hidden = !names.length;
  }
}
