// @ts-check
/** The messages of one conversation as a tree: every edit and every further try is a branch beside what it replaces. */

/**
 * @typedef {{ id: string, conversation: string, parent: string | null, created: number, changed?: number,
 *   role: "user" | "assistant" | "tool", content: string, figures?: object, finishReason?: string, json?: boolean,
 *   reasoning?: string, toolCalls?: { id: string, name: string, arguments: string }[], callId?: string, files?: { name: string, text: string }[],
 *   tokens?: [string, number, [string, number][]][],
 *   failure?: { message: string, remedy?: string }, request?: string,
 *   pending?: { requestId: string, params: object, cursor?: number, contextIds?: string[], accepted?: boolean, promptTokens?: number } }} Message
 */

/** Messages by id, and the one at the end of the branch that is shown. */
export class Thread {
  /** @param {Message[]} messages @param {string | null} leaf */
  constructor(messages, leaf) {
    /** @type {Map<string, Message>} */
    this.messages = new Map(messages.map((message) => [message.id, message]));
    this.leaf = leaf;
    this._children = null;
  }

  /** Add a message, or replace the one of its id. */
  add(message) {
    this.messages.set(message.id, message);
    this._children = null;
  }

  /** The messages from the first one to `leaf`. @returns {Message[]} */
  path(leaf = this.leaf) {
    const path = [];
    for (let message = this._at(leaf); message && path.length <= this.messages.size; message = this._at(message.parent)) path.push(message);
    return path.reverse();
  }

  /** The versions of a message, itself among them, oldest first. @returns {Message[]} */
  versions(message) {
    return this._byParent().get(message.parent) ?? [message];
  }

  /** The newest message below `id`: the end of the branch that was last continued there. */
  newestLeaf(id) {
    let newest = this._at(id);
    const open = [id];
    while (open.length) {
      for (const child of this._byParent().get(open.pop()) ?? []) {
        if (newest && child.created >= newest.created) newest = child;
        open.push(child.id);
      }
    }
    while (newest) { // clocks of imported messages may be equal or wrong: go down to an end
      const last = this._byParent().get(newest.id)?.at(-1);
      if (!last) break;
      newest = last;
    }
    return newest?.id ?? null;
  }

  /** Whether `id` is below `ancestor`, or is it. */
  isBelow(id, ancestor) {
    return ancestor === null || this.path(id).some((message) => message.id === ancestor);
  }

  _at(id) {
    return id === null || id === undefined ? undefined : this.messages.get(id);
  }

  _byParent() {
    if (this._children) return this._children;
    /** @type {Map<string | null, Message[]>} */
    const children = new Map();
    for (const message of this.messages.values()) {
      const parent = message.parent !== null && this.messages.has(message.parent) ? message.parent : null;
      children.set(parent, [...(children.get(parent) ?? []), message]);
    }
    for (const versions of children.values()) versions.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
    this._children = children;
    return children;
  }
}
