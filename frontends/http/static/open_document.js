// Reads /openapi.json. Where the server asks for an API key, so does the page, and keeps it in memory only.

export async function openDocument(place) {
  let key = "";
  for (;;) {
    const response = await fetch("/openapi.json", key ? { headers: { authorization: `Bearer ${key}` } } : {});
    if (response.ok) return { spec: await response.json(), key };
    if (response.status !== 401) {
      place.textContent = `The server answered ${response.status}: ${(await response.text()).slice(0, 500)}`;
      throw new Error(`openapi.json: ${response.status}`);
    }
    key = await ask(place, key !== "");
  }
}

function ask(place, refused) {
  const label = document.createElement("label");
  label.textContent = refused ? "This key is not known. API key: " : "This server asks for an API key: ";
  const input = Object.assign(document.createElement("input"), { type: "password", autocomplete: "off", required: true });
  const button = Object.assign(document.createElement("button"), { textContent: "Show" });
  const form = Object.assign(document.createElement("form"), { className: "key" });
  label.append(input);
  form.append(label, button);
  place.replaceChildren(form);
  input.focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      resolve(input.value.trim());
    });
  });
}
