// @ts-check
/** Text files in a message: read with limits, and written into its text. Touches no element. */

export const MAX_FILES = 20;
export const MAX_FILE_BYTES = 1_000_000;
export const MAX_TOTAL_BYTES = 4_000_000;
const MAX_NAME_CHARACTERS = 200;
const CONTROLS = /[\0-\x08\x0e-\x1a\x1c-\x1f]/; // not in texts; escape sequences of terminals are

/** @typedef {{ name: string, text: string }} AttachedFile */

/** Read a file as text: UTF-8, or UTF-16 with its mark. Throws an Error that says why not. @returns {Promise<AttachedFile>} */
export async function readTextFile(file) {
  const name = file.name.slice(0, MAX_NAME_CHARACTERS) || "text";
  if (file.size > MAX_FILE_BYTES) throw new Error(`${name} has ${formatSize(file.size)}. A file may have ${formatSize(MAX_FILE_BYTES)}.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const encoding = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : "utf-8";
  let text;
  try {
    text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
  } catch {
    throw new Error(`${name} is no text file. Text and code in UTF-8 can be attached.`);
  }
  if (CONTROLS.test(text)) throw new Error(`${name} is no text file. Text and code in UTF-8 can be attached.`);
  return { name, text: text.replace(/\r\n?/g, "\n") };
}

/** The text of a message with its files, each in a code block under its name. */
export function withFiles(content, files = []) {
  return [content, ...files.map(asBlock)].filter(Boolean).join("\n\n");
}

/** Check the files of an imported message. Throws an Error that names the place. */
export function readFiles(value, place) {
  if (!Array.isArray(value) || value.length > MAX_FILES) throw new Error(`${place} must be a list of at most ${MAX_FILES} files.`);
  return value.map((file, index) => {
    if (typeof file?.name !== "string" || typeof file.text !== "string") throw new Error(`${place}[${index}] must have a name and a text.`);
    return { name: file.name.slice(0, MAX_NAME_CHARACTERS), text: file.text };
  });
}

/** Format a size: `640 B`, `12 kB`, `1.2 MB`. */
export function formatSize(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 1_000_000 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1_000_000).toFixed(1)} MB`;
}

/** The language of a file, for the fence of its code block: the ending of its name. */
export function languageOf(name) {
  return /\.([a-z0-9+#]{1,12})$/i.exec(name)?.[1].toLowerCase() ?? "";
}

function asBlock({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}${languageOf(name)}\n${text.replace(/\n$/, "")}\n${fence}`;
}
