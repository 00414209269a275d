// @ts-check
/** The system prompt of the open conversation: a sign that there is one, and the dialog to change it. */

/** Edits one text. `onSave(text)` is called with the changed one. */
export class SystemPrompt {
  constructor(document, onSave) {
    this._dialog = document.getElementById("system");
    this._input = document.getElementById("system-text");
    this._button = document.getElementById("open-system");
    this.text = "";
    this._button.addEventListener("click", () => this.open());
    this._dialog.addEventListener("click", (event) => event.target === this._dialog && this._dialog.close());
    this._dialog.addEventListener("close", () => {
      if (this._dialog.returnValue === "save" && this._input.value.trim() !== this.text) onSave(this._input.value.trim());
    });
  }

  /** Show whether the conversation has a system prompt. */
  show(text) {
    this.text = text.trim();
    this._button.classList.toggle("active", this.text !== "");
  }

  /** Open the dialog. */
  open() {
    this._input.value = this.text;
    this._dialog.returnValue = "";
    this._dialog.showModal();
    this._input.focus();
  }
}
