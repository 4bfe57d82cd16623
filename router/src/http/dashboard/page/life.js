// Shows the life of a session: its turns, what they cost, its moves, and when its KV was demoted.

import { get } from "./client.js";
import { byId, h, setText, showRows } from "./dom.js";
import { count, millis, percent, sum } from "./figures.js";
import { explain } from "./placements.js";

const TURNS_MAX = 200;
// The engine finds whole pages in its cache, so the rest of the last one is computed in each turn.
const PAGE_TOKENS_MAX = 64;

let shown = null;

/** Opens the dialog with a session's life, which follows the session until it is closed. */
export function showLife(session) {
  const dialog = byId("detail");
  const summary = h("p", {}, "asking");
  const state = h("p", { class: "note" });
  const list = h("ol", { class: "timeline", "aria-label": "Turns and events, oldest first" });
  dialog.replaceChildren(
    h("h2", { id: "detail-title" }, `Session ${session.session_id}`),
    h("button", { onclick: () => dialog.close() }, "Back"), state, summary, list,
  );
  const life = { session, summary, state, list };
  shown = life;
  dialog.addEventListener("close", () => { if (shown === life) shown = null; }, { once: true });
  if (!dialog.open) dialog.showModal();
  dialog.querySelector("button").focus();
  update();
}

/** Asks anew for the session that the dialog shows, if it shows one. */
export async function update() {
  const life = shown;
  if (!life) return;
  const { digest } = life.session;
  try {
    const [{ turns }, { sessions: [now] }] = await Promise.all([
      get(`turns?limit=${TURNS_MAX}&session=${digest}`), get(`sessions?find=${digest}&limit=1`),
    ]);
    if (shown !== life) return;
    setText(life.state, describeState(now));
    setText(life.summary, describe(turns));
    const longest = Math.max(...turns.map((turn) => turn.prompt_tokens ?? 0), 1);
    const items = turns.map((turn, index) => ({ ...turn, before: turns[index - 1], longest }));
    const events = withDemotion(items, now);
    showRows(life.list, events, ({ turn }) => turn, makeItem(life), showItem);
  } catch (error) {
    if (shown === life) setText(life.summary, error.message);
  }
}

function describeState(session) {
  if (!session) return "No agent reports this session: it is closed, or only its turns are known.";
  const { state, retention, worker, resident_tokens: tokens, demoted_age_ms: demoted } = session;
  const last = demoted == null ? "" : ` Its KV was last demoted ${millis(demoted)} ago.`;
  return `${state} on ${worker}, ${retention}, ${count(tokens)} tokens of KV.${last}`;
}

/** Returns the turns, with the last demotion between those before and after it. */
function withDemotion(turns, session) {
  const age = session?.demoted_age_ms;
  if (age == null) return turns;
  const place = turns.findLastIndex((turn) => turn.age_ms >= age) + 1;
  return turns.toSpliced(place, 0, { turn: "demotion", age_ms: age });
}

/** Tokens of a turn's prompt that the engine computed; null if it doesn't say. */
const computed = ({ prompt_tokens: prompt, cached_tokens: cached }) =>
  prompt == null || cached == null ? null : prompt - cached;

/** Computed tokens that the turn before had computed already, or generated. */
function computedAgain(turn, before) {
  const fresh = computed(turn);
  if (fresh == null || before?.prompt_tokens == null) return null;
  const known = Math.min(before.prompt_tokens + (before.output_tokens ?? 0), turn.prompt_tokens);
  return Math.max(known - turn.cached_tokens, 0);
}

function describe(turns) {
  if (!turns.length) return "The router remembers no turn of this session.";
  const total = (figure) => sum(turns.map(figure));
  const [prompt, fresh] = [total((turn) => turn.prompt_tokens), total(computed)];
  const again = total((turn) => computedAgain(turn, turns[turns.indexOf(turn) - 1]));
  const moves = turns.filter((turn, index) => index && turn.worker !== turns[index - 1].worker);
  const cached = fresh == null ? null : prompt - fresh;
  return (
    `${turns.length} turns remembered, ${moves.length} moves. ${count(prompt)} prompt tokens, ` +
    `${count(fresh)} of them computed (${percent(cached, prompt)} cached), ${count(again)} of ` +
    `these not for the first time. ${count(total((turn) => turn.output_tokens))} tokens ` +
    `generated, in ${millis(total((turn) => turn.duration_ms))} of turns.`
  );
}

const makeItem = (life) => (item) => {
  const when = h("span", { class: "when" });
  if (item.turn === "demotion") {
    return h("li", {}, when, h("strong", {}, "KV demoted"));
  }
  const bar = h("div", { class: "pool", role: "img" });
  bar.append(h("span", { class: "evictable" }), h("span", { class: "running" }));
  const back = () => showLife(life.session);
  const why = h("button", { class: "link", onclick: () => explain(item.turn, back) }, item.reason);
  why.setAttribute("aria-label", `${item.reason}: explain the placement of turn ${item.turn}`);
  return h(
    "li", {}, when, bar, h("span", {}, h("span", {}), why, h("span", {})),
    h("strong", {}),
  );
};

function showItem(row, item) {
  const [when, bar, texts, notes] = row.children;
  setText(when, `${millis(item.age_ms)} ago`);
  if (item.turn === "demotion") return;
  const { before, longest } = item;
  const [cached, fresh] = [item.cached_tokens ?? 0, computed(item) ?? item.prompt_tokens ?? 0];
  [cached, fresh].forEach((tokens, part) => {
    bar.children[part].style.width = `${((100 * tokens) / longest).toFixed(2)}%`;
  });
  const tokens = `${count(item.cached_tokens)} cached, ${count(computed(item))} computed`;
  bar.setAttribute("aria-label", tokens);
  const expected = item.uncached_tokens_expected;
  const guess = expected == null ? "" : ` (${count(expected)} expected)`;
  setText(texts.firstElementChild, `${item.worker}, `);
  setText(
    texts.lastElementChild,
    `: ${tokens}${guess}, ${count(item.output_tokens)} generated; first token ` +
    `${millis(item.ttft_ms)}, took ${millis(item.duration_ms)}`,
  );
  setText(notes, notesOf(item, before).join("; "));
}

/** Returns what is remarkable of a turn. */
function notesOf(turn, before) {
  const notes = [];
  const again = computedAgain(turn, before);
  if (before && before.worker !== turn.worker) notes.push(`moved from ${before.worker}`);
  if (again > PAGE_TOKENS_MAX) notes.push(`${count(again)} tokens computed again`);
  if (before?.retention && before.retention !== turn.retention) {
    notes.push(`retention ${before.retention} became ${turn.retention ?? "unknown"}`);
  }
  if (turn.outcome !== "ok") notes.push(turn.outcome.replaceAll("_", " "));
  return notes;
}
