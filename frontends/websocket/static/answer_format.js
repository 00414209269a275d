// @ts-check
/** The answer format in the settings: JSON, its schema, and tools. Reads texts of the settings, touches no element. */

const NAME = /^[\w.-]{1,128}$/;
const TOOL_CHOICES = ["auto", "required", "none"];

export const EXAMPLE_TOOLS = [
  {
    name: "get_weather",
    description: "Get the weather of a city",
    parameters: {
      type: "object",
      properties: {
        city: { type: "string", enum: ["Lisbon", "Paris", "Rome"] },
        unit: { type: "string", enum: ["celsius", "fahrenheit"] },
      },
      required: ["city", "unit"],
      additionalProperties: false,
    },
  },
];

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

/**
 * The options of `generate` for these settings. Throws an Error where a text in them is not valid. `hasResults`: tool
 * results were just added. No call is forced then, or the model would never answer.
 */
export function answerOptions(settings, hasResults) {
  const options = {};
  if (settings.json) {
    const schema = readSchema(settings.schema);
    options.responseFormat = schema
      ? { type: "json_schema", json_schema: { name: "answer", schema } }
      : { type: "json_object" };
  }
  const tools = readTools(settings.tools);
  if (tools.length) {
    const named = toolNames(tools).includes(settings.tool_choice);
    options.tools = tools;
    if (named && !hasResults) options.toolChoice = { type: "function", function: { name: settings.tool_choice } };
    else if (TOOL_CHOICES.includes(settings.tool_choice) && !hasResults) options.toolChoice = settings.tool_choice;
  }
  return options;
}

/** The page's messages in the form of the API. Calls without a result are left out. */
export function apiMessages(messages) {
  const answered = new Set(messages.filter((message) => message.role === "tool").map((message) => message.callId));
  const turns = [];
  for (const { role, content, toolCalls = [], callId } of messages) {
    const calls = toolCalls.filter((call) => answered.has(call.id));
    if (role === "tool") turns.push({ role, tool_call_id: callId, content });
    else if (calls.length) {
      const tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
      turns.push({ role, content: content || null, tool_calls });
    } else if (role === "user" || content) turns.push({ role, content });
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
