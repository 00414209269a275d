// @ts-check
/** Small builders of DOM elements. Text enters as text nodes only. */

/** Create an element with a class and a text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** Make `elements` the children of `parent`. Those that are there already are not moved: they keep focus and scroll. */
export function setChildren(parent, elements) {
  const kept = new Set(elements);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  let next = parent.firstElementChild;
  for (const element of elements) {
    if (element === next) next = next.nextElementSibling;
    else parent.insertBefore(element, next);
  }
}

/** Create an `svg` that shows one of the icons in index.html. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const element = document.createElementNS(space, "svg");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  element.append(use);
  element.setAttribute("aria-hidden", "true");
  return element;
}

/**
 * Create a code block with its language and a copy button. chat.js handles clicks on `data-copy`.
 * @param {string | Iterable<Node>} content
 */
export function codeElement(content, language = "") {
  const block = make("pre");
  const head = make("div", "code-head");
  head.append(make("span", "", language || "text"));
  const copy = make("button", "icon");
  copy.type = "button";
  copy.dataset.copy = "code";
  copy.setAttribute("aria-label", "Copy code");
  copy.append(icon("copy"));
  head.append(copy);
  const code = make("code");
  code.append(...(typeof content === "string" ? [content] : content));
  code.tabIndex = 0; // a long line scrolls: the keyboard must reach it
  block.append(head, code);
  return block;
}
