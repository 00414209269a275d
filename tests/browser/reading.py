"""What every test of the page does: ask, wait for the answers, hold one in the middle, look at its colours."""

from __future__ import annotations

import json

LONG = "One sentence after the other keeps the page busy. " * 25


def ask(page, text):
    page.fill("#composer-input", text)
    page.keyboard.press("Enter")


def finish(page):
    """Wait until the last answer is complete."""
    page.wait_for_selector(".message.assistant:last-child:not(.streaming)")


def answers(page):
    """Return all answers on the page once the last one is complete."""
    finish(page)
    return page.locator(".message.assistant .body").all_inner_texts()


def stored(page):
    """Wait until the page has stored what it was told."""
    page.wait_for_selector("body:not([data-saving])")


def reload(page):
    """Load the page again, once it has stored what it was told."""
    stored(page)
    page.reload()


def stream_some(page, engine, text="long"):
    """Ask for a long answer and stop it in the middle."""
    engine.hold()
    engine.release(200)
    ask(page, text)
    page.wait_for_selector(".message.streaming .body:has-text('keeps the page')")


def exported(number):
    """Return an export of this many conversations."""
    conversations = []
    for at in range(number):
        question = {"id": f"a{at}", "parent": None, "created": 1, "role": "user", "content": f"question {at}"}
        answer = {"id": f"b{at}", "parent": f"a{at}", "created": 2, "role": "assistant", "content": f"secret word {at}"}
        fields = {"id": f"c{at}", "title": f"number {at}", "created": at, "updated": at, "leaf": f"b{at}"}
        conversations.append({**fields, "messages": [question, answer]})
    return json.dumps({"format": "inferengine.conversations", "version": 1, "conversations": conversations})


CONTRAST = """() => {
  const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility({ opacityProperty: true })) continue;
    if (element.closest(".hidden-live, .skip")) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${ratio.toFixed(2)} ${walker.currentNode.data.trim().slice(0, 30)}`);
  }
  return bad;
}"""
