// Takes screenshots of the demo's dashboard with 1, 8 and 200 workers.
//
// The figures are those of the demo's four workers while its conversations run. For other numbers
// of workers the list of workers is cut, or its workers are repeated under further names.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { createInterface } from "node:readline";

const from = createRequire(join(process.env.BERTH_NODE_MODULES, "any.js"));
const { chromium } = from("playwright-core");
const FOLDER = resolve(process.argv[2]);
// The charts have ten minutes. Fewer show less of them.
const TRAFFIC_SECONDS = Number(process.env.BERTH_TRAFFIC_SECONDS ?? 60);
const PICTURES = [
  ["dashboard-1", 1, 620, "light"], ["dashboard", 8, 760, "light"],
  ["dashboard-200", 200, 1000, "dark"],
];

/** Runs in the page, before its scripts: makes `count` workers of those that the router tells. */
function repeatWorkers(count) {
  const change = (text) =>
    text.replace(/^data: (.*)$/m, (_, data) => {
      const event = JSON.parse(data);
      const { workers } = event.fleet;
      event.fleet.workers = Array.from({ length: count }, (_, index) => ({
        ...workers[index % workers.length], worker: `w${index}/0`,
      }));
      return `data: ${JSON.stringify(event)}`;
    });
  const ask = globalThis.fetch;
  globalThis.fetch = async (...request) => {
    const answer = await ask(...request);
    if (!String(request[0]).endsWith("/dashboard/events")) return answer;
    let waiting = "";
    const whole = new TransformStream({
      transform(part, out) {
        const events = (waiting + part).split("\n\n");
        waiting = events.pop();
        events.forEach((event) => out.enqueue(`${change(event)}\n\n`));
      },
    });
    const body = answer.body.pipeThrough(new TextDecoderStream()).pipeThrough(whole);
    return new Response(body.pipeThrough(new TextEncoderStream()), answer);
  };
}

const demo = spawn(join(resolve(process.env.BERTH_PROGRAMS), "berth-demo"), ["--seconds", "3600"], {
  stdio: ["ignore", "ignore", "pipe"],
});
let browser;
try {
  let url;
  for await (const line of createInterface({ input: demo.stderr })) {
    if (line.startsWith("dashboard: ")) {
      url = line.slice("dashboard: ".length);
      break;
    }
  }
  demo.stderr.resume();
  browser = await chromium.launch({
    executablePath: process.env.BERTH_CHROMIUM, args: ["--no-sandbox"],
  });
  const pages = [];
  for (const [name, count, height, colorScheme] of PICTURES) {
    const page = await browser.newPage({ viewport: { width: 1440, height }, colorScheme });
    await page.addInitScript(repeatWorkers, count);
    await page.goto(url);
    pages.push([name, page]);
  }
  await new Promise((resume) => setTimeout(resume, TRAFFIC_SECONDS * 1000));
  for (const [name, page] of pages) {
    const path = join(FOLDER, `${name}.png`);
    await page.screenshot({ path });
    console.log(path);
  }
} finally {
  await browser?.close();
  demo.kill("SIGKILL");
  await once(demo, "exit");
}
