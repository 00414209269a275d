// @ts-check
/** The dialog about the storage: how much is in use, export and import, and what was deleted. */

import { make } from "../elements.js";
import { fileName, fromJson, saveFile, toJson } from "./files.js";

const MAX_FILE_BYTES = 200_000_000;

/** Shows the storage of a ConversationStore and changes it. */
export class StorageDialog {
  /** `onChange()`: conversations were added, restored or deleted. */
  constructor(document, store, onChange) {
    this._find = (id) => document.getElementById(id);
    this._dialog = this._find("storage");
    this._store = store;
    this._onChange = onChange;
    this._find("open-storage").addEventListener("click", () => this.open());
    this._find("export-all").addEventListener("click", () => this.exportAll());
    this._find("import").addEventListener("click", () => this._find("import-file").click());
    this._find("import-file").addEventListener("change", () => this._import(this._find("import-file")));
    this._find("purge").addEventListener("click", () => this._askThenPurge(this._find("purge")));
    this._find("persist").addEventListener("click", () => this._persist());
    this._dialog.addEventListener("click", (event) => event.target === this._dialog && this._dialog.close());
  }

  /** Whether the dialog is open. */
  get isOpen() {
    return this._dialog.open;
  }

  /** Open the dialog. */
  open() {
    this._find("storage-message").textContent = "";
    this._dialog.showModal();
    this.draw();
  }

  /** Save all conversations as one file. */
  async exportAll() {
    const all = await this._store.withMessages(this._store.conversations);
    saveFile(fileName(`inferengine ${new Date().toISOString().slice(0, 10)}`, "json"), "application/json", toJson(all));
  }

  /** Draw what is stored, and what was deleted. */
  async draw() {
    const { conversations, deleted, database } = this._store;
    this._find("deleted").hidden = !deleted.length;
    delete this._find("purge").dataset.asked;
    this._find("purge").textContent = "Delete for good";
    this._find("deleted-list").replaceChildren(...deleted.map((conversation) => this._deletedItem(conversation)));
    const { bytes, quota } = await this._store.usage();
    const share = quota ? bytes / quota : 0;
    const count = counted(conversations.length, "conversation");
    const where = database.isOpen ? "" : " in this tab only";
    this._find("usage-text").textContent = `${count}, ${formatBytes(bytes)}${where}${quota ? ` of ${formatBytes(quota)} that this browser allows` : ""}`;
    this._find("usage").hidden = !quota;
    this._find("usage").value = Math.max(share, 0.004);
    const persisted = await navigator.storage?.persisted?.().catch(() => false);
    this._find("persist").hidden = !navigator.storage?.persist || Boolean(persisted);
  }

  _deletedItem(conversation) {
    const item = make("li");
    const restore = make("button", "link", "Restore");
    restore.type = "button";
    restore.setAttribute("aria-label", `Restore “${conversation.title}”`);
    restore.addEventListener("click", () => {
      this._store.restore(conversation);
      this._changed(`Restored “${conversation.title}”.`);
    });
    item.append(make("span", "title", conversation.title), restore);
    return item;
  }

  async _import(input) {
    const files = [...input.files];
    input.value = "";
    const added = { conversations: 0, messages: 0 };
    try {
      for (const file of files) {
        if (file.size > MAX_FILE_BYTES) throw new Error(`${file.name} has ${formatBytes(file.size)}. At most ${formatBytes(MAX_FILE_BYTES)} are read.`);
        const { conversations, messages } = await this._store.importAll(fromJson(await file.text()));
        added.conversations += conversations;
        added.messages += messages;
      }
    } catch (error) {
      this._changed(error.message);
      return;
    }
    this._changed(`Added ${counted(added.conversations, "conversation")} with ${counted(added.messages, "message")}. What was here already is unchanged.`);
  }

  /** The first press asks, the second deletes: nothing brings these conversations back. */
  async _askThenPurge(button) {
    const { deleted } = this._store;
    const { length } = deleted;
    if (!("asked" in button.dataset)) {
      button.dataset.asked = "";
      button.textContent = `Really delete ${length}? This cannot be undone.`;
      return;
    }
    await this._store.purge(deleted);
    this._changed(`Deleted ${length} for good.`);
  }

  async _persist() {
    const granted = await navigator.storage.persist();
    this._changed(granted ? "The browser will not clear this storage by itself." : "The browser did not agree. Export what must not be lost.");
  }

  _changed(text) {
    this._find("storage-message").textContent = text;
    this._onChange();
    this.draw();
  }
}

function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

/** Format a number of bytes: `640 B`, `1.2 MB`. */
export function formatBytes(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(bytes, 1)) / 3));
  const value = bytes / 1000 ** power;
  return `${value >= 10 || power === 0 ? Math.round(value) : value.toFixed(1)} ${units[power]}`;
}
