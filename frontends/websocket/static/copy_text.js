// @ts-check
/** Copying to the clipboard, also where `navigator.clipboard` is missing: on http:// pages of other machines. */

/** Copy `text`. Resolves to true on success. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // no permission, or not a secure context
  }
}

/** Copy through a selected text field and the older `execCommand`. */
function copyBySelection(text) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  field.readOnly = true; // no keyboard opens on a phone
  field.className = "copy-field";
  field.setAttribute("aria-hidden", "true");
  document.body.append(field);
  field.select();
  let copied = false;
  try {
    copied = document.execCommand("copy");
  } catch {
    // the browser forbids it
  }
  field.remove();
  if (focused instanceof HTMLElement) focused.focus({ preventScroll: true });
  return copied;
}
