// Starts the demo's engines and agents, and a router of its own in front of them.

import { createHash } from "node:crypto";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";

const PROGRAMS = resolve(process.env.BERTH_PROGRAMS);
export const PATIENCE_MS = 60_000;
export const ADMIN_KEY = "admin-key-of-the-test";

/** Asks until `look` returns something. */
export async function until(what, look) {
  const deadline = Date.now() + PATIENCE_MS;
  while (Date.now() < deadline) {
    const found = await look().catch(() => null);
    if (found) return found;
    await new Promise((resume) => setTimeout(resume, 50));
  }
  throw new Error(`never: ${what}`);
}

// A loopback address of this process alone: a port of 127.0.0.1 may be taken while the router
// restarts, by a connection too.
export const HOST = `127.254.${(process.pid >> 8) % 256}.${process.pid % 256}`;

async function freePort() {
  const server = createServer().listen(0, HOST);
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  return port;
}

export class Fleet {
  static async start() {
    const fleet = new Fleet();
    fleet.folder = mkdtempSync(join(tmpdir(), "berth-dashboard-"));
    fleet.demo = spawn(join(PROGRAMS, "berth-demo"), ["--seconds", "3600"], {
      stdio: ["ignore", "ignore", "pipe"],
    });
    for await (const line of createInterface({ input: fleet.demo.stderr })) {
      if (line.startsWith("agents: ")) {
        fleet.agents = line.slice("agents: ".length).split(" ");
        break;
      }
    }
    fleet.demo.stderr.resume();
    [fleet.data, fleet.admin] = [await freePort(), await freePort()];
    await fleet.startRouter();
    return fleet;
  }

  async startRouter() {
    const sha256 = createHash("sha256").update(ADMIN_KEY).digest("hex");
    const keys = join(this.folder, "keys.toml");
    writeFileSync(keys, `[[key]]\nname = "ops"\nsha256 = "${sha256}"\nadmin = true\n`);
    const settings = join(this.folder, "router.toml");
    writeFileSync(settings, [
      `workers = ${JSON.stringify(this.agents)}`,
      "[listen]", `data_addr = "${HOST}:${this.data}"`, `admin_addr = "${HOST}:${this.admin}"`,
      "[auth]", `keys_file = ${JSON.stringify(keys)}`,
      // A machine that stops for a moment moves no session, and makes no report old.
      "[placement]", "rebind_gain_ms_min = 3600000",
      "[timeouts]", "load_report_age_ms_max = 60000", "",
    ].join("\n"));
    this.router = spawn(join(PROGRAMS, "berth-router"), ["--config", settings], {
      stdio: ["ignore", "ignore", "inherit"],
    });
    await until("the router is ready", async () => (await fetch(this.url("/readyz"))).ok);
  }

  async stopRouter() {
    this.router.kill("SIGKILL");
    const { exitCode, signalCode } = this.router;
    if (exitCode === null && signalCode === null) await once(this.router, "exit");
  }

  async stop() {
    await this.stopRouter();
    this.demo.kill("SIGKILL");
    rmSync(this.folder, { recursive: true });
  }

  url = (path) => `http://${HOST}:${this.admin}${path}`;

  /** Asks the data port with the admin key. */
  async ask(path, options = {}) {
    const headers = { authorization: `Bearer ${ADMIN_KEY}`, ...options.headers };
    return fetch(`http://${HOST}:${this.data}${path}`, { ...options, headers });
  }

  /** Starts a turn of a pinned session, which takes twelve seconds. */
  async startTurn(session) {
    const answer = await this.ask("/generate", {
      method: "POST",
      headers: { "content-type": "application/json", "x-berth-session-id": session },
      body: JSON.stringify({
        text: "word ".repeat(40), stream: true,
        sampling_params: { max_new_tokens: 1200, ignore_eos: true },
      }),
    });
    if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
    return answer;
  }

  /** Runs a turn of a session with some words. `parent` is the session that started it. */
  async chat(session, words, parent) {
    const messages = [{ role: "user", content: "word ".repeat(words) }];
    const body = { model: "tiny", messages, max_tokens: 4 };
    const answer = await this.ask("/v1/chat/completions", {
      method: "POST",
      headers: {
        "content-type": "application/json", "x-berth-session-id": session,
        ...(parent ? { "x-parent-session-id": parent } : {}),
      },
      body: JSON.stringify(body),
    });
    if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
    await answer.text();
    return answer;
  }
}
