// @ts-check
/**
 * Records in IndexedDB. What the browser refuses to store is kept in memory, read as if it were stored, and written
 * again with the next change. Touches no element.
 */

const NAME = "inferengine";
const VERSION = 1;
const OPEN_TIMEOUT_MS = 4000;
const BATCH = 500;
const STORES = ["conversations", "messages"];
/** The value of each index of `messages`; undefined where a record is not in it. */
const INDEXES = {
  conversation: { path: "conversation", of: (record) => record.conversation },
  pending: { path: "pending.requestId", of: (record) => record.pending?.requestId },
};

/** @typedef {{ id: string }} StoredRecord */
/** @typedef {Record<string, Map<string, StoredRecord | null>>} Layer records by store and id; null: deleted */

/**
 * Reads and writes records in transactions. `onProblem(error)` is called when a write is refused, with null when all is
 * stored; `onWriting(is)` when the first of some writes begins, and when the last of them has ended.
 */
export class Database {
  constructor() {
    this.onProblem = (/** @type {unknown} */ _error) => {};
    /** What is not stored yet. @type {Layer} */
    this._unsaved = emptyLayer();
    /** @type {IDBDatabase | null} */
    this._connection = null;
    this._reason = null; // why there is no connection
    this._writes = Promise.resolve();
    this.onWriting = (/** @type {boolean} */ _is) => {};
    this._numWriting = 0;
  }

  /** Connect. Without a database the page works on, and `onProblem` is called with the first write. */
  async open() {
    try {
      this._connection = await Promise.race([connect(), timeout()]);
      this._connection.onversionchange = () => this._disconnect(new Error("A newer version of this page is open. Reload."));
      this._connection.onclose = () => this._disconnect(new Error("The browser closed the storage. Reload."));
    } catch (error) {
      this._disconnect(error);
    }
  }

  /** Whether the browser stores anything for this page. */
  get isOpen() {
    return this._connection !== null;
  }

  /** How many records exist in this tab alone. */
  get numUnsaved() {
    return STORES.reduce((sum, store) => sum + this._unsaved[store].size, 0);
  }

  /** Run `work(view)` on one consistent state. */
  async read(work) {
    return work(new View(this._unsaved, this._begin("readonly")));
  }

  /** Call `visit(record)` for all records of a store, a few hundred at a time. */
  async each(store, visit) {
    const unsaved = this._unsaved[store];
    for (const record of unsaved.values()) if (record) visit(record);
    for (let after = null; this._connection; ) {
      const range = after === null ? null : IDBKeyRange.lowerBound(after, true);
      const records = await request(this._connection.transaction(store).objectStore(store).getAll(range, BATCH));
      for (const record of records) if (!unsaved.has(record.id)) visit(record);
      if (records.length < BATCH) return;
      after = records.at(-1).id;
    }
  }

  /**
   * Run `work(view)` and store its changes in the same transaction, so nothing is written that was not read in it.
   * Never rejects because of the storage: what is refused stays in memory.
   */
  write(work) {
    if (this._numWriting++ === 0) this.onWriting(true);
    const result = this._writes.then(() => this._write(work));
    const ended = () => {
      if (--this._numWriting === 0) this.onWriting(false);
    };
    this._writes = result.then(ended, ended);
    return result;
  }

  async _write(work) {
    let refusal = this._reason;
    // With what an earlier write could not store, then alone: a deletion must not fail for lack of space.
    for (const withUnsaved of this.numUnsaved ? [true, false] : [false]) {
      const transaction = this._begin("readwrite");
      if (!transaction) break;
      try {
        const view = new View(this._unsaved, transaction);
        const result = await work(view);
        const unsaved = copyOf(this._unsaved);
        if (withUnsaved) await putUnsaved(transaction, unsaved);
        put(transaction, view.changes);
        await finished(transaction);
        for (const layer of withUnsaved ? [unsaved, view.changes] : [view.changes]) this._forget(layer);
        if (!this.numUnsaved) this.onProblem(null);
        return result;
      } catch (error) {
        refusal = error;
        abort(transaction);
      }
    }
    const view = new View(this._unsaved, this._begin("readonly"));
    const result = await work(view);
    for (const store of STORES) for (const [id, record] of view.changes[store]) this._unsaved[store].set(id, record && structuredClone(record));
    this.onProblem(refusal);
    return result;
  }

  /** @param {IDBTransactionMode} mode */
  _begin(mode) {
    try {
      return this._connection?.transaction(STORES, mode) ?? null;
    } catch (error) {
      this._disconnect(error); // it was closed
      return null;
    }
  }

  _forget(layer) {
    for (const store of STORES) for (const id of layer[store].keys()) this._unsaved[store].delete(id);
  }

  _disconnect(reason) {
    this._connection?.close();
    this._connection = null;
    this._reason = reason;
  }
}

/** Records as one transaction sees them: its own changes first, then what is not stored yet, then what is stored. */
class View {
  constructor(unsaved, transaction) {
    this.changes = emptyLayer();
    this._unsaved = unsaved;
    this._transaction = transaction;
  }

  /** One record, or undefined. */
  async get(store, id) {
    for (const layer of [this.changes, this._unsaved]) if (layer[store].has(id)) return layer[store].get(id) ?? undefined;
    return this._transaction ? request(this._transaction.objectStore(store).get(id)) : undefined;
  }

  /** All records of a store, or those of an index, or those with `key` in the index. */
  async all(store, index = "", key = undefined) {
    const records = this._transaction?.objectStore(store);
    const source = index ? records?.index(index) : records;
    const found = new Map((source ? await request(source.getAll(key)) : []).map((record) => [record.id, record]));
    for (const layer of [this._unsaved, this.changes]) {
      for (const [id, record] of layer[store]) {
        const value = record && index ? INDEXES[index].of(record) : undefined;
        if (record && (!index || (key === undefined ? value !== undefined : value === key))) found.set(id, record);
        else found.delete(id);
      }
    }
    return [...found.values()];
  }

  /** The ids of all records of a store. @returns {Promise<Set<string>>} */
  async ids(store) {
    const found = new Set(this._transaction ? await request(this._transaction.objectStore(store).getAllKeys()) : []);
    for (const layer of [this._unsaved, this.changes]) {
      for (const [id, record] of layer[store]) {
        if (record) found.add(id);
        else found.delete(id);
      }
    }
    return found;
  }

  /** Store a record when `work` has ended. */
  put(store, record) {
    this.changes[store].set(record.id, record);
  }

  /** Delete a record when `work` has ended. */
  delete(store, id) {
    this.changes[store].set(id, null);
  }
}

function emptyLayer() {
  return /** @type {Layer} */ (Object.fromEntries(STORES.map((store) => [store, new Map()])));
}

function copyOf(layer) {
  return /** @type {Layer} */ (Object.fromEntries(STORES.map((store) => [store, new Map(layer[store])])));
}

function put(transaction, layer) {
  for (const store of STORES) {
    for (const [id, record] of layer[store]) {
      if (record) transaction.objectStore(store).put(record);
      else transaction.objectStore(store).delete(id);
    }
  }
}

/** Write what was kept in memory, unless another tab has changed the record since. */
async function putUnsaved(transaction, layer) {
  const changed = emptyLayer();
  for (const store of STORES) {
    for (const [id, record] of layer[store]) {
      const stored = await request(transaction.objectStore(store).get(id));
      if (!stored || !record || (stored.changed ?? 0) <= (record.changed ?? 0)) changed[store].set(id, record);
    }
  }
  put(transaction, changed);
}

/** @returns {Promise<IDBDatabase>} */
function connect() {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(NAME, VERSION);
    opening.onupgradeneeded = () => {
      const messages = STORES.map((store) => opening.result.createObjectStore(store, { keyPath: "id" })).at(-1);
      for (const [name, { path }] of Object.entries(INDEXES)) messages?.createIndex(name, path);
    };
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}

/** @returns {Promise<never>} */
function timeout() {
  return new Promise((_, reject) => setTimeout(() => reject(new Error("The storage did not open.")), OPEN_TIMEOUT_MS));
}

/** @returns {Promise<any>} */
function request(pending) {
  return new Promise((resolve, reject) => {
    pending.onsuccess = () => resolve(pending.result);
    pending.onerror = () => reject(pending.error);
  });
}

function abort(transaction) {
  try {
    transaction.abort();
  } catch {
    // it has aborted already
  }
}

/** @returns {Promise<void>} */
function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new Error("The browser did not store the change."));
  });
}
