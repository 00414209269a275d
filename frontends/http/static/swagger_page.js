import { openDocument } from "./open_document.js";

const place = document.getElementById("api");
const { spec, key } = await openDocument(place);
place.replaceChildren();
const page = window.SwaggerUIBundle({
  domNode: place,
  spec,
  deepLinking: true,
  displayRequestDuration: true,
  docExpansion: "list",
  filter: true,
  tryItOutEnabled: true,
  validatorUrl: null, // it would send the document to a server of Swagger's
  onComplete: () => key && page.preauthorizeApiKey("bearer", key),
});
