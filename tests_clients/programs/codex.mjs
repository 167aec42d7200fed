// Codex CLI: one turn without a terminal, with the server as its provider over responses. It sets no limit to an answer,
// and a small model would fill its context: the scripted target says what it is told.
import { writeFileSync } from "node:fs";
import { API, MODEL, SCRATCH, assert, begin, check, command } from "./checks.mjs";

const short = `${SCRATCH}/short.md`; // its own instructions and tools are longer than the context of a small model
writeFileSync(short, "You help with code.");
const settings = ["model_provider=ours", "model_providers.ours.name=ours", `model_providers.ours.base_url=${API}`,
  "model_providers.ours.env_key=OPENAI_API_KEY", "model_providers.ours.wire_api=responses", `model=${MODEL}`,
  `model_instructions_file=${short}`];

begin("@openai/codex");

const ask = (...words) => command("codex", ["exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only",
  ...settings.flatMap((setting) => ["-c", setting]), ...words]);

await check("exec", async () => {
  assert(ask("Say something.").includes("turn.completed"));
});

await check("a command that it runs for the model", async () => {
  const told = ask("Run a command.").trim().split("\n").map((line) => JSON.parse(line).item ?? {});
  assert(told.some((item) => item.type === "command_execution" && item.exit_code === 0));
  assert(told.some((item) => item.type === "agent_message" && item.text.includes("told by a command")));
});
