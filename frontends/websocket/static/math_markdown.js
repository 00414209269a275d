// @ts-check
/**
 * Formulas in Markdown: `$…$` and `\(…\)` inside of text, `$$…$$` and `\[…\]` on their own. A marked extension that
 * leaves a placeholder for each formula, and the KaTeX call that fills it.
 */

import "./vendor/katex/katex.min.js";

const { katex } = globalThis;
const MAX_CHARACTERS = 10_000;
const NO_BLANK_LINE = String.raw`(?:(?!\n[ \t]*\n)[\s\S])`;
const BLOCK = new RegExp(String.raw`^ {0,3}(?:\$\$(${NO_BLANK_LINE}+?)\$\$|\\\[(${NO_BLANK_LINE}+?)\\\])[ \t]*(?:\n|$)`);
const BLOCK_START = /(?:^|\n) {0,3}(?:\$\$|\\\[)/;
const OPEN_BLOCK = new RegExp(String.raw`^ {0,3}(?:\$\$(?!${NO_BLANK_LINE}*\$\$)|\\\[(?!${NO_BLANK_LINE}*\\\]))${NO_BLANK_LINE}*$`);
const INLINE = [
  { form: /^\$\$((?:\\[\s\S]|[^\\$])+)\$\$/, display: true },
  { form: new RegExp(String.raw`^\\\[(${NO_BLANK_LINE}+?)\\\]`), display: true },
  { form: new RegExp(String.raw`^\\\((${NO_BLANK_LINE}+?)\\\)`), display: false },
];
const DOLLARS = /^\$((?:\\[\s\S]|[^\\$`])+)\$(?![\d$]|[A-Z_]{2})/; // nor $HOME/$USER
const PRICE = /^\d[\d.,]*[kKmMbB%]?\s+\p{L}{2,}/u; // "$5 and 10$": an amount, not a formula
const ANY_INLINE = /\$\$?(?:\\[\s\S]|[^\\$`])+\$\$?|\\\((?:(?!\\\))[\s\S])+\\\)/g;

/** The marked extension. `isStreaming()`: a formula that is open at the end of the text is a block of its own. */
export function mathExtension(isStreaming) {
  return {
    extensions: [
      {
        name: "blockMath",
        level: "block",
        start: startOfBlock,
        tokenizer(source, tokens) {
          const isTopLevel = tokens === this.lexer.tokens; // the end of a list item is not the end of the text
          return readBlock(source, isTopLevel && isStreaming());
        },
        renderer: placeholder,
      },
      { name: "inlineMath", level: "inline", start: startOfInline, tokenizer: readInline, renderer: placeholder },
    ],
    // `*` and `_` inside of a formula are no emphasis; the mask must keep its length.
    hooks: { emStrongMask: (source) => source.replace(ANY_INLINE, (found) => "a".repeat(found.length)) },
  };
}

function startOfBlock(source) {
  const found = BLOCK_START.exec(source);
  return found ? found.index + (found[0].startsWith("\n") ? 1 : 0) : undefined;
}

function readBlock(source, mayStayOpen) {
  const found = BLOCK.exec(source);
  if (found) return token("blockMath", found[0], found[1] ?? found[2], true);
  if (mayStayOpen && OPEN_BLOCK.test(source)) return { type: "blockMath", raw: source, text: source, open: true };
  return undefined;
}

function startOfInline(source) {
  const at = source.search(/\$|\\[([]/);
  return at < 0 ? undefined : at;
}

function readInline(source, tokens) {
  for (const { form, display } of INLINE) {
    const found = form.exec(source);
    if (found) return token("inlineMath", found[0], found[1], display);
  }
  const found = DOLLARS.exec(source);
  const before = tokens.at(-1)?.raw ?? "";
  if (!found || /[\p{L}\p{N}]$/u.test(before) || !isFormula(found[1])) return undefined;
  return token("inlineMath", found[0], found[1], false);
}

/** Dollars around a formula have no space on their inner sides; those of two prices do. */
function isFormula(text) {
  return text.trim() === text && !/\n[ \t]*\n/.test(text) && !PRICE.test(text);
}

function token(type, raw, text, display) {
  return text.trim() && text.length <= MAX_CHARACTERS ? { type, raw, text: text.trim(), display } : undefined;
}

function placeholder({ text, display, open }) {
  const kind = open ? "open" : display ? "display" : "inline";
  const escaped = text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const tag = kind === "open" ? "p" : "span";
  return `<${tag} data-math="${kind}">${escaped}</${tag}>`;
}

/**
 * Replace the source in a placeholder by the formula. KaTeX builds nodes and sets their styles by script, which
 * the content security policy allows. Text that is not valid TeX stays as it is, as code.
 */
export function drawMath(element) {
  const kind = element.getAttribute("data-math");
  const source = element.textContent ?? "";
  element.removeAttribute("data-math");
  if (kind === "open") {
    element.className = "open-math";
    return;
  }
  try {
    katex.render(source, element, { displayMode: kind === "display", trust: false, strict: "ignore", maxSize: 20, maxExpand: 500 });
  } catch (error) {
    const code = document.createElement("code");
    code.textContent = source;
    code.title = error instanceof Error ? error.message : "";
    element.replaceChildren(code);
  }
}
