// What Ollama's npm client gets of a server. usage: NODE_PATH=... node ollama_client.cjs BASE_URL → one JSON object.
const { Ollama } = require("ollama");

const CHAT = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "What is a KV cache?" },
];
const OPTIONS = { num_predict: 24, temperature: 0, seed: 1 };

async function main(host) {
  const client = new Ollama({ host });
  const [listed] = (await client.list()).models;
  const model = listed.name;
  const whole = await client.chat({ model, messages: CHAT, options: OPTIONS });
  let streamed = "";
  let last = null;
  for await (const part of await client.chat({ model, messages: CHAT, options: OPTIONS, stream: true })) {
    streamed += part.message.content;
    last = part;
  }
  const generated = await client.generate({ model, prompt: "Once upon a time", raw: true, options: OPTIONS });
  const shown = await client.show({ model });
  const embedded = await client.embed({ model, input: ["one", "two"] });
  const error = await client.chat({ model: "llama3", messages: CHAT }).catch((refused) => refused);
  const pulled = [(await client.pull({ model })).status];
  for await (const line of await client.pull({ model, stream: true })) pulled.push(line.status);
  const refusals = [];
  for (const change of [
    () => client.pull({ model: "llama3" }),
    () => client.pull({ model: "llama3", stream: true }),
    () => client.create({ model: "mine", from: model }),
    () => client.copy({ source: model, destination: "mine" }),
    () => client.delete({ model }),
    () => client.push({ model }),
  ])
    await change().catch((refused) => refusals.push([refused.status_code, refused.message]));
  return {
    model,
    pulled,
    refusals,
    text: whole.message.content,
    streamed,
    done_reason: last.done_reason,
    usage: [last.prompt_eval_count, last.eval_count],
    generated: generated.response,
    capabilities: shown.capabilities,
    running: (await client.ps()).models.map((one) => one.name),
    embeddings: embedded.embeddings.map((vector) => vector.length),
    error: [error.status_code, error.message],
  };
}

main(process.argv[2]).then((found) => console.log(JSON.stringify(found)));
