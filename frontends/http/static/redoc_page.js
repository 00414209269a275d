import { openDocument } from "./open_document.js";

const place = document.getElementById("api");
const { spec } = await openDocument(place);
place.replaceChildren();
window.Redoc.init(spec, { hideDownloadButton: true, nativeScrollbars: true }, place);
