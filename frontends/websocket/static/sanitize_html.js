// @ts-check
/** HTML made from Markdown to DOM nodes without scripts, loaded resources or links to other schemes. */

import "./vendor/purify.min.js";

const { DOMPurify } = globalThis;
/** HTML elements that a model may use. All others are shown as text. */
export const PASSED_TAGS = new Set(
  ("abbr b blockquote br cite code dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i ins kbd li mark ol p pre q s samp " +
    "small span strong sub summary sup table tbody td th thead tr u ul var").split(" "),
);
const MARKDOWN_ATTRIBUTES = ["align", "checked", "data-language", "data-math", "disabled", "start", "type"];
const CONFIG = {
  ALLOWED_TAGS: [...PASSED_TAGS, "a", "input"],
  ALLOWED_ATTR: [...MARKDOWN_ATTRIBUTES, "class", "href", "title"],
  ADD_URI_SAFE_ATTR: MARKDOWN_ATTRIBUTES,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_NAMESPACES: ["http://www.w3.org/1999/xhtml"],
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.hasAttribute("class")) keepCodeColours(node);
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  } else if (node.tagName === "INPUT") {
    node.setAttribute("type", "checkbox"); // of a task list
    node.setAttribute("disabled", "");
    node.setAttribute("aria-label", node.hasAttribute("checked") ? "Done" : "Not done");
  }
});

/** Keep the classes of highlight.js and no other: a model must not style its text as a part of the page. */
function keepCodeColours(node) {
  const kept = [...node.classList].filter((name) => /^hljs(-[\w-]+)?$|^\w+_$/.test(name));
  if (kept.length) node.className = kept.join(" ");
  else node.removeAttribute("class");
}

/** Parse `html` into a fragment that is safe to put on the page. */
export function sanitizeHtml(html) {
  return DOMPurify.sanitize(html, CONFIG);
}

/** Escape text for HTML content and attributes. */
export function escapeHtml(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;").replace(/'/g, "&#39;");
}

/** The absolute URL of a link, or null where it must not be one: scripts, data, and paths of this page. */
export function safeUrl(target) {
  try {
    const url = new URL(target);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
