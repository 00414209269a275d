// @ts-check
/** Tools and schemas as they are typed, and messages in the form of the API. Touches no element. */

import { withFiles } from "./composer/attached_files.js";

const NAME = /^[\w.-]{1,128}$/;

/**
 * Tools to begin with. The small embedded model fills in arguments by chance and goes on calling, so
 * the first example has none, is forced, and is called once.
 */
export const EXAMPLE_TOOLS = [
  {
    title: "Read a message",
    hint: "Ask “Read my newest message.”, and type one as the result: “Extract the name and city as JSON: My name is Anna and I live in Lisbon.”",
    settings: { tool_choice: "read_message", one_call: true },
    tools: [{ name: "read_message", description: "Read the newest message", parameters: { type: "object", properties: {}, additionalProperties: false } }],
  },
  {
    title: "Weather of a city",
    hint: "Ask “How is the weather in Rome?”. The small embedded model cannot choose the city; larger models can.",
    settings: { tool_choice: "auto", one_call: true },
    tools: [
      {
        name: "get_weather",
        description: "Get the weather of a city",
        parameters: {
          type: "object",
          properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
          required: ["city", "unit"],
          additionalProperties: false,
        },
      },
    ],
  },
];

/** The text of these tools and one more, to be filled in. Throws an Error where the text is not valid. */
export function withNewTool(text) {
  const tools = text.trim() ? [parse(text)].flat() : [];
  const taken = new Set(toolNames(readTools(text)));
  let name = "my_function";
  for (let number = 2; taken.has(name); number++) name = `my_function_${number}`;
  const parameters = { type: "object", properties: { text: { type: "string", description: "What it is given" } }, required: ["text"] };
  return JSON.stringify([...tools, { name, description: "What it does", parameters }], null, 2);
}

/** Parse a JSON list of functions, bare or in OpenAI's wrapping. Throws an Error that says what is wrong. */
export function readTools(text) {
  if (!text.trim()) return [];
  const list = [parse(text)].flat();
  const tools = list.map((item) => {
    const declared = item?.function ?? item;
    if (!NAME.test(declared?.name ?? "")) throw new Error("Each tool needs a name of up to 128 letters, digits, “_”, “-” and “.”.");
    return { type: "function", function: declared };
  });
  const names = toolNames(tools);
  if (new Set(names).size < names.length) throw new Error("Two tools have the same name.");
  return tools;
}

/** The names of parsed tools. */
export function toolNames(tools) {
  return tools.map((tool) => tool.function.name);
}

/** Parse a JSON schema; null for an empty text. Throws an Error that says what is wrong. */
export function readSchema(text) {
  if (!text.trim()) return null;
  const schema = parse(text);
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) throw new Error("A schema must be a JSON object.");
  return schema;
}

/** The page's messages in the form of the API. Calls without a result are left out. */
export function apiMessages(messages) {
  const answered = new Set(messages.filter((message) => message.role === "tool").map((message) => message.callId));
  const turns = [];
  for (const { role, content, files = [], toolCalls = [], callId } of messages) {
    const calls = toolCalls.filter((call) => answered.has(call.id));
    if (role === "tool") turns.push({ role, tool_call_id: callId, content });
    else if (calls.length) {
      const tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
      turns.push({ role, content: content || null, tool_calls });
    } else if (role === "user" || content) turns.push({ role, content: withFiles(content, files) });
  }
  return turns;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not valid JSON: ${error.message}`);
  }
}
