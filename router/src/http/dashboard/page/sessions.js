// Shows the sessions of all clients, children under their parents, and the life of one of them.

import { get, remove } from "./client.js";
import { byId, h, setText, showRows, table } from "./dom.js";
import { count, millis, percent } from "./figures.js";

const COLUMNS = [
  ["Session", "name"], ["Principal", "name"], ["Worker", "name"], ["State", "state"],
  ["Retention", "state"], ["Turns", "figure"], ["Resident tokens", "figure"], ["Idle", "figure"],
  ["", "figure"],
];
const ORDERS = [
  ["resident", "resident tokens"], ["turns", "turns"], ["recent", "last turn"], ["id", "id"],
];
const SHOWN_MAX = 200;

let body, filter, order, note, timer;

export function setUp() {
  filter = h("input", { id: "session-filter", type: "search", oninput: askSoon });
  const options = ORDERS.map(([value, text]) => h("option", { value }, text));
  order = h("select", { id: "session-order", onchange: update }, ...options);
  note = h("p", { class: "note", role: "status" });
  const shown = table("Sessions", COLUMNS);
  body = shown.body;
  byId("sessions").append(
    h(
      "div", { class: "controls" }, h("label", { for: "session-filter" }, "Filter"), filter,
      h("label", { for: "session-order" }, "Order by"), order,
    ),
    note, shown.frame,
  );
}

function askSoon() {
  clearTimeout(timer);
  timer = setTimeout(update, 200);
}

/** Asks for the sessions and shows them. */
export async function update() {
  const query = new URLSearchParams({ sort: order.value, find: filter.value, limit: SHOWN_MAX });
  const { sessions, total } = await get(`sessions?${query}`);
  setText(note, `${sessions.length} of ${total} sessions`);
  showRows(body, underParents(sessions), ({ digest }) => digest, makeRow, showSession);
}

/** Returns the sessions with each child after its parent, if that is shown too. */
function underParents(sessions) {
  const known = new Set(sessions.map(({ digest }) => digest));
  const children = Map.groupBy(sessions, ({ parent }) => (known.has(parent) ? parent : ""));
  const seen = new Set();
  const ordered = [];
  const add = (session, depth) => {
    if (seen.has(session.digest)) return;
    seen.add(session.digest);
    ordered.push({ ...session, depth });
    (children.get(session.digest) ?? []).forEach((child) => add(child, depth + 1));
  };
  (children.get("") ?? []).forEach((session) => add(session, 0));
  // Sessions that name each other as parents are under nothing.
  sessions.forEach((session) => add(session, 0));
  return ordered;
}

function makeRow(session) {
  const { digest } = session;
  const name = h("button", { class: "link", onclick: () => showLife(session) });
  const close = h("button", { onclick: (event) => closeSession(event.target, session) }, "Close");
  close.setAttribute("aria-label", `Close session ${session.session_id}`);
  const cells = COLUMNS.slice(1, -1).map(([, kind]) => h("td", { class: kind }));
  const head = h("th", { scope: "row", class: "name" }, name);
  return h("tr", { "data-digest": digest }, head, ...cells, h("td", {}, close));
}

function showSession(row, session) {
  const [name, principal, worker, state, retention, turns, resident, idle] = row.children;
  name.style.paddingInlineStart = `${0.5 + 1.2 * Math.min(session.depth, 5)}rem`;
  setText(name.firstElementChild, `${session.depth ? "↳ " : ""}${session.session_id}`);
  name.title = session.session_id;
  setText(principal, session.principal);
  setText(worker, session.worker);
  setText(state, session.state);
  setText(retention, session.retention);
  setText(turns, count(session.turns));
  setText(resident, count(session.resident_tokens));
  setText(idle, session.turns_running ? "runs" : millis(session.idle_ms_at_report));
}

async function closeSession(button, session) {
  // A second click confirms, so that no session is closed by mistake.
  if (button.textContent === "Close") {
    setText(button, "Sure?");
    button.addEventListener("blur", () => setText(button, "Close"), { once: true });
    return;
  }
  button.disabled = true;
  try {
    await remove(`sessions/${session.digest}`);
    setText(note, `Session ${session.session_id} is closing.`);
  } catch (error) {
    setText(note, `Session ${session.session_id} is not closed: ${error.message}`);
  }
  button.disabled = false;
  setText(button, "Close");
}

/** Shows the turns of a session that the router remembers, as a timeline. */
export async function showLife(session) {
  const dialog = byId("detail");
  const title = h("h2", { id: "detail-title" }, `Session ${session.session_id}`);
  const close = h("button", { onclick: () => dialog.close() }, "Back");
  const list = h("ol", { class: "timeline" });
  const text = h("p", { role: "status" }, "asking");
  dialog.replaceChildren(title, close, text, list);
  dialog.showModal();
  try {
    const { turns } = await get(`turns?limit=200&session=${session.digest}`);
    setText(text, describe(turns));
    list.append(...turns.map((turn, index) => showTurn(turn, turns[index - 1], turns)));
  } catch (error) {
    setText(text, error.message);
  }
}

function describe(turns) {
  if (!turns.length) return "The router remembers no turn of this session.";
  const total = (name) => turns.reduce((sum, turn) => sum + (turn[name] ?? 0), 0);
  const [prompt, cached] = [total("prompt_tokens"), total("cached_tokens")];
  const moves = turns.filter((turn, index) => index && turn.worker !== turns[index - 1].worker);
  return (
    `${turns.length} turns remembered, ${moves.length} moves. ${count(prompt)} prompt tokens, ` +
    `${count(prompt - cached)} of them computed (${percent(cached, prompt)} cached), ` +
    `${count(total("output_tokens"))} answered, in ${millis(total("duration_ms"))} of turns.`
  );
}

function showTurn(turn, before, turns) {
  const longest = Math.max(...turns.map((other) => other.prompt_tokens ?? 0), 1);
  const bar = h("div", { class: "pool", role: "img" });
  const cached = turn.cached_tokens ?? 0;
  const parts = [["evictable", cached], ["running", (turn.prompt_tokens ?? 0) - cached]];
  for (const [part, tokens] of parts) {
    const span = h("span", { class: part });
    span.style.width = `${((100 * tokens) / longest).toFixed(2)}%`;
    bar.append(span);
  }
  const [few, all] = [count(turn.cached_tokens), count(turn.prompt_tokens)];
  const tokens = `${few} cached of ${all} prompt tokens`;
  bar.setAttribute("aria-label", tokens);
  const notes = [];
  if (before && before.worker !== turn.worker) {
    notes.push(`moved from ${before.worker}: ${turn.reason}`);
  }
  if (before?.retention && before.retention !== turn.retention) {
    notes.push(`retention ${before.retention} became ${turn.retention ?? "unknown"}`);
  }
  if (turn.outcome !== "ok") notes.push(turn.outcome);
  return h(
    "li", {}, h("span", { class: "when" }, `${millis(turn.age_ms)} ago`), bar,
    h("span", {}, `${turn.worker}, ${turn.reason}, ${tokens}, first token ${millis(turn.ttft_ms)}`),
    notes.length ? h("strong", {}, notes.join("; ")) : null,
  );
}
