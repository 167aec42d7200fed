// openai-node: chat, streams, completions, tools, parsed objects, responses, models, errors.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MODEL, assert, begin, check } from "./checks.mjs";

const client = new OpenAI();
const messages = [{ role: "user", content: "What colour is the sky?" }];
const Sky = z.object({ colour: z.enum(["blue", "grey"]), clouds: z.boolean() });
const paint = { type: "function", function: { name: "paint", parameters: { type: "object",
  properties: { colour: { enum: ["red", "blue"] } }, required: ["colour"], additionalProperties: false } } };

begin("openai");

await check("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 8 });
  assert(answer.choices[0].finish_reason && answer.usage.completion_tokens > 0);
});

await check("stream", async () => {
  const stream = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 8, stream: true });
  let finish;
  for await (const chunk of stream) finish = chunk.choices[0]?.finish_reason ?? finish;
  assert(finish);
});

await check("completions", async () => {
  const answer = await client.completions.create({ model: MODEL, prompt: "One, two,", max_tokens: 4 });
  assert.equal(answer.choices.length, 1);
});

await check("tools", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages, tools: [paint],
    tool_choice: "required", parallel_tool_calls: false, max_tokens: 300 });
  assert(["red", "blue"].includes(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).colour));
});

await check("streamed tools", async () => {
  const runner = client.chat.completions.stream({ model: MODEL, messages, tools: [paint], max_tokens: 300,
    tool_choice: { type: "function", function: { name: "paint" } } });
  const final = await runner.finalChatCompletion();
  assert(["red", "blue"].includes(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments).colour));
});

await check("parse", async () => {
  const answer = await client.chat.completions.parse({ model: MODEL, messages, max_tokens: 300,
    response_format: zodResponseFormat(Sky, "sky") });
  Sky.parse(answer.choices[0].message.parsed);
});

await check("responses", async () => {
  const answer = await client.responses.create({ model: MODEL, input: "Say something.", max_output_tokens: 16 });
  assert(answer.usage.output_tokens > 0);
  let last;
  const stream = await client.responses.create({ model: MODEL, input: "Hello", max_output_tokens: 16, stream: true });
  for await (const event of stream) last = event.type;
  assert(["response.completed", "response.incomplete"].includes(last));
});

await check("models", async () => {
  assert.equal((await client.models.list()).data[0].id, MODEL);
});

await check("errors", async () => {
  const asked = client.chat.completions.create({ model: MODEL, messages, temperature: -1 });
  await assert.rejects(asked, OpenAI.BadRequestError);
  await assert.rejects(new OpenAI({ apiKey: "wrong" }).models.list(), OpenAI.AuthenticationError);
});
