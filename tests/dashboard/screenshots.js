// Takes screenshots of the dashboards of running demos with 1, 8 and 200 workers.
//
// Nothing on the pictures is changed or repeated: each shows a demo of that size, of simulated
// engines with simulated shims and GPUs. A demo of 200 needs minutes to start on few cores.

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
// Workers, height, colours, and the name of a picture by the tab that it shows.
const DEMOS = [
  [1, 620, "light", { Workers: "dashboard-1" }],
  [8, 760, "light", { Workers: "dashboard", Sessions: "dashboard-sessions" }],
  [200, 1000, "dark", { Workers: "dashboard-200" }],
];

/** Takes the pictures of a demo with `workers` workers, and prints their paths. */
async function take(browser, [workers, height, colorScheme, names]) {
  const demo = spawn(
    join(resolve(process.env.BERTH_PROGRAMS), "berth-demo"),
    ["--seconds", "3600", "--workers", String(workers)],
    { stdio: ["ignore", "ignore", "pipe"] },
  );
  try {
    let url;
    for await (const line of createInterface({ input: demo.stderr })) {
      if (line.startsWith("dashboard: ")) {
        url = line.slice("dashboard: ".length);
        break;
      }
    }
    if (!url) throw new Error(`the demo of ${workers} workers ended before it began`);
    demo.stderr.resume();
    const page = await browser.newPage({ viewport: { width: 1440, height }, colorScheme });
    await page.goto(url);
    await new Promise((resume) => setTimeout(resume, TRAFFIC_SECONDS * 1000));
    for (const [tab, name] of Object.entries(names)) {
      await page.getByRole("tab", { name: tab }).click();
      // The rows of a tab come with the next list of the stream.
      await page.getByRole("tabpanel").getByRole("row").nth(1).waitFor();
      const path = join(FOLDER, `${name}.png`);
      await page.screenshot({ path });
      console.log(path);
    }
    await page.close();
  } finally {
    if (demo.exitCode === null) {
      demo.kill("SIGKILL");
      await once(demo, "exit");
    }
  }
}

const browser = await chromium.launch({
  executablePath: process.env.BERTH_CHROMIUM, args: ["--no-sandbox"],
});
try {
  // One after the other: the demos share one computer's cores.
  for (const demo of DEMOS) await take(browser, demo);
} finally {
  await browser.close();
}
