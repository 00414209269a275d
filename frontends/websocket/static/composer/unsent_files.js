// @ts-check
/**
 * Attached files that were not sent, one record in IndexedDB for each conversation and one for a new chat, for 30 days.
 * In a database of their own: they are no part of a conversation. Where the browser stores nothing, files last as long
 * as the page. Touches no element.
 */

const NAME = "inferengine.unsent";
const STORE = "files";
const KEEP_MS = 30 * 24 * 3600 * 1000;

/** @typedef {import("./attached_files.js").AttachedFile} AttachedFile */

/** Reads and writes unsent files. Never rejects. */
export class UnsentFiles {
  constructor() {
    /** @type {Promise<IDBDatabase | null>} */
    this._database = connect().catch(() => null);
    this._removeOld();
  }

  /** The unsent files of a conversation; `chat` "" is a new one. @returns {Promise<AttachedFile[]>} */
  async get(chat) {
    return (await this._run("readonly", (store) => store.get(chat)))?.files ?? [];
  }

  /** Keep these files, or forget the conversation's where there are none. @param {AttachedFile[]} files */
  async set(chat, files) {
    await this._run("readwrite", (store) => (files.length ? store.put({ id: chat, files, changed: Date.now() }) : store.delete(chat)));
  }

  async _removeOld() {
    const records = (await this._run("readonly", (store) => store.getAll())) ?? [];
    for (const { id, changed } of records) if (changed < Date.now() - KEEP_MS) await this.set(id, []);
  }

  /** @param {IDBTransactionMode} mode @param {(store: IDBObjectStore) => IDBRequest} ask */
  async _run(mode, ask) {
    const database = await this._database;
    if (!database) return undefined;
    try {
      return await done(ask(database.transaction(STORE, mode).objectStore(STORE)));
    } catch {
      return undefined; // storage is full or was closed: the files are still on the page
    }
  }
}

/** @returns {Promise<IDBDatabase>} */
async function connect() {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
  return done(opening);
}

/** @returns {Promise<any>} */
function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
