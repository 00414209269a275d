// What the Vercel AI SDK gets of a server. usage: node vercel_ai.mjs BASE_URL MODEL → one JSON object
// Run it from a folder whose node_modules has ai, zod, @ai-sdk/openai, @ai-sdk/openai-compatible and @ai-sdk/anthropic.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const from = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = (name) => import(pathToFileURL(from.resolve(name)).href);
const [{ generateText, streamText, generateObject, tool }, { createOpenAI }, { createOpenAICompatible }, { createAnthropic }, { z }] =
  await Promise.all(["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"].map(load));

const [baseURL, model] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  responses: openai(model), // the default: /v1/responses, with items by reference
  chat: openai.chat(model),
  completion: openai.completion(model),
  compatible: createOpenAICompatible({ name: "local", baseURL })(model),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })(model),
};
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string().max(12) }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const common = { maxOutputTokens: 60, maxRetries: 0 };
const results = {};
for (const [name, one] of Object.entries(models)) {
  const told = (results[name] = {});
  const whole = await generateText({ ...common, model: one, prompt: "What is a KV cache?" });
  told.text = whole.text.length > 0;
  told.usage = whole.usage.outputTokens > 0;
  const stream = streamText({ ...common, model: one, prompt: "What is a KV cache?", onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const part of stream.textStream) text += part;
  told.streamed = text.length > 0;
  told.streamedUsage = (await stream.usage).outputTokens > 0;
  if (name === "completion") continue;
  const called = await generateText({
    ...common, maxOutputTokens: 400, model: one, tools: { weather }, toolChoice: "required", prompt: "How is the weather in Paris?",
    providerOptions: { openai: { parallelToolCalls: false }, local: { parallel_tool_calls: false }, anthropic: { disableParallelToolUse: true } },
  });
  told.calls = called.toolCalls.map((call) => call.toolName);
  const history = [{ role: "user", content: "How is the weather in Paris?" }, ...called.response.messages];
  told.afterTools = (await generateText({ ...common, model: one, tools: { weather }, messages: history })).finishReason;
  if (name !== "compatible") {
    const schema = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(150) });
    told.object = Object.keys((await generateObject({ ...common, maxOutputTokens: 200, model: one, schema, prompt: "Who is Ada?" })).object);
  }
}
for (const [name, told] of Object.entries(results)) {
  if (!told.text || !told.usage || !told.streamed || !told.streamedUsage || told.calls?.length === 0) {
    console.log(JSON.stringify(results));
    throw new Error(`${name}: ${JSON.stringify(told)}`);
  }
}
console.log(JSON.stringify(results));
