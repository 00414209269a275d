"""Nothing that a model writes becomes an element, an attribute or an address of its own on the page."""

from __future__ import annotations

import random

import pytest

pytestmark = pytest.mark.browser

PIECES = [
    "<script>hacked=1</script>",
    "<img src=x onerror=hacked=1>",
    "<svg/onload=hacked=1>",
    "&lt;b&gt;",
    "<a href=",
    '"',
    "'",
    ">",
    "[a](",
    "javascript:hacked=1",
    "JaVa\tscript:hacked=1",
    "data:text/html,<script>hacked=1</script>",
    "vbscript:x",
    "//evil/",
    "https://ok.example/",
    "mailto:a@b",
    ")",
    "](",
    "![x](",
    "[",
    "]",
    "`",
    "```",
    "~~~html\n",
    "\n",
    "\n\n",
    "    ",
    "> ",
    "- ",
    "1. ",
    "# ",
    "|",
    "|---|\n",
    "**",
    "__",
    "*",
    "_",
    "~~",
    "\\",
    "\x00",
    "\u202e",
    "word ",
    "<!--",
    "-->",
    "<iframe srcdoc='",
    "&#106;",
]
HARMLESS = """async (texts) => {
  const { renderMarkdown } = await import("./markdown.js");
  const elements = new Set(["A", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H1", "H2", "H3",
    "H4", "HR", "LI", "OL", "P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL", "svg",
    "use"]);
  const attributes = new Set(["class", "type", "data-copy", "aria-label", "aria-hidden", "tabindex", "start",
    "rel", "target"]);
  const isHarmless = (element, { name, value }) => attributes.has(name)
    || (name === "href" && element.tagName === "use" && value === "#i-copy")
    || (name === "href" && element.tagName === "A" && /^(https?|mailto):/.test(value));
  const bad = [];
  for (const text of texts) {
    const root = document.createElement("div");
    document.body.append(root);
    renderMarkdown(root, text);
    for (const element of root.querySelectorAll("*")) {
      if (!elements.has(element.tagName)) bad.push([text, element.tagName]);
      for (const attribute of element.attributes) {
        if (!isHarmless(element, attribute)) bad.push([text, attribute.name, attribute.value]);
      }
    }
    root.remove();
  }
  return bad.slice(0, 5);
}"""


def test_whatever_a_model_writes_only_harmless_elements_come_of_it(open_page):
    """3,000 seeded mixtures of markdown, markup and addresses."""
    draw = random.Random(7)
    texts = ["".join(draw.choice(PIECES) for _ in range(draw.randint(1, 12))) for _ in range(3000)]
    page = open_page()
    assert page.evaluate(HARMLESS, texts) == []
    assert page.evaluate("window.hacked") is None
