// @ts-check
/** Conversations as earlier versions of this page stored them: one list in localStorage. */

const KEY = "inferengine.conversations";

/** Read the list as conversations with messages. Ids are made of the content: reading it twice adds nothing twice. */
export function readLegacy(system) {
  let list;
  try {
    list = JSON.parse(localStorage.getItem(KEY) ?? "[]");
  } catch {
    return [];
  }
  return (Array.isArray(list) ? list : []).filter((item) => item?.id && Array.isArray(item.messages)).map((item) => {
    const id = String(item.id);
    const updated = Number(item.updated) || Date.now();
    let parent = null;
    const messages = item.messages.map((message, index) => {
      const record = { ...message, id: `${id}-${index}-${hash(JSON.stringify([parent, message.role, message.content]))}`,
        conversation: id, parent, created: updated - item.messages.length + index };
      parent = record.id;
      return record;
    });
    return { id, title: String(item.title ?? ""), created: updated, updated, system, leaf: parent, messages };
  });
}

/** Forget the list, once all of it is stored elsewhere. */
export function removeLegacy() {
  localStorage.removeItem(KEY);
}

/** FNV-1a, 32 bits. */
function hash(text) {
  let value = 0x811c9dc5;
  for (let at = 0; at < text.length; at++) value = Math.imul(value ^ text.charCodeAt(at), 0x01000193);
  return (value >>> 0).toString(36);
}
