// @ts-check
/** The drawer with the sampling parameters, the answer format and the API key. */

import { EXAMPLE_TOOLS, toolNames, readSchema, readTools } from "./answer_format.js";
import { DEFAULT_SETTINGS } from "./settings_store.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const OFF = { temperature: 1, top_p: 1 }; // positions of sliders without a value and without a default of the model

/** Edits the settings in the store. A number that was not set shows the model's default. */
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

  /** Show the model's default parameters where none was set. */
  showDefaults(defaults) {
    this._defaults = defaults ?? {};
    for (const input of this._form.querySelectorAll("input[data-own]")) this._showDefault(input);
    this._form.elements.namedItem("top_k").placeholder = this._defaults.top_k || "off";
    this._showNumbers();
  }

  /** Show settings that another tab has changed. */
  show(settings) {
    this._fill(settings);
  }

  /** Open the drawer. */
  open() {
    this._dialog.showModal();
  }

  /** Open with the focus in one of the fields. */
  openAt(name) {
    this.open();
    this._form.elements.namedItem(name).focus();
  }

  _fill(settings) {
    for (const [name, value] of Object.entries(settings)) {
      const input = this._form.elements.namedItem(name);
      if (input?.type === "checkbox") input.checked = value;
      else if (input?.type === "range" && value === null) this._showDefault(input);
      else if (input) input.value = value ?? "";
    }
    this._updateToolChoices(settings.tool_choice);
    this._changed();
  }

  _changed() {
    const { system, json, schema, tools, key } = this._form.elements;
    const settings = { ...this._store.settings, system: system.value, json: json.checked, key: key.value.trim() };
    Object.assign(settings, { schema: schema.value, tools: tools.value });
    document.getElementById("schema-field").hidden = !json.checked;
    this._check(schema, readSchema);
    this._check(tools, readTools);
    this._updateToolChoices(this._form.elements.namedItem("tool_choice").value);
    settings.tool_choice = this._form.elements.namedItem("tool_choice").value;
    for (const name of NUMBERS) {
      const input = this._form.elements.namedItem(name);
      const open = input.value === "" || "own" in input.dataset;
      if (input.validity.valid) settings[name] = open ? null : input.valueAsNumber;
    }
    this._showNumbers();
    this._store.save(settings);
    this.onChange?.();
  }

  _showDefault(input) {
    input.dataset.own = "";
    input.value = this._defaults[input.name] ?? OFF[input.name];
  }

  _showNumbers() {
    for (const output of this._form.querySelectorAll("output")) {
      const input = this._form.elements.namedItem(output.htmlFor[0]);
      output.textContent = `${"own" in input.dataset ? "model default, " : ""}${Number(input.value).toFixed(2)}`;
    }
  }

  /** Show beside a field what is wrong with its text. The dialog still closes: sending reports it again. */
  _check(input, read) {
    const errorText = document.getElementById(`${input.id}-error`);
    try {
      read(input.value);
      errorText.textContent = "";
    } catch (error) {
      errorText.textContent = error.message;
    }
    input.setAttribute("aria-invalid", String(errorText.textContent !== ""));
  }

  /** Offer each of the current tools as a choice by name. */
  _updateToolChoices(chosen) {
    const select = this._form.elements.namedItem("tool_choice");
    let names = [];
    try {
      names = toolNames(readTools(this._form.elements.namedItem("tools").value));
    } catch {
      // shown beside the field
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
