// Text in, text out, from Node with zeromq and @msgpack/msgpack alone:
//   node producer.mjs ipc:///path/engine.sock "Once upon a time"
import { randomBytes } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { Dealer } from "zeromq";

const [HELLO, SUBMIT, CREDIT, PING, BYE] = [1, 2, 5, 7, 9];
const [REJECT, STEP, GOODBYE] = [67, 68, 73];
const [address, text] = process.argv.slice(2);

const engine = new Dealer({ linger: 1000 });
engine.connect(address);
const send = (kind, body) => engine.send([Buffer.from([0x49, 0x45, 1, kind]), encode(body)]);

await send(HELLO, { protocol: [1, 0], role: "producer" });
const params = { max_tokens: 60, temperature: 0.0 };
await send(SUBMIT, { id: randomBytes(16), stream: 1, text, reply: "text", params });
const alive = setInterval(() => send(PING, [0]).catch(() => {}), 2000); // keeps the lease while nothing arrives
for await (const [header, body] of engine) {
  const message = decode(body);
  if (header[3] === REJECT || header[3] === GOODBYE) {
    console.error("refused:", message);
    process.exitCode = 1;
    break;
  }
  if (header[3] !== STEP) continue;
  const [seq, , , , done, extras] = message;
  for (const [, piece] of extras?.text ?? []) process.stdout.write(piece);
  await send(CREDIT, [seq]);
  if (done.length > 0) { // [stream, reason, detail, ...]
    await send(BYE, {});
    console.log();
    process.exitCode = ["stop", "length"].includes(done[0][1]) ? 0 : 1;
    break;
  }
}
clearInterval(alive);
engine.close();
