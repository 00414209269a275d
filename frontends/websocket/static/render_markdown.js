// @ts-check
/**
 * Markdown of a model to DOM nodes: marked reads it, highlight.js colours its code, DOMPurify removes what is unsafe,
 * KaTeX draws its formulas. While an answer streams, only its last blocks are read and drawn again.
 */

import { codeElement, make } from "./elements.js";
import { drawMath, mathExtension } from "./math_markdown.js";
import { PASSED_TAGS, escapeHtml, safeUrl, sanitizeHtml } from "./sanitize_html.js";
import hljs from "./vendor/highlight.min.js";
import { Marked } from "./vendor/marked.esm.js";

const UNSETTLED_BLOCKS = 2; // the next line can still join the last two blocks: `2. b` after `1. a`
const MAX_COLOURED_CHARACTERS = 50_000;
const TAG = /<!--[\s\S]*?(?:-->|$)|<(\/?)([a-zA-Z][\w-]*)((?:\s[^<>]*)?\/?)>/g;
const MARKERS_ONLY = /^[ \t>]*(?:(?:[-+*=_#~`|:$\\[\]!<]+|\d{1,9}[.)]?)(?: \[[ xX]?\]?)?)?[ \t]*$/;
const FENCE = /^[ \t>]*(?:```|~~~)/m;
const DEFINITION = /^[ >]*\[[^\]\n]+\]:/m; // of a link: it also counts for text before it
const CODE_SPAN = /(`+)[^`]+\1(?!`)/g;
const OPEN_LINK = /!?\[([^[\]]*)\]\([^()\s]*$/;

let streaming = false; // read by the tokenizers while marked runs, which is synchronous
const marked = new Marked({ gfm: true, breaks: true }, mathExtension(() => streaming), {
  renderer: {
    code: ({ text, lang }) => codeHtml(text, lang ?? ""),
    html: ({ text }) => passedHtml(text),
    image: ({ href, text }) => linkHtml(href, escapeHtml(text)),
    link({ href, tokens }) {
      const hasImage = tokens.some(({ type }) => type === "image"); // a link to an image would be a link in a link
      const label = hasImage ? escapeHtml(tokens.map(({ text }) => text).join("")) : this.parser.parseInline(tokens);
      return linkHtml(href, label);
    },
  },
});

/** @typedef {{ key: string, nodes: ChildNode[] }} Block */
/** @typedef {{ blocks: Block[], settled: string, numSettled: number, links: object }} Drawn */
/** What is drawn in each element. @type {WeakMap<Element, Drawn>} */
const drawnIn = new WeakMap();

/**
 * Draw `text` into `element`, keeping the nodes of blocks that did not change.
 * `options.streaming`: more text follows. What is not closed yet is drawn as if it were, and blocks that can no longer
 * change are not read again, so the cost of an update does not grow with the answer.
 */
export function renderMarkdown(element, text, options = {}) {
  streaming = options.streaming ?? false;
  const source = streaming ? withoutLoneMarkers(normalize(text)) : normalize(text);
  const before = drawnIn.get(element) ?? { blocks: [], settled: "", numSettled: 0, links: {} };
  let { settled, numSettled } = before;
  if (!streaming || !source.startsWith(settled)) [settled, numSettled] = ["", 0];
  let read = readBlocks(source.slice(settled.length), settled ? before.links : {});
  const linksChanged = JSON.stringify(read.links) !== JSON.stringify(before.links);
  if (linksChanged && settled) {
    [settled, numSettled] = ["", 0];
    read = readBlocks(source, {});
  }
  const blocks = drawBlocks(element, before.blocks, numSettled, read.groups, linksChanged);
  for (const group of streaming ? settledGroups(read.groups) : []) {
    if (!source.startsWith(group.source, settled.length)) break; // marked changed its source: read it again next time
    settled += group.source;
    numSettled++;
  }
  if (DEFINITION.test(source.slice(settled.length))) [settled, numSettled] = ["", 0]; // it may still change
  drawnIn.set(element, { blocks, settled, numSettled, links: read.links });
}

function normalize(text) {
  return text.replace(/\r\n?/g, "\n").replaceAll("\0", "\ufffd");
}

/** Hold back a last line of markers alone: `-` may become a list item, a heading's underline or a rule. */
function withoutLoneMarkers(text) {
  const start = text.lastIndexOf("\n");
  return MARKERS_ONLY.test(text.slice(start + 1)) ? text.slice(0, Math.max(start, 0)) : text;
}

// -- reading --------------------------------------------------------------------------------------------------------

/** Read the top-level blocks of `source`. HTML elements that span several blocks are one group. */
function readBlocks(source, links) {
  try {
    const groups = readGroups(source, links);
    const last = groups.groups.at(-1);
    if (!streaming || !last || last.tokens.at(-1).type === "blockMath" || FENCE.test(last.source)) return groups;
    const closed = closeOpenMarks(source);
    return closed === source ? groups : readGroups(closed, links);
  } catch {
    return { groups: [{ source, tokens: null, depth: 0 }], links }; // nested too deeply: shown as plain text
  }
}

function readGroups(source, links) {
  const lexer = new marked.Lexer(marked.defaults);
  Object.assign(lexer.tokens.links, links);
  const groups = [];
  for (const token of lexer.lex(source)) {
    const open = groups.at(-1);
    const depth = token.type === "html" ? openTags(token.raw) : 0;
    if (open?.depth > 0) {
      open.source += token.raw;
      open.tokens.push(token);
      open.depth += depth;
    } else groups.push({ source: token.raw, tokens: [token], depth });
  }
  return { groups, links: { ...lexer.tokens.links } };
}

/** How many elements of a piece of HTML stay open after it. */
function openTags(html) {
  let depth = 0;
  for (const [, closes, name, rest] of html.matchAll(TAG)) {
    const tag = name?.toLowerCase();
    if (tag && tag !== "br" && tag !== "hr" && !rest.endsWith("/") && PASSED_TAGS.has(tag)) depth += closes ? -1 : 1;
  }
  return depth;
}

/** The groups that no later text can change. */
function settledGroups(groups) {
  let end = groups.length;
  for (let unsettled = 0; end > 0 && unsettled < UNSETTLED_BLOCKS; end--) {
    if (groups[end - 1].tokens?.[0].type !== "space") unsettled++;
  }
  const open = groups.findIndex(({ tokens, depth }) => !tokens || depth > 0);
  return groups.slice(0, open < 0 ? end : Math.min(end, open));
}

/** Close code, bold text and a link that the last line leaves open. */
function closeOpenMarks(source) {
  const start = source.lastIndexOf("\n") + 1;
  let line = source.slice(start);
  const mask = (found) => " ".repeat(found.length);
  const tick = line.replace(CODE_SPAN, mask).indexOf("`");
  if (tick >= 0) {
    const run = /^`+/.exec(line.slice(tick))[0];
    return source.slice(0, start) + (line.length > tick + run.length ? line + run : line.slice(0, tick));
  }
  const link = OPEN_LINK.exec(line.replace(CODE_SPAN, mask));
  if (link) line = line.slice(0, link.index) + link[1];
  const bold = [...line.replace(CODE_SPAN, mask).matchAll(/\*\*/g)];
  if (bold.length % 2 === 0) return source.slice(0, start) + line;
  const { index } = bold.at(-1);
  const inner = line.slice(index + 2).trimEnd().replace(/\*$/, "");
  return source.slice(0, start) + line.slice(0, index) + (inner ? `**${inner}**` : "");
}

// -- drawing --------------------------------------------------------------------------------------------------------

/** Keep the first `numKept` blocks and those that are as they were; replace the others. */
function drawBlocks(element, before, numKept, groups, redraw) {
  const blocks = before.slice(0, numKept);
  const keys = groups.map(({ source, tokens }) => (tokens?.at(-1).open ? `open ${source}` : source));
  let same = 0;
  while (!redraw && same < keys.length && before[numKept + same]?.key === keys[same]) blocks.push(before[numKept + same++]);
  for (const { nodes } of before.slice(blocks.length)) for (const node of nodes) node.remove();
  for (const [index, group] of groups.entries()) {
    if (index < same) continue;
    const nodes = drawGroup(group);
    element.append(...nodes);
    blocks.push({ key: keys[index], nodes });
  }
  return blocks;
}

function drawGroup({ source, tokens }) {
  if (!tokens) return [make("p", "plain-text", source)];
  try {
    const fragment = sanitizeHtml(marked.parser(tokens));
    finish(fragment);
    return [...fragment.childNodes].filter((node) => !(node instanceof Text) || node.data.trim());
  } catch {
    return [make("p", "plain-text", source)];
  }
}

/** Add what only script can: copy buttons, formulas, and a box in which a wide table scrolls. */
function finish(fragment) {
  for (const code of fragment.querySelectorAll("pre > code[data-language]")) {
    code.parentElement.replaceWith(codeElement(code.childNodes, code.getAttribute("data-language")));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", "table");
    table.replaceWith(box);
    box.append(table);
  }
  for (const element of fragment.querySelectorAll("[data-math]")) drawMath(element);
}

// -- HTML for the sanitizer -----------------------------------------------------------------------------------------

function codeHtml(text, info) {
  const language = /^[^\s{,]*/.exec(info)[0];
  const coloured = hljs.getLanguage(language) && text.length <= MAX_COLOURED_CHARACTERS;
  const content = coloured ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escapeHtml(text);
  return `<pre><code data-language="${escapeHtml(language)}">${content}</code></pre>`;
}

/** A link, or its label alone where the address is not an absolute web or mail address. An image becomes a link too. */
function linkHtml(target, label) {
  const url = safeUrl(target);
  return url ? `<a href="${escapeHtml(url)}">${label || escapeHtml(url)}</a>` : label;
}

/** HTML of the model: plain elements without their attributes; all other tags become text, so `List<String>` stays. */
function passedHtml(html) {
  let passed = "";
  let at = 0;
  for (const found of html.matchAll(TAG)) {
    passed += html.slice(at, found.index).replace(/</g, "&lt;") + passedTag(found);
    at = found.index + found[0].length;
  }
  return passed + html.slice(at).replace(/</g, "&lt;");
}

function passedTag([tag, closes, name, attributes]) {
  if (name === undefined) return ""; // a comment
  const lower = name.toLowerCase();
  if (PASSED_TAGS.has(lower)) return `<${closes}${lower}>`;
  if (lower === "img" && safeUrl(attribute(attributes, "src"))) {
    return linkHtml(attribute(attributes, "src"), escapeHtml(attribute(attributes, "alt")));
  }
  if (lower === "a" && closes) return "</a>";
  const url = lower === "a" ? safeUrl(attribute(attributes, "href")) : null;
  return url ? `<a href="${escapeHtml(url)}">` : escapeHtml(tag);
}

function attribute(attributes, name) {
  const found = new RegExp(`\\s${name}\\s*=\\s*(?:"([^"]*)"|'([^']*)'|([^\\s"'>]+))`, "i").exec(attributes);
  return found?.[1] ?? found?.[2] ?? found?.[3] ?? "";
}
