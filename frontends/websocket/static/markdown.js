// @ts-check
/**
 * Markdown of a model to DOM nodes. Text only ever enters the page as text nodes and links only as checked URLs, so
 * there is nothing to escape and nothing to inject. While an answer streams, only the blocks that changed are drawn.
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^ *\|? *:?-+:? *(\| *:?-+:? *)*\|? *$/;
const MAX_DEPTH = 8;

/** Draw `text` into `element`, keeping the blocks that are as they were. */
export function renderMarkdown(element, text) {
  const blocks = splitBlocks(text);
  const drawn = element._blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < drawn.length && blocks[same] === drawn[same]) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(renderBlock(block, 0));
  element._blocks = blocks;
}

/** The source of each top-level block, in order; nothing is lost, empty lines between blocks aside. */
export function splitBlocks(text) {
  const blocks = [];
  let current = [];
  let fence = null;
  const flush = () => {
    if (current.length) blocks.push(current.join("\n"));
    current = [];
  };
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    if (fence) {
      current.push(line);
      if (line.trim().startsWith(fence) && !line.trim().slice(fence.length).replaceAll(fence[0], "")) {
        fence = null;
        flush();
      }
      continue;
    }
    const opened = FENCE.exec(line);
    if (opened) {
      flush();
      fence = opened[1];
      current.push(line);
    } else if (!line.trim()) {
      if (current.length && ITEM.test(current[0])) current.push("");
      else flush();
    } else if (HEADING.test(line) || (RULE.test(line) && !ITEM.test(current[0] ?? ""))) {
      flush();
      blocks.push(line);
    } else if (startsAnotherList(current[0], line)) {
      flush();
      current.push(line);
    } else {
      const goesOn = current.length && kindOf(current[0]) === "list" && (/^ {2,}/.test(line) || current.at(-1) !== "");
      if (current.length && kindOf(current[0]) !== kindOf(line) && kindOf(line) !== "text" && !goesOn) flush();
      else if (current.at(-1) === "" && !/^ {2,}/.test(line) && kindOf(line) !== "list") flush();
      else if (kindOf(current[0] ?? "") === "quote" && kindOf(line) !== "quote") flush();
      current.push(line);
    }
  }
  flush();
  return blocks;
}

/** Bullets after numbers, or numbers after bullets, at the depth of the list that is open. */
function startsAnotherList(first, line) {
  const [open, next] = [ITEM.exec(first ?? ""), ITEM.exec(line)];
  return open && next && next[1].length <= open[1].length + 1 && /\d/.test(open[2]) !== /\d/.test(next[2]);
}

function kindOf(line) {
  if (QUOTE.test(line)) return "quote";
  return ITEM.test(line) ? "list" : "text";
}

function renderBlock(source, depth) {
  const lines = source.split("\n");
  const opened = FENCE.exec(lines[0]);
  if (opened) return codeBlock(lines, opened);
  const heading = HEADING.exec(lines[0]);
  if (heading) return withInline(make(`h${Math.min(heading[1].length, 4)}`), heading[2]);
  if (RULE.test(lines[0])) return make("hr");
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(lines[0])) return nested(make("blockquote"), lines.map((line) => QUOTE.exec(line)?.[1] ?? line), depth);
    if (ITEM.test(lines[0])) return list(lines, depth);
    if (lines.length > 1 && lines[0].includes("|") && TABLE_RULE.test(lines[1])) return table(lines);
  }
  return withInline(make("p"), source);
}

function nested(element, lines, depth) {
  const blocks = splitBlocks(lines.join("\n").trim());
  for (const block of blocks) element.append(renderBlock(block, depth + 1));
  return element;
}

function codeBlock(lines, [, fence, language]) {
  const last = lines.at(-1).trim();
  const closed = lines.length > 1 && last.startsWith(fence) && !last.replaceAll(fence[0], "");
  return codeElement(lines.slice(1, closed ? -1 : undefined).join("\n"), language);
}

/** A block of code with its language and a copy button (chat.js listens for `data-copy`). */
export function codeElement(text, language) {
  const block = make("pre");
  const head = make("div", "code-head");
  head.append(make("span", "", language || "text"));
  const copy = make("button", "icon");
  copy.type = "button";
  copy.dataset.copy = "code";
  copy.setAttribute("aria-label", "Copy code");
  copy.append(icon("copy"));
  head.append(copy);
  const code = make("code", "", text);
  code.tabIndex = 0; // a long line scrolls: the keyboard must reach it
  block.append(head, code);
  return block;
}

function list(lines, depth) {
  const [, , marker] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(marker);
  const element = make(ordered ? "ol" : "ul");
  if (ordered && parseInt(marker, 10) !== 1) element.start = parseInt(marker, 10);
  const indent = lines[0].search(/\S/);
  let item = null;
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent + 1) items.push((item = [found[3]]));
    else item.push(line.replace(new RegExp(`^ {0,${indent + marker.length + 1}}`), ""));
  }
  for (const content of items) {
    const entry = make("li");
    const inner = splitBlocks(content.join("\n").trimEnd());
    if (inner.length && kindOf(inner[0]) === "text" && !FENCE.test(inner[0])) withInline(entry, splitTight(inner));
    for (const block of inner) entry.append(renderBlock(block, depth + 1));
    element.append(entry);
  }
  return element;
}

/** The first paragraph of an item is its text; removed from `blocks`. A list that follows at once becomes a block. */
function splitTight(blocks) {
  const lines = blocks[0].split("\n");
  const start = lines.findIndex((line, index) => index > 0 && ITEM.test(line));
  if (start > 0) blocks[0] = lines.slice(start).join("\n");
  else blocks.shift();
  return lines.slice(0, start > 0 ? start : undefined).join("\n");
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());
  const row = (line, kind) => {
    const element = make("tr");
    for (const cell of cells(line)) element.append(withInline(make(kind), cell));
    return element;
  };
  const wrapper = make("div", "table");
  const element = make("table");
  const head = make("thead");
  const body = make("tbody");
  head.append(row(lines[0], "th"));
  for (const line of lines.slice(2)) body.append(row(line, "td"));
  element.append(head, body);
  wrapper.append(element);
  return wrapper;
}

const INLINE = [
  [/^\\([!-/:-@[-`{-~])/, (parent, [, character]) => parent.append(character)],
  [/^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, (parent, [, , code]) => parent.append(make("code", "", code.replace(/^ (.+) $/, "$1")))],
  [/^!?\[([^\]\n]{0,500})\]\(\s*<?([^\s()<>]{1,2000})>?(?:\s+"[^"\n]*")?\s*\)/, link],
  [/^<?(https?:\/\/[^\s<>()]{1,2000}[^\s<>().,;:!?'"])>?/, (parent, [, url]) => link(parent, ["", url, url])],
  [/^(\*\*|__)(?=\S)([\s\S]{0,4000}?\S)\1/, (parent, [, , inner], depth) => parent.append(withInline(make("strong"), inner, depth + 1))],
  [/^(\*|_)(?=\S)([^*_\n]{0,2000}?[^\s*_])\1(?!\w)/, (parent, [, , inner], depth) => parent.append(withInline(make("em"), inner, depth + 1))],
  [/^~~(?=\S)([\s\S]{0,2000}?\S)~~/, (parent, [, inner], depth) => parent.append(withInline(make("del"), inner, depth + 1))],
  [/^(?: {2,}|\\)?\n/, (parent) => parent.append(make("br"))],
];
const SPECIAL = /[\\`*_~[!<\n]|https?:\/\/| {2,}\n/;

/** Append `source` to `parent`, with emphasis, code, links and line breaks. */
function withInline(parent, source, depth = 0) {
  let rest = source;
  let before = "";
  const plain = (text) => {
    parent.append(text);
    before = text.at(-1) ?? before;
  };
  while (rest) {
    const at = depth < MAX_DEPTH ? rest.search(SPECIAL) : -1;
    if (at < 0) {
      plain(rest);
      break;
    }
    if (at > 0) plain(rest.slice(0, at));
    rest = rest.slice(at);
    const inWord = /\w/.test(before) && rest[0] === "_";
    const rule = inWord ? null : INLINE.map(([form, draw]) => [form.exec(rest), draw]).find(([found]) => found);
    if (rule) {
      rule[1](parent, rule[0], depth);
      rest = rest.slice(rule[0][0].length);
      before = rule[0][0].at(-1);
    } else {
      plain(rest[0]);
      rest = rest.slice(1);
    }
  }
  parent.normalize();
  return parent;
}

function link(parent, [, label, target]) {
  let url = null;
  try {
    url = new URL(target);
  } catch {
    // not absolute: a model's relative link leads nowhere on this page
  }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) {
    parent.append(label);
    return;
  }
  const element = make("a", "", label || url.href);
  element.href = url.href;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  parent.append(element);
}

/** An element with a class and a text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** One of the icons in index.html. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const element = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  element.append(use);
  element.setAttribute("aria-hidden", "true");
  return element;
}
