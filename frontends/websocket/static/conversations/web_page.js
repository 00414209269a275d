// @ts-check
/** A conversation as one HTML file to read and to share: no script, nothing loaded, no way back to this server. */

import { drawCalls, isJson, jsonElement, pretty } from "../answer_parts.js";
import { withFiles } from "../composer/attached_files.js";
import { make } from "../elements.js";
import { renderMarkdown } from "../render_markdown.js";

const POLICY = "default-src 'none'; style-src 'unsafe-inline'";
const STYLE = `
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #2c6b5f; }
@media (prefers-color-scheme: dark) { :root { --accent: #7fc4b3; } }
body { max-width: 46rem; margin: 2.5rem auto; padding: 0 1.2rem; font: 16px/1.6 ui-sans-serif, system-ui, sans-serif; }
h1.title { font-size: 1.5rem; letter-spacing: -0.02em; }
.when { color: GrayText; font-size: .85rem; }
article { margin: 1.8rem 0; overflow-wrap: anywhere; }
article.user { margin-left: 15%; padding: .7rem 1rem; border-radius: 14px; background: var(--soft); white-space: pre-wrap; }
article.system { padding: .7rem 1rem; border: 1px dashed var(--line); border-radius: 14px; white-space: pre-wrap; }
pre { overflow-x: auto; padding: .8rem 1rem; border: 1px solid var(--line); border-radius: 10px; font-size: .85rem; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; }
table { border-collapse: collapse; } th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; }
blockquote { margin-inline: 0; padding-left: 1rem; border-left: 3px solid var(--line); }
a { color: var(--accent); }
.katex-html, .code-head, .call-head svg { display: none; }
.hljs-keyword, .hljs-built_in, .hljs-name, .j-key { color: var(--accent); } .hljs-comment { color: GrayText; }
`;

/** The HTML of the branch that is shown. */
export function toWebPage({ title, system = "", updated }, path) {
  const page = document.implementation.createHTMLDocument(title);
  page.documentElement.lang = "en";
  const charset = make("meta");
  charset.setAttribute("charset", "utf-8");
  const policy = make("meta");
  policy.setAttribute("http-equiv", "Content-Security-Policy");
  policy.setAttribute("content", POLICY);
  const viewport = make("meta");
  viewport.setAttribute("name", "viewport");
  viewport.setAttribute("content", "width=device-width, initial-scale=1");
  page.head.prepend(charset, policy, viewport);
  page.body.append(make("h1", "title", title), make("p", "when", `${new Date(updated).toLocaleString("en")} · InferEngine`));
  if (system.trim()) page.body.append(make("article", "system", system.trim()));
  const results = new Map(path.filter(({ role }) => role === "tool").map(({ callId, content }) => [callId, content]));
  for (const message of path) if (message.role !== "tool") page.body.append(articleOf(message, results));
  for (const element of page.body.querySelectorAll("button, .katex-html, svg")) element.remove();
  for (const element of page.body.querySelectorAll("[tabindex]")) element.removeAttribute("tabindex");
  const text = new XMLSerializer().serializeToString(page.documentElement);
  // As text: this page's own policy forbids a style element, and XML would write its text in another way than HTML.
  return `<!doctype html>\n${text.replace("</head>", () => `<style>${STYLE}</style></head>`)}`;
}

function articleOf(message, results) {
  if (message.role === "user") return make("article", "user", withFiles(message.content, message.files));
  const article = make("article", "assistant");
  const body = make("div");
  const calls = make("div");
  if (message.content && (message.json || isJson(message.content))) body.append(jsonElement(pretty(message.content)));
  else renderMarkdown(body, message.content);
  drawCalls(calls, message.toolCalls ?? [], results, null);
  article.append(body, calls);
  return article;
}
