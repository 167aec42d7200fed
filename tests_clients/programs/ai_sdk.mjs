// Vercel's AI SDK: text, stream, objects, tools, over its provider for servers that speak OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";
import { API, KEY, MODEL, assert, begin, check } from "./checks.mjs";

const provider = createOpenAICompatible({ name: "slipstream", baseURL: API, apiKey: KEY, includeUsage: true,
  supportsStructuredOutputs: true });
const model = provider(MODEL);
const schema = z.object({ colour: z.enum(["blue", "grey"]), clouds: z.boolean() });
const paint = tool({ description: "Paint something.", inputSchema: schema, execute: async () => "done" });
const prompt = "What is the sky like?";
const most = { maxOutputTokens: 300, seed: 1 }; // a call that is cut is none: with a seed all runs have the same

begin("ai");

await check("text", async () => {
  const { text, usage } = await generateText({ model, prompt, maxOutputTokens: 8 });
  assert(typeof text === "string" && usage.outputTokens > 0);
});

await check("stream", async () => {
  const { textStream, usage } = streamText({ model, prompt, maxOutputTokens: 8 });
  let text = "";
  for await (const piece of textStream) text += piece;
  assert((await usage).outputTokens > 0 && text.length > 0);
});

await check("generateObject", async () => {
  const { object } = await generateObject({ model, prompt, schema, ...most });
  schema.parse(object);
});

await check("output", async () => {
  const { output } = await generateText({ model, prompt, output: Output.object({ schema }), ...most });
  schema.parse(output);
});

await check("tools", async () => {
  const { toolCalls, toolResults } = await generateText({ model, prompt, tools: { paint }, toolChoice: "required",
    ...most });
  assert(toolCalls.length > 0);
  schema.parse(toolCalls[0].input);
  assert.equal(toolResults[0].output, "done");
});

await check("streamed tools", async () => {
  const stream = streamText({ model, prompt, tools: { paint }, toolChoice: { type: "tool", toolName: "paint" },
    ...most });
  const calls = await stream.toolCalls;
  schema.parse(calls[0].input);
});
