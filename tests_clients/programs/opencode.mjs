// opencode: one turn without a terminal, with the server as a provider over chat; its tools stay those that it has.
import { writeFileSync } from "node:fs";
import { API, KEY, MODEL, SCRATCH, assert, begin, check, command } from "./checks.mjs";

const model = { name: MODEL, limit: { context: 8192, output: 64 } };
writeFileSync(`${SCRATCH}/opencode.json`, JSON.stringify({ autoupdate: false, share: "disabled",
  provider: { ours: { npm: "@ai-sdk/openai-compatible", options: { baseURL: API, apiKey: KEY },
    models: { [MODEL]: model } } },
  agent: { short: { prompt: "You help with code.", mode: "primary", model: `ours/${MODEL}`,
    tools: { "*": false, read: true } } } }));

begin("opencode-ai");

await check("run", async () => {
  const told = command("opencode", ["run", "--agent", "short", "--model", `ours/${MODEL}`, "--format", "json",
    "Say something."]);
  assert(told.includes("step_finish") || told.includes('"text"'));
});
