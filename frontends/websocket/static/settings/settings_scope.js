// @ts-check
/** Which settings hold: each conversation has its own, and new chats begin with those in the settings store. */

import { changedSettings, readSettings } from "./chat_settings.js";

/** The settings of what is open, for the drawer and for requests. Touches no element. */
export class SettingsScope {
  /** `current()`: the open conversation, null for a new chat. */
  constructor(settingsStore, conversationStore, current) {
    this._settingsStore = settingsStore;
    this._conversations = conversationStore;
    this._current = current;
  }

  /** The settings of a conversation; of new chats for null. */
  of(conversation) {
    return readSettings(conversation?.settings ?? this._settingsStore.settings);
  }

  /** What a new conversation is stored with. */
  ofNewChat() {
    return changedSettings(this.of(null));
  }

  /** The settings of what is open, with the API key and the system prompt of new chats. */
  get settings() {
    const { key, system } = this._settingsStore.settings;
    return { ...this.of(this._current()), key, system };
  }

  /** What the settings hold for, in words. */
  get hint() {
    return this._current() ? "These hold for this chat, from the next answer on." : "These hold for new chats.";
  }

  /** Store changed settings where they belong. */
  save(settings) {
    const conversation = this._current();
    if (!conversation) {
      this._settingsStore.save(settings);
      return;
    }
    const { key, system } = settings;
    this._settingsStore.save({ ...this._settingsStore.settings, key, system });
    this._conversations.setSettings(conversation, changedSettings(settings));
  }
}
