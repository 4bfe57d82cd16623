// Starts the page: follows the router's events, and shows them in the view that is chosen.

import * as charts from "./charts.js";
import { Refused, get, useKey, watch } from "./client.js";
import { byId, h, setText } from "./dom.js";
import { count, millis, of, percent, pool, sum } from "./figures.js";
import * as life from "./life.js";
import * as placements from "./placements.js";
import * as sessions from "./sessions.js";
import * as workers from "./workers.js";

const TURNS_KEPT = 4096;
const PAUSE_MS = [500, 1000, 2000, 5000];

const TILES = ["Workers", "KV in use", "KV pinned", "Sessions", "Turns running", "Queued"];
const tiles = TILES.map((name) => {
  const value = h("dd", {}, "–");
  byId("tiles").append(h("div", {}, h("dt", {}, name), value));
  return value;
});
byId("charts").append(...charts.elements);
[workers, sessions, placements].forEach((view) => view.setUp());

let turns = [];
let cursor = null;
let router = null;
let looking = false;
let stop = new AbortController();

function showConnection(text, state) {
  setText(byId("connection"), text);
  byId("connection").dataset.state = state;
}

function showTiles({ workers: all }) {
  const loads = all.map((worker) => worker.load);
  const pools = loads.map(pool).filter((parts) => parts);
  const total = (name) => sum(pools.map((parts) => parts[name] ?? parts.gauge));
  const fresh = all.filter((worker) => worker.state === "fresh").length;
  const texts = [
    `${fresh} of ${all.length} fresh`, percent(total("physical"), total("total")),
    percent(total("pinned"), total("total")), count(sum(loads.map((load) => load?.sessions))),
    count(sum(loads.map((load) => load?.turns_running))),
    count(sum(loads.map((load) => (load?.turns_queued ?? 0) + (of(load?.requests_waiting) ?? 0)))),
  ];
  texts.forEach((text, index) => setText(tiles[index], text));
}

/** Adds the turns that have ended since the last look. One look runs at a time. */
async function updateTurns() {
  if (looking) return;
  looking = true;
  try {
    await addTurns();
  } finally {
    looking = false;
  }
}

async function addTurns() {
  const asked = router;
  const query = cursor ? `after=${cursor}` : "limit=1000";
  const page = await get(`turns?${query}`);
  if (asked !== router) return;
  cursor = page.next;
  const now = performance.now();
  turns.push(...page.turns.map((turn) => ({ ...turn, endedAt: now - turn.age_ms })));
  turns = turns.slice(-TURNS_KEPT);
  charts.update(turns);
  if (!byId("turns").hidden) placements.update(turns);
}

function onFleet({ router: process, version, fleet }) {
  if (router && router !== process) {
    // The lists of the router that was there before are gone with it.
    cursor = null;
    turns = [];
    showConnection(`the router restarted; connected again to ${version}`, "live");
  } else if (byId("connection").dataset.state !== "live") {
    showConnection(`live, router ${version}`, "live");
  }
  router = process;
  showTiles(fleet);
  workers.update(fleet);
  updateTurns().catch(() => {});
  if (!byId("sessions").hidden) sessions.update().catch(() => {});
  life.update();
}

async function follow(signal) {
  let failures = 0;
  while (!signal.aborted) {
    const started = performance.now();
    try {
      await watch(onFleet, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && [401, 403].includes(error.status)) {
        return showConnection(`${error.message}`, "refused");
      }
    }
    if (signal.aborted) return;
    failures = performance.now() - started > 10_000 ? 0 : failures + 1;
    const pause = PAUSE_MS[Math.min(failures, PAUSE_MS.length) - 1] ?? PAUSE_MS[0];
    showConnection(`no connection; trying again in ${millis(pause)}`, "lost");
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  stop.abort();
  stop = new AbortController();
  follow(stop.signal);
});

function choose(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    const isChosen = other === tab;
    other.setAttribute("aria-selected", isChosen);
    other.tabIndex = isChosen ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isChosen;
  }
  tab.focus();
  placements.update(turns);
  if (!byId("sessions").hidden) sessions.update().catch(() => {});
}

byId("tabs").addEventListener("click", ({ target }) => {
  if (target.role === "tab") choose(target);
});
byId("tabs").addEventListener("keydown", (event) => {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const place = tabs.indexOf(event.target);
  const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: -1 }[event.key];
  if (to == null || place < 0) return;
  event.preventDefault();
  choose(tabs.at(to % tabs.length));
});

follow(stop.signal);
