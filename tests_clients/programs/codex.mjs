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

await check("exec", async () => {
  const told = command("codex", ["exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only",
    ...settings.flatMap((setting) => ["-c", setting]), "Say something."]);
  assert(told.includes("turn.completed"));
});
