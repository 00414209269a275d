"""How the chat page draws Markdown: everyday cases, links and images, code, formulas, and text that still streams."""

from __future__ import annotations

import random

import pytest

from tests.browser.conftest import MARKDOWN
from tests.browser.reading import CONTRAST, ask, finish

pytestmark = pytest.mark.browser

DRAW = """async ([text, options]) => {
  const { renderMarkdown } = await import("./render_markdown.js");
  const element = document.createElement("div");
  renderMarkdown(element, text, options);
  for (const button of element.querySelectorAll(".code-head")) button.remove();
  for (const made of element.querySelectorAll("[rel]")) made.removeAttribute("rel"), made.removeAttribute("target");
  for (const code of element.querySelectorAll("code")) code.removeAttribute("tabindex");
  return element.innerHTML.replace(/>\\n+</g, "><").trim();
}"""


@pytest.fixture
def page(shared_page):
    return shared_page


def draw(page, text, **options):
    return page.evaluate(DRAW, [text, options])


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("# One\n\n###### Six", "<h1>One</h1><h6>Six</h6>"),
        ("Title\n=====\nText", "<h1>Title</h1><p>Text</p>"),
        ("one\ntwo", "<p>one<br>two</p>"),
        ("***both*** and *a **b** c*", "<p><em><strong>both</strong></em> and <em>a <strong>b</strong> c</em></p>"),
        ("snake_case_name and 2*3*4", "<p>snake_case_name and 2<em>3</em>4</p>"),
        ("~~old~~ `a | b`", "<p><del>old</del> <code>a | b</code></p>"),
        ("- a\n  - b\n    - c\n- d", "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b\n   - c", '<ol start="3"><li>a</li><li>b<ul><li>c</li></ul></li></ol>'),
        ("1. a\n\n   more\n2. b", "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>"),
        ("1. run\n   ```\n   x\n   ```\n2. end", "<ol><li>run<pre><code>x</code></pre></li><li>end</li></ol>"),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("```\n<b> & \\( $x$\n```", "<pre><code>&lt;b&gt; &amp; \\( $x$</code></pre>"),
        ("~~~~\n~~~\n~~~~", "<pre><code>~~~</code></pre>"),
        ("    indented", "<pre><code>indented</code></pre>"),
        ("\\*plain\\* 1 < 2 && AT&T &copy;", "<p>*plain* 1 &lt; 2 &amp;&amp; AT&amp;T ©</p>"),
        ("H<sub>2</sub>O<br>x", "<p>H<sub>2</sub>O<br>x</p>"),
        ("<DIV CLASS='failure' id=x>a</DIV>", "<div>a</div>"),
        ("List<String> and <T>", "<p>List&lt;String&gt; and &lt;T&gt;</p>"),
        ("<!-- note -->\n\na", "<p>a</p>"),
    ],
)
def test_everyday_markdown(page, text, html):
    assert draw(page, text) == html


def test_a_table_keeps_its_alignment_and_formatting(page):
    html = draw(page, "| a | b |\n|:--|--:|\n| **1** | `x \\| y` |\n| 2 |")
    assert html == (
        '<div class="table"><table><thead><tr><th align="left">a</th><th align="right">b</th></tr></thead>'
        '<tbody><tr><td align="left"><strong>1</strong></td><td align="right"><code>x | y</code></td></tr>'
        '<tr><td align="left">2</td><td align="right"></td></tr></tbody></table></div>'
    )


def test_a_task_list_shows_boxes_that_cannot_be_changed(page):
    html = draw(page, "- [x] done\n- [ ] open")
    assert html.count('type="checkbox"') == 2
    assert html.count('disabled=""') == 2
    assert html.count('checked=""') == 1
    assert html.count('aria-label="Not done"') == 1


def test_a_collapsible_part_spans_its_blocks(page):
    html = draw(page, "<details>\n<summary>More</summary>\n\n- **a**\n\n</details>\n\nafter")
    assert html == "<details><summary>More</summary><ul><li><strong>a</strong></li></ul></details><p>after</p>"


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](https://x.example/y_z_(w))", [("a", "https://x.example/y_z_(w)")]),
        ("see https://x.example/a?b=1&c=2.", [("https://x.example/a?b=1&c=2", "https://x.example/a?b=1&c=2")]),
        ("[a][r]\n\n[r]: https://x.example", [("a", "https://x.example/")]),
        ("[**a** `b`](https://x.example 'title')", [("a b", "https://x.example/")]),
        ("![a cat](https://x.example/cat.png)", [("a cat", "https://x.example/cat.png")]),
        ("![](https://x.example/cat.png)", [("https://x.example/cat.png",) * 2]),
        ("[![badge](https://x.example/b.svg)](https://x.example/)", [("badge", "https://x.example/")]),
        ('<img src="https://x.example/cat.png" alt="a cat">', [("a cat", "https://x.example/cat.png")]),
        ('<a href="https://x.example/" onclick="x()">a</a>', [("a", "https://x.example/")]),
        ("write to a@x.example", [("a@x.example", "mailto:a@x.example")]),
        ("[relative](/v1/models) [anchor](#top) [file](file:///etc/passwd)", []),
        ("`https://x.example`", []),
    ],
)
def test_links_and_images_are_links_that_open_a_new_tab(page, text, links):
    found = page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("./render_markdown.js");
          const element = document.createElement("div");
          renderMarkdown(element, text);
          const opens = [...element.querySelectorAll("a")].every((link) =>
            link.target === "_blank" && ["noopener", "noreferrer"].every((word) => link.relList.contains(word)));
          const links = [...element.querySelectorAll("a")].map((link) => [link.textContent, link.href]);
          return [opens, element.querySelectorAll("img").length, links];
        }""",
        text,
    )
    assert found == [True, 0, [list(link) for link in links]]


def test_code_is_coloured_by_its_language_and_keeps_its_text(page):
    html = draw(page, "```python\ndef f(x):  # add\n    return x + 1\n```")
    assert '<span class="hljs-keyword">def</span>' in html
    assert '<span class="hljs-comment"># add</span>' in html
    assert draw(page, "```unknown-language\na < b\n```") == "<pre><code>a &lt; b</code></pre>"


FORMULAS = """async (text) => {
  const { renderMarkdown } = await import("./render_markdown.js");
  const element = document.createElement("div");
  renderMarkdown(element, text);
  const sources = [...element.querySelectorAll("annotation")].map((source) => source.textContent);
  return [sources, element.querySelectorAll(".katex-display").length];
}"""


@pytest.mark.parametrize(
    ("text", "sources", "displayed"),
    [
        ("Let $x_i$ and $y_i$ be", ["x_i", "y_i"], 0),
        (r"Let \(a*b\) and *c* and $d*e$", ["a*b", "d*e"], 0),
        ("$$\nE = mc^2\n$$", ["E = mc^2"], 1),
        ("So\n\\[\na \\\\\nb\n\\]\nthen", ["a \\\\\nb"], 1),
        ("Inline $$x$$ here", ["x"], 1),
        ("- a\n\n  $$x$$\n- $y$", ["x", "y"], 1),
        ("| $a$ | b |\n|---|---|\n| $c_1$ | $d_1$ |", ["a", "c_1", "d_1"], 0),
        ("the $n$th of $k$-means, $5$ and $x$.", ["n", "k", "5", "x"], 0),
        ("It costs $5 and $10.", [], 0),
        ("From $5 to $10, or $15-$20, or US$30 and AU$40 a month", [], 0),
        ("Between $5 and 10$ or $ 5 $", [], 0),
        ("`$x$` and \\$y\\$ and $HOME/$USER1", [], 0),
        ("```\n$x$\n```", [], 0),
    ],
)
def test_formulas_are_distinguished_from_prices(page, text, sources, displayed):
    assert page.evaluate(FORMULAS, text) == [sources, displayed]


def test_a_formula_that_is_not_valid_is_shown_as_its_source(page):
    assert page.evaluate(FORMULAS, r"$\frac{1$") == [[], 0]
    assert ">\\frac{1</code>" in draw(page, r"$\frac{1$")


def test_a_formula_is_drawn_with_its_own_fonts_and_layout(page):
    height, font = page.evaluate(
        r"""async () => {
          const { renderMarkdown } = await import("./render_markdown.js");
          const body = document.createElement("div");
          body.className = "body";
          document.body.append(body);
          renderMarkdown(body, "$$\\left(\\frac{\\mathbb{R}}{\\sqrt{x}}\\right)^2$$");
          await document.fonts.load("16px KaTeX_Main");
          await document.fonts.ready;
          const found = [body.querySelector(".katex-html").getBoundingClientRect().height,
            [...document.fonts].some((font) => font.family.includes("KaTeX_AMS") && font.status === "loaded")];
          body.remove();
          return found;
        }"""
    )
    assert height > 30
    assert font


@pytest.mark.parametrize(
    ("partial", "html"),
    [
        ("Some **bold te", "<p>Some <strong>bold te</strong></p>"),
        ("Some **", "<p>Some </p>"),
        ("Call `run(", "<p>Call <code>run(</code></p>"),
        ("See [the docs](https://exa", "<p>See the docs</p>"),
        ("Steps:\n-", "<p>Steps:</p>"),
        ("```python\nx", "<pre><code>x</code></pre>"),
        ("So\n$$\n\\frac{a_1", '<p>So</p><p class="open-math">$$\n\\frac{a_1</p>'),
        ("| a | b |\n|---|---|\n| 1 |", None),
    ],
)
def test_open_markup_is_drawn_as_if_closed(page, partial, html):
    drawn = draw(page, partial, streaming=True)
    if html is None:
        assert "<td>1</td>" in drawn
    else:
        assert drawn == html


STREAM = """async ([texts, step]) => {
  const { renderMarkdown } = await import("./render_markdown.js");
  const bad = [];
  for (const text of texts) {
    const element = document.createElement("div");
    for (let end = 0; end < text.length + step; end += step) {
      renderMarkdown(element, text.slice(0, end), { streaming: true });
      const fresh = document.createElement("div");
      renderMarkdown(fresh, text.slice(0, end), { streaming: true });
      if (element.innerHTML !== fresh.innerHTML) {
        bad.push([text.slice(0, end), element.innerHTML, fresh.innerHTML]);
        break;
      }
    }
    renderMarkdown(element, text);
    const whole = document.createElement("div");
    renderMarkdown(whole, text);
    if (element.innerHTML !== whole.innerHTML) bad.push([text, element.innerHTML, whole.innerHTML]);
  }
  return bad.slice(0, 3);
}"""
LINES = [
    "text",
    "- a",
    "  - b",
    "1. one",
    "2. two",
    "",
    "",
    "",
    "    code",
    "```",
    "```py",
    "| a | b |",
    "|---|---|",
    "> quote",
    "# head",
    "===",
    "---",
    "$$",
    "x_1 = $y$",
    "\\[",
    "\\]",
    "<details>",
    "</details>",
    "<div>",
    "**bold** [r]",
    "[r]: https://x.example",
    "<!--",
    "-->",
    "  more",
]


def test_each_step_of_a_stream_equals_a_fresh_drawing(page):
    """Reading only the last blocks again changes nothing: 150 seeded documents, and a usual one letter by letter."""
    pick = random.Random(11)
    texts = ["\n".join(pick.choice(LINES) for _ in range(pick.randint(2, 25))) for _ in range(150)]
    assert page.evaluate(STREAM, [[MARKDOWN + "\n$$a$$\n\n1. x\n\n2. y\n"], 1]) == []
    assert page.evaluate(STREAM, [texts, 7]) == []


def test_blocks_that_did_not_change_keep_their_nodes(page):
    """A selection in an earlier paragraph survives while the answer goes on."""
    assert page.evaluate(
        """async () => {
          const { renderMarkdown } = await import("./render_markdown.js");
          const element = document.createElement("div");
          renderMarkdown(element, "one\\n\\ntwo\\n\\nthr", { streaming: true });
          const [first, second] = element.children;
          renderMarkdown(element, "one\\n\\ntwo\\n\\nthree", { streaming: true });
          renderMarkdown(element, "one\\n\\ntwo\\n\\nthree");
          return first === element.children[0] && second === element.children[1] && element.children.length === 3;
        }"""
    )


def test_the_cost_of_an_update_does_not_grow_with_the_answer(page):
    """An answer of 40,000 characters: an update at its end costs about as much as one at its start."""
    early, late = page.evaluate(
        """async (part) => {
          const { renderMarkdown } = await import("./render_markdown.js");
          const element = document.createElement("div");
          const text = part.repeat(Math.ceil(40_000 / part.length));
          const times = [];
          for (let end = 50; end < text.length; end += 50) {
            const start = performance.now();
            renderMarkdown(element, text.slice(0, end), { streaming: true });
            times.push(performance.now() - start);
          }
          const median = (list) => list.sort((a, b) => a - b)[list.length >> 1];
          return [median(times.slice(0, 200)), median(times.slice(-200))];
        }""",
        MARKDOWN + "\nA line of text with $x_1$ and **bold** words.\n\n",
    )
    assert late < 3 * early + 2


@pytest.mark.parametrize(
    "piece", ["> ", "1. ", "- ", "[", "*a ", "**", "$", "$$\n", "`", "<div>", "<!--", "\\(", "|", "_a_"]
)
def test_hostile_repetition_is_drawn_in_time(page, piece):
    text = piece * (8000 // len(piece))
    took = page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("./render_markdown.js");
          const start = performance.now();
          for (const streaming of [true, false]) renderMarkdown(document.createElement("div"), text, { streaming });
          return performance.now() - start;
        }""",
        text,
    )
    assert took < 4000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_coloured_code_has_enough_contrast(open_page, scheme):
    page = open_page(color_scheme=scheme, reduced_motion="reduce")
    ask(page, "code")
    finish(page)
    assert page.locator(".body [class^=hljs-]").count() > 10
    assert page.evaluate(CONTRAST) == []
