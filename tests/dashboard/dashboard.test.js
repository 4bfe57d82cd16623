// What an operator notices of the dashboard, in a real browser.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { request } from "node:http";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { ADMIN_KEY, Fleet, PATIENCE_MS, until } from "./fleet.js";

const from = createRequire(join(process.env.BERTH_NODE_MODULES, "any.js"));
const { chromium } = from("playwright-core");
const AXE = readFileSync(from.resolve("axe-core/axe.min.js"), "utf8");
const SIZES = [["desktop", 1440, 900], ["tablet", 820, 1180], ["phone", 390, 844]];

let fleet, browser;

before(async () => {
  fleet = await Fleet.start();
  browser = await chromium.launch({
    executablePath: process.env.BERTH_CHROMIUM, args: ["--no-sandbox"],
  });
});

after(async () => {
  await browser?.close();
  await fleet?.stop();
});

/** Opens the page and gives it the admin key. Collects what the page complains about. */
async function open(options = {}) {
  const context = await browser.newContext(options);
  context.setDefaultTimeout(PATIENCE_MS);
  const page = await context.newPage();
  page.complaints = [];
  page.on("pageerror", (error) => page.complaints.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error") page.complaints.push(message.text());
  });
  await page.goto(fleet.url("/dashboard"));
  await page.getByText("this route needs a key").waitFor();
  page.complaints.length = 0;
  await page.getByLabel("Admin key").fill(ADMIN_KEY);
  await page.getByRole("button", { name: "Use key" }).click();
  await page.locator("#workers tbody tr").first().waitFor();
  return page;
}

/** Sends a request to the admin port with these headers. `fetch` sets its own Host. */
function statusOf(path, headers) {
  const options = { host: "127.0.0.1", port: fleet.admin, path, headers };
  return new Promise((resolve, reject) => {
    const sent = request(options, (answer) => {
      answer.resume();
      resolve(answer.statusCode);
    });
    sent.on("error", reject).end();
  });
}

test("the page shows the workers with the figures of /v1/workers", async () => {
  const page = await open();
  const shown = async () =>
    page.locator("#workers tbody tr").evaluateAll((rows) =>
      rows.map((row) => [row.cells[0].textContent, row.cells[6].textContent]));
  // Figures change all the time, so one of the looks must agree with the list.
  await until("the page agrees with the list", async () => {
    const { workers } = await (await fleet.ask("/v1/workers")).json();
    const rows = await shown();
    const told = workers.map((worker) => [
      worker.worker, `${worker.load.rows_held.value} of ${worker.load.rows_total.value}`,
    ]);
    return JSON.stringify(rows) === JSON.stringify(told.sort());
  });
  assert.match(await page.locator("#connection").textContent(), /^live/);
  assert.deepEqual(page.complaints, []);
  await page.context().close();
});

test("a session is found, its life is shown, and it is closed", async () => {
  const name = "session-of-the-test";
  for (const words of [40, 80, 120]) await fleet.chat(name, words);
  const page = await open();
  await page.getByRole("tab", { name: "Sessions" }).click();
  await page.getByLabel("Filter").last().fill(name);
  await page.getByRole("button", { name, exact: true }).click();
  await page.getByText("3 turns remembered").waitFor();
  assert.equal(await page.locator(".timeline li").count(), 3);
  await page.getByRole("button", { name: "Back" }).click();
  const close = page.getByRole("button", { name: `Close session ${name}` });
  await close.click();
  assert.equal((await fleet.ask(`/v1/sessions/${name}`)).status, 200, "one click closes nothing");
  await until("the session is closed", async () => {
    // A list that comes between two clicks may take the first one back; then the page asks again.
    await close.click({ timeout: 1000 }).catch(() => {});
    return (await fleet.ask(`/v1/sessions/${name}`)).status === 404;
  });
  await page.getByText("0 of 0 sessions").waitFor();
  assert.deepEqual(page.complaints, []);
  await page.context().close();
});

test("a placement is explained with the workers that were compared", async () => {
  const answer = await fleet.chat("session-to-explain", 300);
  const turn = answer.headers.get("x-berth-turn");
  const page = await open();
  await page.getByRole("tab", { name: "Turns" }).click();
  await page.getByRole("button", { name: `Explain the placement of turn ${turn}` }).click();
  const chosen = page.locator("dialog tr.chosen");
  await chosen.waitFor();
  const worker = answer.headers.get("x-berth-worker");
  assert.equal(await chosen.locator("th").textContent(), `${worker} (chosen)`);
  assert.equal(await page.locator("dialog tbody tr").count(), 4);
  await page.context().close();
});

test("the page goes on after the router restarts, and says so", async () => {
  const page = await open();
  await fleet.stopRouter();
  await page.getByText("no connection").waitFor();
  await fleet.startRouter();
  await page.getByText("the router restarted").waitFor();
  await page.context().close();
});

test("the key is in no address and no storage, and is gone with the page", async () => {
  const page = await open();
  const kept = await page.evaluate(() => [
    location.href, document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage),
    document.documentElement.outerHTML,
  ]);
  assert.ok(!kept.join().includes(ADMIN_KEY));
  assert.equal(kept[1], "");
  assert.deepEqual(await page.context().cookies(), []);
  await page.reload();
  await page.getByText("this route needs a key").waitFor();
  await page.context().close();
});

test("no other page can use the port, and no text becomes a script", async () => {
  const own = `127.0.0.1:${fleet.admin}`;
  const key = { authorization: `Bearer ${ADMIN_KEY}` };
  const path = "/dashboard/api/workers";
  assert.equal(await statusOf(path, { host: own, ...key }), 200);
  assert.equal(await statusOf(path, { host: own, origin: `http://${own}`, ...key }), 200);
  assert.equal(await statusOf(path, { host: own, origin: "http://evil.example", ...key }), 403);
  assert.equal(await statusOf(path, { host: own }), 401);
  const policy = (await fetch(fleet.url("/dashboard"))).headers.get("content-security-policy");
  for (const part of ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"]) {
    assert.ok(policy.includes(part), policy);
  }
  assert.ok(!policy.includes("unsafe"), policy);
  const page = await open();
  const runs = page.evaluate(() => new Promise((resolve) => {
    document.addEventListener("securitypolicyviolation", () => resolve("refused"));
    const script = document.createElement("script");
    script.textContent = "globalThis.injected = true";
    document.body.append(script);
    if (globalThis.injected) resolve("ran");
  }).catch(() => "refused"));
  assert.equal(await runs, "refused");
  await page.context().close();
});

test("the keyboard reaches every view, and axe finds nothing serious", async () => {
  for (const colorScheme of ["light", "dark"]) {
    const page = await open({ colorScheme, bypassCSP: true });
    await page.evaluate(AXE);
    for (const view of ["Workers", "Sessions", "Turns"]) {
      const tab = page.getByRole("tab", { name: view });
      if (view !== "Workers") await page.keyboard.press("ArrowRight");
      else await tab.focus();
      assert.equal(await tab.getAttribute("aria-selected"), "true", view);
      const { violations } = await page.evaluate(() => globalThis.axe.run());
      const grave = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
      const found = grave.map(({ id, nodes }) => `${id}: ${nodes[0].html}`);
      assert.deepEqual(found, [], `${colorScheme}, ${view}`);
    }
    await page.context().close();
  }
});

test("the page fits three sizes without a jump", async () => {
  for (const [name, width, height] of SIZES) {
    await fleet.chat("session-for-the-charts", 50);
    const page = await open({ viewport: { width, height } });
    const place = () => page.locator("#tabs").boundingBox();
    const first = await place();
    await page.locator("figcaption", { hasText: "median" }).waitFor();
    assert.deepEqual(await place(), first, `${name} jumps`);
    const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    assert.ok(over <= 0, `${name} is ${over} pixels too wide`);
    if (process.env.BERTH_SCREENSHOTS) {
      await page.screenshot({ path: join(process.env.BERTH_SCREENSHOTS, `${name}.png`) });
    }
    await page.context().close();
  }
});

test("1, 8 and 200 workers are shown, filtered and ordered", async () => {
  const { workers, unheard } = await (await fleet.ask("/v1/workers")).json();
  for (const count of [1, 8, 200]) {
    const page = await open();
    const copies = Array.from({ length: count }, (_, index) => ({
      ...workers[index % workers.length], worker: `node-${index}/0`,
    }));
    const data = JSON.stringify({ router: "0", version: "0", fleet: { workers: copies, unheard } });
    await page.route("**/dashboard/events", (route) =>
      route.fulfill({ contentType: "text/event-stream", body: `event: fleet\ndata: ${data}\n\n` }));
    // The page connects again, and gets the copies.
    await page.getByLabel("Admin key").fill(ADMIN_KEY);
    await page.getByRole("button", { name: "Use key" }).click();
    const rows = page.locator("#workers tbody tr");
    await until(`${count} rows`, async () => (await rows.count()) === count);
    assert.equal(await rows.last().locator("th").textContent(), `node-${count - 1}/0`);
    if (process.env.BERTH_SCREENSHOTS) {
      await page.screenshot({ path: join(process.env.BERTH_SCREENSHOTS, `workers-${count}.png`) });
    }
    await page.getByLabel("Filter").first().fill(`node-${count - 1}/`);
    assert.equal(await rows.count(), 1);
    await page.context().close();
  }
});
