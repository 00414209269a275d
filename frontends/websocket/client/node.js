// @ts-check
/** The client for Node.js: client.js with the package `ws` where Node has no WebSocket of its own (before version 22). */
import WebSocket from "ws";

import { InferEngineSocket as BrowserSocket } from "./client.js";

export * from "./client.js";

export class InferEngineSocket extends BrowserSocket {
  constructor(url, options = {}) {
    super(url, { WebSocket: globalThis.WebSocket ?? WebSocket, ...options });
  }
}
