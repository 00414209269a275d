// @ts-check
/** Files for the next message: chosen, dropped or pasted, and shown as chips over the message box. */

import { codeElement, icon, make } from "../elements.js";
import { MAX_FILES, MAX_TOTAL_BYTES, formatSize, languageOf, readTextFile } from "./attached_files.js";
import { UnsentFiles } from "./unsent_files.js";

/** @typedef {import("./attached_files.js").AttachedFile} AttachedFile */

/** The unsent files of each chat. They survive a reload. */
export class Attachments {
  /** `maxBytes()`: of a message to this server. `onChange()`: the files are others now. */
  constructor(document, { maxBytes, onChange, stored = new UnsentFiles() }) {
    this._stored = stored;
    this._find = (id) => document.getElementById(id);
    this._maxBytes = maxBytes;
    this._onChange = onChange;
    /** @type {Map<string, AttachedFile[]>} */
    this._files = new Map();
    this._chat = "";
    const input = this._find("attach-files");
    this._find("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      const chosen = [...input.files];
      input.value = "";
      this.add(chosen);
    });
    this._find("composer-input").addEventListener("paste", (event) => {
      const pasted = [...(event.clipboardData?.files ?? [])];
      if (!pasted.length || event.clipboardData?.types.includes("text/plain")) return;
      event.preventDefault();
      this.add(pasted);
    });
    this._listenForDrops(document);
  }

  /** The files of the open chat. */
  get files() {
    return this._files.get(this._chat) ?? [];
  }

  /** Show the files of another chat; "" is a new one. */
  open(chat) {
    this._chat = chat;
    this._report("");
    this._draw();
    if (!this._files.has(chat)) this._restore(chat);
  }

  async _restore(chat) {
    const files = await this._stored.get(chat);
    if (!files.length || this._files.has(chat)) return; // others were attached meanwhile
    this._files.set(chat, files);
    if (chat === this._chat) this._draw();
  }

  /** Take the files out, to send them. */
  take() {
    const { files } = this;
    this._keep(this._chat, []);
    this._report("");
    this._draw();
    return files;
  }

  /** Read files and add them to the next message. What cannot be added is reported. */
  async add(chosen) {
    const chat = this._chat;
    const problems = [];
    for (const file of chosen) {
      const files = this._files.get(chat) ?? [];
      try {
        if (files.length >= MAX_FILES) throw new Error(`At most ${MAX_FILES} files fit into a message.`);
        const read = await readTextFile(file);
        const most = Math.min(MAX_TOTAL_BYTES, this._maxBytes() / 2); // half is for the conversation before it
        const total = [...files, read].reduce((sum, { text }) => sum + new Blob([text]).size, 0);
        if (total > most) throw new Error(`${read.name} is left out: the files of a message may have ${formatSize(most)} together.`);
        this._keep(chat, [...files, read]);
      } catch (error) {
        problems.push(error.message);
      }
    }
    if (chat !== this._chat) return;
    this._report(problems.join(" "));
    this._draw();
  }

  _remove(index) {
    this._keep(this._chat, this.files.filter((_, place) => place !== index));
    this._report("");
    this._draw();
    this._find("composer-input").focus();
  }

  _keep(chat, files) {
    this._files.set(chat, files);
    this._stored.set(chat, files);
  }

  _report(text) {
    this._find("attach-error").textContent = text;
  }

  _draw() {
    const chips = this.files.map(({ name, text }, index) => {
      const chip = make("li", "chip");
      const remove = make("button", "icon");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${name}`);
      remove.append(icon("close"));
      remove.addEventListener("click", () => this._remove(index));
      chip.append(icon("file"), make("span", "file-name", name), make("small", "", formatSize(new Blob([text]).size)), remove);
      return chip;
    });
    this._find("attached").replaceChildren(...chips);
    this._find("attached").hidden = !chips.length;
    this._onChange();
  }

  _listenForDrops(document) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const target = this._find("composer");
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      target.classList.add("drop");
    });
    document.addEventListener("dragleave", (event) => !event.relatedTarget && target.classList.remove("drop"));
    document.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      target.classList.remove("drop");
      this.add([...event.dataTransfer.files]);
    });
  }
}

/** The files of a sent message, each folded. @param {AttachedFile[]} files */
export function filesElement(files) {
  const box = make("div", "files");
  for (const { name, text } of files) {
    const details = make("details");
    const summary = make("summary");
    summary.append(icon("file"), make("span", "file-name", name), make("small", "", formatSize(new Blob([text]).size)));
    details.append(summary);
    details.addEventListener("toggle", () => details.open && details.childElementCount === 1 && details.append(codeElement(text, languageOf(name))));
    box.append(details);
  }
  return box;
}
