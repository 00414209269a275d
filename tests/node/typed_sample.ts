// What a TypeScript program sees of the npm package: scripts/check-packages compiles it with --strict.
import { Generation, InferEngineError, InferEngineSocket, newRequestId, type Message } from "inferengine-client";

export async function ask(url: string, question: string): Promise<string> {
  const engine = new InferEngineSocket(url, { window: 32, apiKey: "ie_..." });
  const messages: Message[] = [{ role: "user", content: question }];
  const answer: Generation = engine.generate({ messages, params: { max_tokens: 60, temperature: 0.5 }, requestId: newRequestId() });
  try {
    let text = "";
    for await (const delta of answer) text += delta.text;
    const { choices } = await answer.result;
    const reason: string | null = choices[0].finishReason;
    return `${text} (${reason})`;
  } catch (error) {
    if (error instanceof InferEngineError) return `${error.code}: ${error.remedy}`;
    throw error;
  } finally {
    engine.close();
  }
}

// @ts-expect-error: a parameter that does not exist
new InferEngineSocket("ws://x").generate({ prompt: "a", params: { max_token: 1 } });
// @ts-expect-error: max_tokens is a number
new InferEngineSocket("ws://x").generate({ prompt: "a", params: { max_tokens: "1" } });
