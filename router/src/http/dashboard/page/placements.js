// Shows the last turns, and why one of them went to its worker.

import { get } from "./client.js";
import { byId, h, setText, showRows, table } from "./dom.js";
import { count, millis } from "./figures.js";

const SHOWN_MAX = 100;
const COLUMNS = [
  ["Turn", "name"], ["Ended", "figure"], ["Session", "name"], ["Worker", "name"],
  ["Reason", "state"], ["Cached", "figure"], ["Prompt", "figure"], ["Answer", "figure"],
  ["First token", "figure"], ["Took", "figure"], ["Outcome", "state"],
];

let body;

export function setUp() {
  const shown = table("Turns that have ended, newest first", COLUMNS);
  body = shown.body;
  byId("turns").append(shown.frame);
}

/** Shows the newest of these turns, which are oldest first. */
export function update(turns) {
  const newest = turns.slice(-SHOWN_MAX).reverse();
  showRows(body, newest, ({ turn }) => turn, makeRow, showTurn);
}

function makeRow({ turn }) {
  const short = turn.slice(0, 8);
  const name = h("button", { class: "link", onclick: () => explain(turn) }, short);
  // Who speaks to the page says what is shown.
  name.setAttribute("aria-label", `${short}: explain the placement of turn ${turn}`);
  const cells = COLUMNS.slice(1).map(([, kind]) => h("td", { class: kind }));
  return h("tr", {}, h("th", { scope: "row", class: "name" }, name), ...cells);
}

function showTurn(row, turn) {
  const workers = turn.prefill_worker ? `${turn.prefill_worker} → ${turn.worker}` : turn.worker;
  const texts = [
    `${millis(performance.now() - turn.endedAt)} ago`, turn.session_id ?? "–", workers,
    turn.reason + (turn.retried ? ", retried" : ""), count(turn.cached_tokens),
    count(turn.prompt_tokens), count(turn.output_tokens), millis(turn.ttft_ms),
    millis(turn.duration_ms), turn.outcome,
  ];
  texts.forEach((text, index) => setText(row.children[index + 1], text));
}

/**
 * Shows the workers that were compared for a turn, with their figures. `back` shows what the dialog
 * showed before; without it, the dialog closes.
 */
export async function explain(turn, back) {
  const dialog = byId("detail");
  const leave = back ?? (() => dialog.close());
  const text = h("p", { role: "status" }, "asking");
  dialog.replaceChildren(
    h("h2", { id: "detail-title" }, `Placement of turn ${turn}`),
    h("button", { onclick: () => leave() }, "Back"), text,
  );
  if (!dialog.open) dialog.showModal();
  dialog.querySelector("button").focus();
  try {
    const { placements } = await get(`placements/${turn}`);
    // The dialog may show something else by now.
    if (!text.isConnected) return;
    setText(text, placements.length > 1 ? "This turn was placed more than once." : "");
    dialog.append(...placements.map(showPlacement));
  } catch (error) {
    setText(text, error.message);
  }
}

function showPlacement(placement) {
  const compared = placement.compared;
  const names = Object.keys(compared[0] ?? {}).filter((name) => name !== "worker");
  const heads = names.map((name) => [name.replaceAll("_", " "), "figure"]);
  const columns = [["Worker", "name"], ...heads];
  const { frame, body: rows } = table("Workers compared, the cheapest first", columns);
  for (const figures of compared) {
    const isChosen = figures.worker === placement.worker;
    const text = figures.worker + (isChosen ? " (chosen)" : "");
    const name = h("th", { scope: "row", class: "name" }, text);
    const cells = names.map((key) => h("td", { class: "figure" }, String(figures[key] ?? "–")));
    rows.append(h("tr", isChosen ? { class: "chosen" } : {}, name, ...cells));
  }
  const summary =
    `${placement.worker} was chosen as ${placement.reason.replaceAll("_", " ")}; ` +
    `${count(placement.uncached_tokens)} tokens to compute.`;
  const { prefill } = placement;
  const half = prefill
    ? ` The prompt was computed by ${prefill.worker}, ${count(prefill.uncached_tokens)} tokens.`
    : "";
  const candidates = compared.length ? frame : "No workers were compared.";
  return h("div", {}, h("p", {}, summary + half), candidates);
}
