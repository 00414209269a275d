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
    "$",
    "$$\n",
    "\\(",
    "\\)",
    "\\href{javascript:hacked=1}{x}",
    "<b>",
    "<details>",
    "<math><mtext>",
    "<style>",
]
VECTORS = [
    "<script>hacked=1</script>",
    "<ScRiPt\n>hacked=1</sCrIpT >",
    "<img src=x onerror=hacked=1>",
    "<img src='https://x.example/a.png' onerror=hacked=1 alt='\"><img src=x onerror=hacked=1>'>",
    "<b onclick=hacked=1 onmouseover=hacked=1 style='position:fixed;inset:0'>x</b>",
    "<details open ontoggle=hacked=1><summary>x</summary></details>",
    "<svg onload=hacked=1><script>hacked=1</script></svg>",
    "<svg><animate onbegin=hacked=1 attributeName=x dur=1s>",
    "<svg><a xlink:href='javascript:hacked=1'><text>x</text></a></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=hacked=1&gt;'>",
    "<math><maction actiontype='statusline#http://x' xlink:href='javascript:hacked=1'>x</maction></math>",
    "<form><math><mtext></form><form><mglyph><style></math><img src=x onerror=hacked=1>",
    "<noscript><p title='</noscript><img src=x onerror=hacked=1>'></noscript>",
    "<table><td><a href='javascript:hacked=1'>x</a></td></table>",
    "<a href='java&#115;cript:hacked=1'>x</a>",
    "<a href='java\tscript:hacked=1'>x</a>",
    "<a href=' &#1; javascript:hacked=1'>x</a>",
    "<a href='https://x.example/' onclick='hacked=1' target=_self>x</a>",
    "<a href='data:text/html;base64,PHNjcmlwdD5oYWNrZWQ9MTwvc2NyaXB0Pg=='>x</a>",
    "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>",
    "<iframe src='javascript:parent.hacked=1'></iframe>",
    "<object data='data:text/html,<script>hacked=1</script>'></object><embed src='javascript:hacked=1'>",
    "<base href='https://evil.example/'><link rel=stylesheet href='https://evil.example/x.css'>",
    "<meta http-equiv=refresh content='0;url=javascript:hacked=1'>",
    "<style>@import 'https://evil.example/x.css'; * { display: none }</style>",
    "<input autofocus onfocus=hacked=1><textarea autofocus onfocus=hacked=1></textarea>",
    "<video><source onerror=hacked=1></video><audio src=x onerror=hacked=1>",
    "<template><img src=x onerror=hacked=1></template><body onload=hacked=1>",
    "<img name=body id=getElementById><form id=test><input name=attributes></form>",
    "<x-element is=a onclick=hacked=1>x</x-element><button formaction='javascript:hacked=1'>x</button>",
    "[x](javascript:hacked=1) [x](JAVASCRIPT&colon;hacked=1) [x](\x01javascript:hacked=1)",
    "[x](data:text/html,<script>hacked=1</script>) ![x](data:image/svg+xml,<svg/onload=hacked=1>)",
    "[x](vbscript:hacked) <javascript:hacked=1> [x](//evil.example) [x]: javascript:hacked=1\n\n[x]",
    '[x](https://x.example/"onmouseover="hacked=1) ![a"onerror="hacked=1](https://x.example/"onerror="hacked=1)',
    '[x](https://x.example "t"onclick="hacked=1")',
    '```"><img src=x onerror=hacked=1>\nx\n```',
    "```html\n<img src=x onerror=hacked=1></code></pre><script>hacked=1</script>\n```",
    "`</code><img src=x onerror=hacked=1>`",
    "| <img src=x onerror=hacked=1> |\n|---|\n| <script>hacked=1</script> |",
    "- [ ] <input type=image src=x onerror=hacked=1>",
    "$\\href{javascript:hacked=1}{x}$ $\\url{javascript:hacked=1}$ $\\includegraphics{https://evil.example/x.png}$",
    "$\\htmlStyle{position:fixed}{x}$ $\\htmlData{x=1}{x}$ $\\htmlId{log}{x}$ $\\htmlClass{failure}{x}$",
    "$</span><img src=x onerror=hacked=1>$ $$\n\\text{<script>hacked=1</script>}\n$$",
    "<span data-math=inline>\\href{javascript:hacked=1}{x}</span>",
    "<!--><img src=x onerror=hacked=1>--> <!-- --!><img src=x onerror=hacked=1> -->",
    "<![CDATA[<img src=x onerror=hacked=1>]]><?php <img src=x onerror=hacked=1> ?>",
    "<div>\n<img src=x onerror=hacked=1\n</div><div\nonclick=hacked=1>x",
    "<<script>hacked=1//<</script><scr<script>ipt>hacked=1</scr</script>ipt>",
    "\\u003cimg src=x onerror=hacked=1> &lt;img src=x onerror=hacked=1&gt; %3Cscript%3E",
]
HARMLESS = """async (texts) => {
  const { renderMarkdown } = await import("./render_markdown.js");
  const elements = new Set(("a abbr b blockquote br button cite code dd del details div dl dt em h1 h2 h3 h4 " +
    "h5 h6 hr i input ins kbd li mark ol p pre q s samp small span strong sub summary sup svg table tbody td th " +
    "thead tr u ul use var").split(" "));
  const never = /^(script|a|img|iframe|object|embed|style|link|form|input|foreignobject|annotation-xml)$/i;
  const attributes = new Set(["class", "type", "data-copy", "aria-label", "aria-hidden", "tabindex", "start", "rel",
    "target", "align", "checked", "disabled", "title"]);
  const isHarmless = (element, { name, value }) => {
    if (name === "class") return value.split(" ").every((one) =>
      /^(hljs-[\\w-]+|\\w+_|code-head|icon|table|open-math|plain-text)$/.test(one));
    if (name === "target") return value === "_blank";
    if (name === "href" && element.tagName === "use") return value === "#i-copy";
    if (name === "href") return element.tagName === "A" && /^(https?|mailto):/.test(value);
    return attributes.has(name);
  };
  const isHarmlessMath = (element, { name, value }) => !/^on|^src|^id$|^name$|^data-/.test(name)
    && (!/href/.test(name)) && !/position|fixed|url/.test(name === "style" ? value : "");
  const bad = [];
  for (const text of texts) for (const streaming of [true, false]) {
    const root = document.createElement("div");
    document.body.append(root);
    renderMarkdown(root, text, { streaming });
    for (const element of root.querySelectorAll("*")) {
      const math = element.closest(".katex");
      if (!math && !elements.has(element.localName) && !element.querySelector(":scope > .katex"))
        bad.push([text, element.tagName]);
      if (math && never.test(element.tagName))
        bad.push([text, element.tagName]);
      for (const attribute of element.attributes) {
        const isMathBox = attribute.name === "class" && attribute.value === "katex-display";
        if (math ? !isHarmlessMath(element, attribute) : !isMathBox && !isHarmless(element, attribute))
          bad.push([text, attribute.name, attribute.value]);
      }
    }
    for (const element of root.querySelectorAll("a, b, details, span, div, input")) {
      if (element.localName !== "a") element.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
    }
    await 0;
    root.remove();
  }
  return bad.slice(0, 5);
}"""


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_a_known_attack_has_no_effect(shared_page, vector):
    assert shared_page.evaluate(HARMLESS, [vector]) == []
    assert shared_page.evaluate("window.hacked") is None


def test_drawn_markup_parses_to_the_same_nodes(shared_page):
    """Mutation XSS: markup that only becomes an attack when a browser writes it out and reads it back."""
    found = shared_page.evaluate(
        """async (texts) => {
          const { renderMarkdown } = await import("./render_markdown.js");
          return texts.filter((text) => {
            const root = document.createElement("div");
            renderMarkdown(root, text);
            for (const styled of root.querySelectorAll("[style]")) styled.removeAttribute("style"); // set by script
            const again = new DOMParser().parseFromString(DOMPurify.sanitize(root.innerHTML, {
              RETURN_TRUSTED_TYPE: true, WHOLE_DOCUMENT: true, ADD_TAGS: ["semantics", "annotation"] }), "text/html");
            return again.querySelector("script, img, iframe, [onerror], [onclick], [onload]") !== null;
          });
        }""",
        VECTORS,
    )
    assert found == []


def test_only_dompurify_may_turn_text_into_markup(chromium, server):
    """The content security policy refuses it to every other script, so a mistake of the page fails closed."""
    page = chromium.new_page()
    page.goto(server.url)
    refused = page.evaluate(
        """() => {
          try { document.createElement("div").innerHTML = "<b>x</b>"; } catch (error) { return error.name; }
          return null;
        }"""
    )
    page.close()
    assert refused == "TypeError"


def test_model_output_yields_only_harmless_elements(open_page):
    """3,000 seeded mixtures of markdown, markup and addresses."""
    draw = random.Random(7)
    texts = ["".join(draw.choice(PIECES) for _ in range(draw.randint(1, 12))) for _ in range(3000)]
    page = open_page()
    for start in range(0, len(texts), 250):
        assert page.evaluate(HARMLESS, texts[start : start + 250]) == []
    assert page.evaluate("window.hacked") is None
