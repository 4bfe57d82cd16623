// What an operator notices of the dashboard, in a real browser.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { request } from "node:http";
import { createRequire } from "node:module";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { ADMIN_KEY, Fleet, HOST, PATIENCE_MS, until } from "./fleet.js";

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
  const options = { host: HOST, port: fleet.admin, path, headers };
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
      rows.map((row) => [row.cells[0].textContent, row.cells[7].textContent]));
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
  await page.getByRole("button", { name: `Life of session ${name}` }).click();
  await page.getByText("3 turns remembered").waitFor();
  assert.equal(await page.locator(".timeline li").count(), 3);
  await page.getByRole("button", { name: "Back" }).click();
  const close = page.getByRole("button", { name: `Close session ${name}` });
  await close.click();
  assert.equal((await fleet.ask(`/v1/sessions/${name}`)).status, 200, "one click closes nothing");
  await close.click();
  await until("the session is closed", async () =>
    (await fleet.ask(`/v1/sessions/${name}`)).status === 404);
  await page.getByText(`0 of 0 sessions. Session ${name} is closing.`).waitFor();
  assert.deepEqual(page.complaints, []);
  await page.context().close();
});

/** The texts of the first cells of the sessions that are shown. */
const shownSessions = (page) =>
  page.locator("#sessions tbody th").evaluateAll((heads) => heads.map((head) => head.innerText));

/** Opens the list of sessions with this filter. */
async function openSessions(filter) {
  const page = await open();
  await page.getByRole("tab", { name: "Sessions" }).click();
  await page.getByLabel("Filter").last().fill(filter);
  return page;
}

test("a list that is made anew takes no click and no focus back", async () => {
  const turn = (number) => fleet.chat(`anew-${number}`, 20);
  for (const number of [1, 2, 3]) await turn(number);
  const page = await openSessions("anew-");
  await page.getByLabel("Order by").last().selectOption("turns");
  const first = (number) => until(`session ${number} is first`, async () =>
    (await shownSessions(page))[0] === `anew-${number}`);
  await turn(1);
  await first(1);
  const name = page.getByRole("button", { name: "Life of session anew-3" });
  await name.focus();
  for (let count = 0; count < 3; count++) await turn(3);
  await first(3);
  assert.ok(await name.evaluate((button) => button === document.activeElement), "no focus");

  const close = page.getByRole("button", { name: "Close session anew-1" });
  const turns = page.getByRole("row", { name: "anew-2" }).getByRole("cell").nth(4);
  const shown = (count) => until(`${count} turns are shown`, async () =>
    (await turns.textContent()) === String(count));
  // Most turns come before the question, which is open for seconds only.
  for (let count = 0; count < 2; count++) await turn(2);
  await shown(3);
  await close.click();
  for (let count = 0; count < 2; count++) await turn(2);
  await shown(5);
  assert.equal(await close.textContent(), "Sure?");
  assert.equal((await shownSessions(page))[0], "anew-3", "no row moves below the pointer");
  await close.press("Escape");
  // The rows are in order again.
  await first(2);
  assert.equal(await close.textContent(), "Close");
  await page.context().close();
});

test("sub-agents stand below their session, also if they alone are found", async () => {
  await fleet.chat("family", 30);
  await fleet.chat("helper-of-family", 30, "family");
  await fleet.chat("helper-of-helper", 30, "helper-of-family");
  const family = ["family", "↳ helper-of-family", "↳ helper-of-helper"];
  const page = await openSessions("helper-of-helper");
  const isShown = async () => (await shownSessions(page)).join() === family.join();
  await until("the family is shown", isShown);
  await page.getByText("1 of 1 sessions").waitFor();
  const indents = await page.locator("#sessions tbody th").evaluateAll((heads) =>
    heads.map((head) => parseFloat(getComputedStyle(head).paddingInlineStart)));
  assert.ok(indents[0] < indents[1] && indents[1] < indents[2], indents.join());
  await fleet.stopRouter();
  await fleet.startRouter();
  await page.getByText("the router restarted").waitFor();
  await page.getByLabel("Filter").last().fill("helper-of");
  await page.getByText("2 of 2 sessions").waitFor();
  await until("the agents have told of the family", isShown);
  await page.context().close();
});

test("a session's life has its turns, their placements, its cost and its demotion", async () => {
  const name = "session-with-a-life";
  for (const words of [40, 80, 120]) await fleet.chat(name, words);
  const page = await openSessions(name);
  const tell = { demoted_age_ms: 0, state: "demoted" };
  await page.route(/api\/sessions\?find=/, async (route) => {
    const answer = await (await route.fetch()).json();
    Object.assign(answer.sessions[0], tell);
    await route.fulfill({ json: answer });
  });
  await page.getByRole("button", { name: `Life of session ${name}` }).click();
  const items = page.locator(".timeline li");
  await page.getByText("KV demoted").waitFor();
  assert.equal(await items.count(), 4);
  assert.match(await items.last().textContent(), /^0 ms agoKV demoted$/);
  assert.match(await page.locator("dialog").textContent(), /3 turns remembered, 0 moves\. /);
  const told = /sticky: .* cached, .* computed.*, .* generated; first token .*, took /;
  assert.match(await items.nth(2).textContent(), told);
  // The list follows the session.
  await fleet.chat(name, 160);
  await until("the fourth turn is there", async () => (await items.count()) === 5);
  await items.first().getByRole("button").click();
  await page.locator("dialog tr.chosen").waitFor();
  await page.getByRole("button", { name: "Back" }).click();
  await until("the life is there again", async () => (await items.count()) === 5);
  await page.keyboard.press("Escape");
  assert.ok(await page.locator("dialog").isHidden());
  await page.unrouteAll({ behavior: "wait" });
  await page.context().close();
});

test("a pinned session is demoted at the second click, and a refusal can be read", async () => {
  const [name, tagged] = ["session-to-demote", "session-that-is-tagged"];
  const opened = await fleet.ask("/v1/sessions", {
    method: "POST", body: JSON.stringify({ session_id: name, retention: "pinned" }),
  });
  assert.equal(opened.status, 201, await opened.text());
  await fleet.chat(tagged, 40);
  const page = await open();
  await page.getByRole("tab", { name: "Sessions" }).click();
  const filter = page.getByLabel("Filter").last();
  const demote = (session) => page.getByRole("button", { name: `Demote session ${session}` });
  await filter.fill(tagged);
  await page.getByRole("button", { name: `Close session ${tagged}` }).waitFor();
  assert.equal(await demote(tagged).count(), 0, "a session without a pin has nothing to give");
  await filter.fill(name);
  const asked = [];
  let turn;
  await page.route("**/demote", async (route) => {
    asked.push(`${route.request().method()} ${new URL(route.request().url()).pathname}`);
    // A turn begins after the page has offered the button.
    turn ??= await fleet.startTurn(name);
    await route.continue();
  });
  await demote(name).click();
  assert.equal(await demote(name).textContent(), "Sure?");
  assert.deepEqual(asked, [], "one click demotes nothing");
  await demote(name).click();
  await page.getByText(`Session ${name} is not demoted: a turn of this session runs`).waitFor();
  page.complaints = page.complaints.filter((text) => !text.includes("409"));
  await demote(name).waitFor({ state: "hidden" });
  await turn.text();
  await demote(name).click();
  await demote(name).click();
  await page.getByText(`Session ${name} is demoted.`).waitFor();
  assert.equal(asked.length, 2);
  for (const call of asked) {
    assert.match(call, /^POST \/dashboard\/api\/sessions\/[0-9a-f]+\/demote$/);
  }
  await demote(name).waitFor({ state: "hidden" });
  assert.deepEqual(page.complaints, []);
  assert.equal((await fleet.ask(`/v1/sessions/${name}`, { method: "DELETE" })).status, 204);
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
  const own = `${HOST}:${fleet.admin}`;
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

/** Returns the serious faults that axe finds in the page. */
async function graveFaults(page) {
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  const grave = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  return grave.map(({ id, nodes }) => `${id}: ${nodes[0].html}`);
}

test("the keyboard reaches every view, and axe finds nothing serious", async () => {
  // Nobody closes this one meanwhile.
  const name = "session-for-the-keyboard";
  await fleet.chat(name, 20);
  for (const colorScheme of ["light", "dark"]) {
    const page = await open({ colorScheme, bypassCSP: true });
    await page.evaluate(AXE);
    for (const view of ["Workers", "Sessions", "Turns"]) {
      const tab = page.getByRole("tab", { name: view });
      if (view !== "Workers") await page.keyboard.press("ArrowRight");
      else await tab.focus();
      assert.equal(await tab.getAttribute("aria-selected"), "true", view);
      assert.deepEqual(await graveFaults(page), [], `${colorScheme}, ${view}`);
    }
    for (const [key, view] of [["Home", "Workers"], ["End", "Turns"], ["ArrowLeft", "Sessions"]]) {
      await page.keyboard.press(key);
      const tab = page.getByRole("tab", { name: view });
      assert.equal(await tab.getAttribute("aria-selected"), "true", `${view} by ${key}`);
    }
    await page.getByRole("button", { name: `Life of session ${name}` }).press("Enter");
    await page.getByText("turns remembered").or(page.getByText("remembers no turn")).waitFor();
    assert.deepEqual(await graveFaults(page), [], `${colorScheme}, a session's life`);
    await page.keyboard.press("Enter");
    assert.ok(await page.locator("dialog").isHidden(), "the focus is on Back");
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
    await page.getByLabel("Filter").first().fill(`node-${count - 1}/`);
    assert.equal(await rows.count(), 1);
    await page.context().close();
  }
});
