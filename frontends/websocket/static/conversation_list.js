// @ts-check
/** The list of conversations in the sidebar. */

import { icon, make } from "./elements.js";

/** Draws the conversations and calls the actions of their buttons. */
export class ConversationList {
  /** `actions`: open(conversation), remove(conversation). */
  constructor(element, actions) {
    this._element = element;
    this._actions = actions;
  }

  /** Draw the list. `isBusy(conversation)`: an answer of it is being written. */
  show(conversations, current, isBusy) {
    this._element.replaceChildren(...conversations.map((item) => this._build(item, item === current, isBusy(item))));
  }

  _build(conversation, isCurrent, isBusy) {
    const item = make("li", "conversation");
    item.classList.toggle("current", isCurrent);
    item.classList.toggle("busy", isBusy);
    const name = make("button", "open", conversation.title);
    name.type = "button";
    name.title = conversation.title;
    if (isCurrent) name.setAttribute("aria-current", "page");
    name.addEventListener("click", () => this._actions.open(conversation));
    const remove = make("button", "icon delete");
    remove.type = "button";
    remove.setAttribute("aria-label", `Delete “${conversation.title}”`);
    remove.append(icon("trash"));
    remove.addEventListener("click", () => this._actions.remove(conversation));
    item.append(name, remove);
    return item;
  }
}
