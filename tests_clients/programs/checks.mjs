// How a program for node tells what works: `begin` once, then `check` for each thing that is tried.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

export { assert };
export const { SLIPSTREAM_URL: URL_, SLIPSTREAM_MODEL: MODEL, SLIPSTREAM_SCRATCH: SCRATCH, OPENAI_BASE_URL: API,
  OPENAI_API_KEY: KEY } = process.env;

const tell = (told) => console.log("\nconformance: " + JSON.stringify(told));

// Whose version is told.
export function begin(name) {
  const folder = createRequire(import.meta.url).resolve.paths(name)
    .map((place) => `${place}/${name}/package.json`);
  for (const file of folder) {
    try {
      tell({ version: JSON.parse(readFileSync(file)).version });
      return;
    } catch (error) {
      if (error.code !== "ENOENT") throw error;
    }
  }
}

// `attempt` raises, or asserts, where `name` does not work.
export async function check(name, attempt) {
  try {
    await attempt();
    tell({ check: name, ok: true });
  } catch (error) {
    console.error(error);
    tell({ check: name, ok: false, told: String(error) });
  }
}

// What a command printed; it raises if that failed, with the last message in it.
export function command(name, words) {
  const program = new URL(`./node_modules/.bin/${name}`, import.meta.url).pathname;
  const done = spawnSync(program, words, { cwd: SCRATCH, stdio: ["ignore", "pipe", "inherit"], timeout: 400_000,
    encoding: "utf8" });
  console.log(done.stdout);
  const told = [...(done.stdout ?? "").matchAll(/"message":"((?:[^"\\]|\\.)*)"/g)].at(-1)?.[1];
  if (done.status !== 0) throw new Error(`ended with ${done.status ?? done.error}: ${told}`);
  return done.stdout;
}
