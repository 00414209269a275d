// @ts-check
/** The drawer with presets, model, sampling parameters, answer format, tools and the API key. */

import { EXAMPLE_TOOLS, readTools, toolNames, withNewTool } from "../answer_format.js";
import { make } from "../elements.js";
import { DEFAULT_SETTINGS, FORMAT_READERS, sameSettings } from "./chat_settings.js";
import { buildSamplingForm, showDefault } from "./sampling_form.js";
import { SAMPLING_NAMES, kindOf, readParam } from "./sampling_params.js";

const FORMAT_FIELDS = { choice: "choice-format-field" };
const CUSTOM = ""; // no preset has these settings

/** Edits the settings of the open chat, or those of new chats. What was not set shows the model's default. */
export class SettingsDrawer {
  /**
   * `source`: `settings` of what is open, `save(settings)`, `hint`: what they hold for. `presets`: a Presets.
   * `onChange()` is called after each change, `onClose()` when the drawer closes.
   */
  constructor(document, source, presets) {
    this._find = (id) => document.getElementById(id);
    this._dialog = this._find("settings");
    this._form = this._find("settings-form");
    this._source = source;
    this._presets = presets;
    this._defaults = {};
    buildSamplingForm(this._find("sampling"), this._find("sampling-rest"));
    for (const [index, { title }] of EXAMPLE_TOOLS.entries()) this._find("example-tools").append(this._exampleButton(title, index));
    this._find("add-tool").addEventListener("click", () => this._addTool());
    this._find("open-settings").addEventListener("click", () => this.open());
    this._find("reset-settings").addEventListener("click", () => this._apply(DEFAULT_SETTINGS));
    this._field("preset").addEventListener("change", () => this._choosePreset());
    this._find("save-preset").addEventListener("click", () => this._nameField(true));
    this._find("delete-preset").addEventListener("click", () => this._deletePreset());
    this._find("preset-store").addEventListener("click", () => this._savePreset());
    this._find("preset-cancel").addEventListener("click", () => this._nameField(false));
    this._field("preset_name").addEventListener("keydown", (event) => {
      if (event.key === "Enter") this._savePreset();
      else if (event.key === "Escape") this._nameField(false);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this._form.addEventListener("input", (event) => {
      if (["preset", "preset_name"].includes(event.target.name)) return;
      delete event.target.dataset.own;
      this._changed();
    });
    this._dialog.addEventListener("click", (event) => event.target === this._dialog && this._dialog.close());
    this._dialog.addEventListener("close", () => this.onClose?.());
    this.show();
  }

  /** Show the model's default parameters where none was set, and the model's adapters. */
  showModel({ name = "", defaults = null, adapters = [] } = {}) {
    this._defaults = defaults ?? {};
    for (const param of SAMPLING_NAMES) {
      const input = this._field(param);
      if (kindOf(param) === "number" && (input.type !== "range" || "own" in input.dataset)) showDefault(input, this._defaults);
    }
    this._showNumbers();
    const select = this._field("model");
    const chosen = this._source.settings.model;
    const names = [...adapters];
    if (chosen && chosen !== name && !names.includes(chosen)) names.push(chosen); // it is not served now: sending reports it
    select.replaceChildren(new Option(name || "The served model", ""), ...names.map((item) => new Option(adapters.includes(item) ? `${item} (adapter)` : `${item} (not served now)`, item)));
    select.value = chosen === name ? "" : chosen;
    this._find("model-field").hidden = !names.length;
  }

  /** Show the settings of what is open now. */
  show() {
    const { settings } = this._source;
    this._find("settings-hint").textContent = this._source.hint;
    for (const [name, value] of Object.entries(settings)) {
      const input = this._form.elements.namedItem(name);
      if (!input || name === "tool_choice") continue;
      if (input.type === "checkbox") input.checked = value;
      else if (value === null && kindOf(name) === "number") {
        input.value = "";
        showDefault(input, this._defaults);
      } else {
        delete input.dataset.own;
        input.value = value;
      }
    }
    this._updateToolChoices(settings.tool_choice);
    this._showChecks();
    this._nameField(false);
    this._showPresets();
  }

  /** Open the drawer. */
  open() {
    this.show();
    this._dialog.showModal();
  }

  /** Open with the focus in one of the fields. */
  openAt(name) {
    this.open();
    const input = this._field(name);
    input.closest("details")?.setAttribute("open", "");
    input.focus();
  }

  _field(name) {
    return this._form.elements.namedItem(name);
  }

  /** Take over other settings of the chat; the key and the system prompt of new chats stay. */
  _apply(settings) {
    this._source.save({ ...this._source.settings, ...settings });
    this.show();
    this.onChange?.();
  }

  _changed() {
    const settings = { ...this._source.settings };
    this._updateToolChoices(this._field("tool_choice").value);
    for (const name of Object.keys(settings)) {
      const input = this._form.elements.namedItem(name);
      if (!input || !input.validity.valid) continue;
      if (typeof settings[name] === "boolean") settings[name] = input.checked;
      else if (name in DEFAULT_SETTINGS && DEFAULT_SETTINGS[name] === null) {
        settings[name] = input.value === "" || "own" in input.dataset ? null : input.valueAsNumber;
      } else settings[name] = name === "key" ? input.value.trim() : input.value;
    }
    this._source.save(settings);
    this._showChecks();
    this._showPresets();
    this.onChange?.();
  }

  _showChecks() {
    const format = this._field("format").value;
    for (const [name, read] of Object.entries(FORMAT_READERS)) {
      this._find(FORMAT_FIELDS[name] ?? `${name}-field`).hidden = name !== format;
      this._check(this._field(name), (text) => name === format && text && read(text));
    }
    this._check(this._field("tools"), readTools);
    for (const name of SAMPLING_NAMES) {
      if (!["boolean", "number"].includes(kindOf(name))) this._check(this._field(name), (text) => readParam(name, text));
      else if (kindOf(name) === "number") this._checkNumber(this._field(name));
    }
    this._showNumbers();
  }

  _showNumbers() {
    for (const output of this._form.querySelectorAll("output")) {
      const input = this._field(output.htmlFor[0].replace(/^p-/, ""));
      output.textContent = `${"own" in input.dataset ? "model default, " : ""}${Number(input.value).toFixed(2)}`;
    }
  }

  _checkNumber(input) {
    const error = this._find(`${input.id}-error`);
    if (error) error.textContent = input.validity.valid ? "" : `${input.validationMessage} The last valid value holds.`;
  }

  /** Show beside a field what is wrong with its text. The dialog still closes: sending reports it again. */
  _check(input, read) {
    const errorText = this._find(`${input.id}-error`);
    try {
      read(input.value);
      errorText.textContent = "";
    } catch (error) {
      errorText.textContent = error.message;
    }
    input.setAttribute("aria-invalid", String(errorText.textContent !== ""));
  }

  // -- presets ------------------------------------------------------------------------------------------------------

  _showPresets() {
    const select = this._field("preset");
    const all = this._presets.all();
    const [built, own] = [all.filter(({ isOwn }) => !isOwn), all.filter(({ isOwn }) => isOwn)].map((list) => list.map(({ name }) => new Option(name, name)));
    const groups = [new Option("Choose a preset", CUSTOM), ...built];
    if (own.length) {
      const group = make("optgroup");
      group.label = "Yours";
      group.append(...own);
      groups.push(group);
    }
    select.replaceChildren(...groups);
    const same = all.find(({ settings }) => sameSettings(settings, this._source.settings));
    select.value = same?.name ?? CUSTOM;
    select.options[0].textContent = same ? "Choose a preset" : "Custom";
    this._find("delete-preset").hidden = !same?.isOwn;
  }

  _choosePreset() {
    const preset = this._presets.all().find(({ name }) => name === this._field("preset").value);
    if (preset) this._apply(preset.settings);
  }

  _nameField(isShown) {
    this._find("preset-name-field").hidden = !isShown;
    this._find("preset-error").textContent = "";
    if (isShown) this._field("preset_name").focus();
    else this._field("preset_name").value = "";
  }

  _savePreset() {
    try {
      this._presets.save(this._field("preset_name").value, this._source.settings);
    } catch (error) {
      this._find("preset-error").textContent = error.message;
      return;
    }
    this._nameField(false);
    this._showPresets();
    this._field("preset").focus();
  }

  _deletePreset() {
    this._presets.remove(this._field("preset").value);
    this._showPresets();
    this._field("preset").focus();
  }

  // -- tools --------------------------------------------------------------------------------------------------------

  _exampleButton(title, index) {
    const button = make("button", "link", title);
    button.type = "button";
    button.addEventListener("click", () => {
      const { tools, settings } = EXAMPLE_TOOLS[index];
      this._apply({ tools: JSON.stringify(tools, null, 2), ...settings });
      this._field("tools").focus();
      this._field("tools").setSelectionRange(0, 0);
    });
    return button;
  }

  _addTool() {
    const input = this._field("tools");
    try {
      this._apply({ tools: withNewTool(input.value) });
      const at = input.value.lastIndexOf("my_function");
      input.focus();
      input.setSelectionRange(at, input.value.indexOf('"', at)); // its name can be typed over
    } catch {
      input.focus(); // what is wrong is beside it
    }
  }

  /** Offer each of the current tools as a choice by name. */
  _updateToolChoices(chosen) {
    const select = this._field("tool_choice");
    /** @type {string[]} */
    let names = [];
    let example = "";
    try {
      const tools = readTools(this._field("tools").value);
      names = toolNames(tools);
      example = EXAMPLE_TOOLS.find((item) => JSON.stringify(readTools(JSON.stringify(item.tools))) === JSON.stringify(tools))?.hint ?? "";
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
    this._find("choice-field").hidden = !names.length;
    this._find("one-call-field").hidden = !names.length;
    this._find("example-hint").textContent = example;
  }
}
