// @ts-check
/** The list of conversations in the sidebar, the results of a search, and the menu of a conversation. */

import { icon, make, setChildren } from "../elements.js";

const DAY_MS = 24 * 3600 * 1000;

/** Draws the conversations and calls the actions of their buttons. */
export class ConversationList {
  /** `actions`: open(conversation, message), rename(conversation, title), pin(conversation), save(conversation, kind),
   * remove(conversation). `menu`: the popover with the buttons [data-do]. */
  constructor(element, menu, actions) {
    this._element = element;
    this._menu = menu;
    this._actions = actions;
    /** Elements by conversation: those that would look the same stay. @type {Map<string, { key: string, element: HTMLElement }>} */
    this._drawn = new Map();
    /** @type {Map<string, HTMLElement>} */
    this._groups = new Map();
    this._renamed = null;
    this._chosen = null;
    menu.addEventListener("click", (event) => this._do(event.target.closest("[data-do]")?.dataset.do));
    menu.addEventListener("keydown", (event) => this._move(event));
    menu.addEventListener("toggle", (event) => {
      this._opener?.setAttribute("aria-expanded", String(event.newState === "open"));
      if (event.newState === "open") menu.querySelector("button").focus();
    });
  }

  /** Draw the list. `isBusy(conversation)`: an answer of it is being written. */
  show(conversations, current, isBusy) {
    const groups = new Map();
    for (const conversation of conversations) {
      const name = groupOf(conversation);
      groups.set(name, [...(groups.get(name) ?? []), this._item({ conversation }, conversation === current, isBusy(conversation))]);
    }
    this._showGroups([...groups]);
  }

  /** Draw the results of a search. */
  showResults(results, current, isBusy) {
    const items = results.map((result) => this._item(result, result.conversation === current, isBusy(result.conversation)));
    this._showGroups([[items.length ? "Found" : "Nothing found", items]]);
  }

  _showGroups(groups) {
    if (this._renamed && this._element.querySelector(".rename")) return; // what is typed there must stay
    setChildren(this._element, groups.map(([name, items]) => {
      const group = this._groups.get(name) ?? this._newGroup(name);
      setChildren(group.lastElementChild, items);
      return group;
    }));
  }

  _newGroup(name) {
    const group = make("section", "group");
    const list = make("ul");
    list.setAttribute("aria-label", name);
    group.append(make("h2", "", name), list);
    this._groups.set(name, group);
    return group;
  }

  _item(result, isCurrent, isBusy) {
    const { conversation, snippet = "", message } = result;
    const isRenamed = this._renamed === conversation.id;
    const key = JSON.stringify([conversation.title, conversation.pinned, isCurrent, isBusy, isRenamed, snippet, message?.id]);
    const drawn = this._drawn.get(conversation.id);
    if (drawn?.key === key) return drawn.element;
    const element = make("li", "conversation");
    element.classList.toggle("current", isCurrent);
    element.classList.toggle("busy", isBusy);
    element.append(...(isRenamed ? [this._nameField(conversation)] : this._buttons(result, isCurrent)));
    this._drawn.set(conversation.id, { key, element });
    return element;
  }

  _buttons({ conversation, snippet, message }, isCurrent) {
    const open = make("button", "open");
    open.type = "button";
    open.title = conversation.title;
    open.append(make("span", "title", conversation.title));
    if (snippet) open.append(make("small", "", snippet));
    if (isCurrent) open.setAttribute("aria-current", "page");
    open.addEventListener("click", () => this._actions.open(conversation, message));
    open.addEventListener("dblclick", () => this._rename(conversation));
    const more = make("button", "icon more");
    more.type = "button";
    more.setAttribute("aria-label", `Actions for “${conversation.title}”`);
    more.setAttribute("aria-haspopup", "menu");
    more.setAttribute("aria-expanded", "false");
    more.append(icon("more"));
    more.addEventListener("click", () => this._openMenu(conversation, more));
    return [open, more];
  }

  _openMenu(conversation, button) {
    this._chosen = conversation;
    this._opener = button;
    this._menu.querySelector("[data-do=pin] span").textContent = conversation.pinned ? "Unpin" : "Pin";
    this._menu.showPopover();
    const { left, right, bottom, top } = button.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this._menu;
    const below = bottom + offsetHeight + 8 < innerHeight;
    this._menu.style.left = `${Math.max(8, Math.min(left, innerWidth - offsetWidth - 8, right))}px`;
    this._menu.style.top = `${Math.max(8, below ? bottom + 4 : top - offsetHeight - 4)}px`;
  }

  _do(action) {
    const conversation = this._chosen;
    if (!action || !conversation) return;
    this._menu.hidePopover();
    if (action === "rename") this._rename(conversation);
    else if (action === "pin") this._actions.pin(conversation);
    else if (action === "delete") this._actions.remove(conversation);
    else this._actions.save(conversation, action);
  }

  /** Arrow keys, Home and End move between the menu's items; the browser closes it on Escape. */
  _move(event) {
    const items = [...this._menu.querySelectorAll("button")];
    const at = items.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    items.at(to % items.length).focus();
  }

  _rename(conversation) {
    this._renamed = conversation.id;
    this._actions.redraw();
    this._element.querySelector(".rename")?.select();
  }

  _nameField(conversation) {
    const input = make("input", "rename");
    input.value = conversation.title;
    input.maxLength = 300;
    input.setAttribute("aria-label", "Title of the conversation");
    const end = (isKept) => {
      if (this._renamed !== conversation.id) return;
      this._renamed = null;
      if (isKept) this._actions.rename(conversation, input.value);
      this._actions.redraw();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      else if (event.key === "Escape") end(false);
      else return;
      event.preventDefault();
      event.stopPropagation();
      this._element.querySelector(".current .open")?.focus();
    });
    input.addEventListener("blur", () => end(true));
    return input;
  }
}

function groupOf({ pinned, updated }) {
  if (pinned) return "Pinned";
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - DAY_MS) return "Yesterday";
  if (updated >= midnight - 7 * DAY_MS) return "Last 7 days";
  if (updated >= midnight - 30 * DAY_MS) return "Last 30 days";
  return "Earlier";
}
