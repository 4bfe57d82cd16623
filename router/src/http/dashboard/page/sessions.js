// Shows the sessions of all clients, each below the session that started it.

import { get, post, remove } from "./client.js";
import { asks, confirmButton } from "./confirm.js";
import { byId, h, setText, showRows, table } from "./dom.js";
import { count, millis } from "./figures.js";
import { showLife } from "./life.js";

const COLUMNS = [
  ["Session", "name"], ["Principal", "name"], ["Worker", "name"], ["State", "word"],
  ["Retention", "word"], ["Turns", "figure"], ["Resident tokens", "figure"], ["Idle", "figure"],
  ["Actions", "actions"],
];
const ORDERS = [
  ["resident", "resident tokens"], ["turns", "turns"], ["recent", "last turn"], ["id", "id"],
];
const SHOWN_MAX = 200;
const RESULT_SHOWN_MS = 10_000;

let body, filter, order, note, timer;
let asked = 0;
let counted = "";
let result = "";

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

/** Asks for the sessions and shows them. An answer that a later question has overtaken is left. */
export async function update() {
  const query = new URLSearchParams({ sort: order.value, find: filter.value, limit: SHOWN_MAX });
  const question = ++asked;
  const { sessions, parents, total } = await get(`sessions?${query}`);
  if (question !== asked) return;
  counted = `${sessions.length} of ${total} sessions`;
  showNote();
  const lines = belowParents(sessions, parents);
  showRows(body, asks(body) ? inOldOrder(lines) : lines, keyOf, makeRow, showSession);
}

const showNote = () => setText(note, result ? `${counted}. ${result}` : counted);

const keyOf = ({ digest }) => digest;

/** Returns the lines as they stand now, so that no second press of a button hits another row. */
function inOldOrder(lines) {
  const rows = [...body.children];
  const places = new Map(rows.map((row, place) => [row.dataset.key, place]));
  const place = (line) => places.get(keyOf(line)) ?? rows.length;
  return lines.toSorted((one, other) => place(one) - place(other));
}

/**
 * Returns the sessions that were found, in their order, each below its parent. A family stands
 * where its first member stands in the order. Parents that were not found themselves have
 * `isFound` false. Sessions that name each other in a circle are all shown.
 */
export function belowParents(found, parents) {
  const known = new Map();
  const add = (isFound) => (session) => {
    const { digest } = session;
    if (!known.has(digest)) known.set(digest, { ...session, isFound, children: [] });
  };
  found.forEach(add(true));
  parents.forEach(add(false));
  const roots = [];
  const linked = new Set();
  for (const { digest } of found) {
    // Everything above a linked session is linked, too.
    for (let line = known.get(digest); line && !linked.has(line);) {
      linked.add(line);
      const above = line.parent === line.digest ? undefined : known.get(line.parent);
      (above?.children ?? roots).push(line);
      line = above;
    }
  }
  const ordered = new Set();
  const show = (line, depth) => {
    if (ordered.has(line)) return;
    line.depth = depth;
    ordered.add(line);
    line.children.forEach((child) => show(child, depth + 1));
  };
  roots.forEach((line) => show(line, 0));
  // What no root leads to is in a circle.
  found.forEach(({ digest }) => show(known.get(digest), 0));
  return [...ordered];
}

function makeRow(session) {
  const { digest, session_id: id } = session;
  const name = h("button", { class: "link", onclick: () => showLife(session) });
  const cells = COLUMNS.slice(1, -1).map(([, kind]) => h("td", { class: kind }));
  const head = h("th", { scope: "row", class: "name" }, name);
  const close = confirmButton("Close", `Close session ${id}`, () =>
    act(session, "closing", () => remove(`sessions/${digest}`)));
  const demote = confirmButton("Demote", `Demote session ${id}`, () =>
    act(session, "demoted", () => post(`sessions/${digest}/demote`)));
  const actions = h("td", { class: "actions" }, demote, close);
  return h("tr", { "data-digest": digest }, head, ...cells, actions);
}

function showSession(row, session) {
  const [name, principal, worker, state, retention, turns, resident, idle, actions] = row.children;
  const { depth, isFound, session_id: id } = session;
  name.style.paddingInlineStart = `${0.5 + 1.2 * Math.min(depth, 5)}rem`;
  setText(name.firstElementChild, `${depth ? "↳ " : ""}${id}`);
  name.title = id;
  // The indentation is for the eye alone.
  const level = depth ? `, started by another session, level ${depth + 1}` : "";
  name.firstElementChild.setAttribute("aria-label", `Life of session ${id}${level}`);
  row.classList.toggle("context", !isFound);
  setText(principal, session.principal);
  setText(worker, session.worker);
  setText(state, session.state);
  setText(retention, session.retention);
  setText(turns, count(session.turns));
  setText(resident, count(session.resident_tokens));
  setText(idle, session.turns_running ? "runs" : millis(session.idle_ms));
  // Only a pinned session between two turns has KV to give up.
  const isDemotable = session.retention === "pinned" && session.state === "idle";
  actions.firstElementChild.hidden = !isDemotable;
}

/** Does something to a session at the router, and says how that went. */
async function act({ session_id: id }, done, request) {
  try {
    await request();
    result = `Session ${id} is ${done}.`;
  } catch (error) {
    result = `Session ${id} is not ${done}: ${error.message}`;
  }
  showNote();
  const shown = result;
  setTimeout(() => {
    if (result === shown) result = "";
    showNote();
  }, RESULT_SHOWN_MS);
}
