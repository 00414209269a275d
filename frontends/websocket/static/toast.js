// @ts-check
/** A short message at the lower edge, with one action that is offered for a while. */

const SHOWN_MS = 12_000;

/** Shows one message at a time. */
export class Toast {
  constructor(element) {
    this._element = element;
    this._timer = 0;
    element.addEventListener("focusin", () => clearTimeout(this._timer)); // nobody is hurried
  }

  /** Show `text`, and a button with `label` that calls `action`. */
  show(text, label = "", action = () => {}) {
    clearTimeout(this._timer);
    const [message, button] = this._element.children;
    message.textContent = text;
    button.textContent = label;
    button.hidden = !label;
    button.onclick = () => {
      this.hide();
      action();
    };
    this._element.hidden = false;
    this._timer = setTimeout(() => this.hide(), SHOWN_MS);
  }

  /** Hide the message. */
  hide() {
    clearTimeout(this._timer);
    this._element.hidden = true;
  }
}
