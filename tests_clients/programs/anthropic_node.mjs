// Anthropic's SDK for node: messages, streams, forced tools, counts.
import Anthropic from "@anthropic-ai/sdk";
import { MODEL, assert, begin, check } from "./checks.mjs";

const client = new Anthropic();
const messages = [{ role: "user", content: "What colour is the sky?" }];
const asked = { model: MODEL, max_tokens: 300, messages };
const paint = { name: "paint", input_schema: { type: "object", properties: { colour: { enum: ["red", "blue"] } },
  required: ["colour"] } };

begin("@anthropic-ai/sdk");

await check("messages", async () => {
  const answer = await client.messages.create({ ...asked, max_tokens: 8 });
  assert(answer.content[0].type === "text" && answer.usage.output_tokens > 0);
});

await check("stream", async () => {
  const final = await client.messages.stream({ ...asked, max_tokens: 8 }).finalMessage();
  assert.equal(final.content[0].type, "text");
});

await check("tools", async () => {
  const answer = await client.messages.create({ ...asked, tools: [paint], tool_choice: { type: "tool", name: "paint" } });
  assert(["red", "blue"].includes(answer.content.at(-1).input.colour));
});

await check("streamed tools", async () => {
  const stream = client.messages.stream({ ...asked, tools: [paint], tool_choice: { type: "tool", name: "paint" } });
  assert(["red", "blue"].includes((await stream.finalMessage()).content.at(-1).input.colour));
});

await check("count_tokens", async () => {
  assert((await client.messages.countTokens({ model: MODEL, messages })).input_tokens > 0);
});
