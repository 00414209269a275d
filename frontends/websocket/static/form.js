// @ts-check
/** What the settings say about the form of an answer: JSON, a schema for it, and tools. Knows nothing of the page. */

const NAME = /^[\w.-]{1,128}$/;
const FORCED = ["auto", "required", "none"];

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

/** The tools in a text: a list of functions, bare or in OpenAI's wrapping. Throws an Error that says what is wrong. */
export function readTools(text) {
  if (!text.trim()) return [];
  const list = [parse(text)].flat();
  const tools = list.map((item) => {
    const declared = item?.function ?? item;
    if (!NAME.test(declared?.name ?? "")) throw new Error("Each tool needs a name of up to 128 letters, digits, “_”, “-” and “.”.");
    return { type: "function", function: declared };
  });
  const names = namesOf(tools);
  if (new Set(names).size < names.length) throw new Error("Two tools have the same name.");
  return tools;
}

export function namesOf(tools) {
  return tools.map((tool) => tool.function.name);
}

/** The schema in a text, null where there is none. Throws an Error that says what is wrong. */
export function readSchema(text) {
  if (!text.trim()) return null;
  const schema = parse(text);
  if (schema === null || typeof schema !== "object" || Array.isArray(schema)) throw new Error("A schema must be a JSON object.");
  return schema;
}

/**
 * The options of `generate` that these settings ask for. Throws an Error where a text of theirs is not valid.
 * `resultsCome`: the model is to read results now; made to call again, it would never answer.
 */
export function formOptions(settings, resultsCome) {
  const options = {};
  if (settings.json) {
    const schema = readSchema(settings.schema);
    options.responseFormat = schema
      ? { type: "json_schema", json_schema: { name: "answer", schema } }
      : { type: "json_object" };
  }
  const tools = readTools(settings.tools);
  if (tools.length) {
    const named = namesOf(tools).includes(settings.tool_choice);
    options.tools = tools;
    if (named && !resultsCome) options.toolChoice = { type: "function", function: { name: settings.tool_choice } };
    else if (FORCED.includes(settings.tool_choice) && !resultsCome) options.toolChoice = settings.tool_choice;
  }
  return options;
}

/** Messages of the page as the API reads them. Calls that were cut, or never got a result, are left out. */
export function turnsOf(messages) {
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
