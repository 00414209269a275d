// @ts-check
/** Unsent texts, one for each conversation and one for a new chat. Each tab keeps its own, and the last one is shared. */

import { safeStorage } from "../settings_store.js";

const PREFIX = "inferengine.draft.";

/** Stores a text at once: a closed tab loses nothing. */
export class Drafts {
  constructor() {
    this._ofTab = safeStorage("sessionStorage");
    this._ofAll = safeStorage("localStorage");
  }

  /** The unsent text of a conversation; `id` "" is a new chat. */
  get(id) {
    return this._ofTab.getItem(PREFIX + id) ?? this._ofAll.getItem(PREFIX + id) ?? "";
  }

  /** Keep the text, or forget an empty one. */
  set(id, text) {
    for (const storage of [this._ofTab, this._ofAll]) {
      try {
        if (text) storage.setItem(PREFIX + id, text);
        else storage.removeItem(PREFIX + id);
      } catch {
        // storage is full: the text is still in the message box
      }
    }
  }
}
