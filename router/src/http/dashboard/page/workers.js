// Shows the workers: state, KV pool, device memory, rows and queue.

import { byId, h, setText, showRows, table } from "./dom.js";
import { POOL_PARTS, count, gibibytes, millis, of, percent, pool, sum } from "./figures.js";

const COLUMNS = [
  ["Worker", "name"], ["State", "state"], ["KV pool", "bar"], ["Used", "figure"],
  ["Gauge", "figure"], ["HBM", "figure wide"], ["Host", "figure wide"], ["Rows", "figure"],
  ["Running", "figure"],
  ["Queued", "figure"], ["Report", "figure"],
];
const ORDERS = {
  name: (one, other) => one.worker.localeCompare(other.worker, "en", { numeric: true }),
  used: (one, other) => share(other) - share(one),
  queue: (one, other) => queued(other) - queued(one),
};

const share = (worker) => {
  const parts = pool(worker.load);
  return parts ? (parts.physical ?? parts.gauge) / parts.total : -1;
};
const queued = (worker) =>
  (worker.load?.turns_queued ?? 0) + (of(worker.load?.requests_waiting) ?? 0);

let newest = [];
let body, filter, order, note;

export function setUp() {
  filter = h("input", { id: "worker-filter", type: "search", oninput: show });
  order = h(
    "select", { id: "worker-order", onchange: show },
    h("option", { value: "name" }, "name"), h("option", { value: "used" }, "pool in use"),
    h("option", { value: "queue" }, "queue"),
  );
  note = h("p", { class: "note", role: "status" });
  const legend = h(
    "ul", { class: "legend", "aria-label": "Parts of the KV pool" },
    ...POOL_PARTS.map((part) => h("li", {}, h("i", { class: part }), part)),
  );
  const shown = table("Workers", COLUMNS);
  body = shown.body;
  byId("workers").append(
    h(
      "div", { class: "controls" }, h("label", { for: "worker-filter" }, "Filter"), filter,
      h("label", { for: "worker-order" }, "Order by"), order, legend,
    ),
    note, shown.frame,
  );
}

/** Shows a list of workers. */
export function update(fleet) {
  newest = fleet.workers;
  show();
  const unheard = fleet.unheard.map((agent) => `${agent.control}: ${agent.reason ?? agent.state}`);
  setText(note, unheard.length ? `Not heard yet: ${unheard.join("; ")}` : "");
}

function show() {
  const text = filter.value.toLowerCase();
  const wanted = newest.filter((worker) =>
    `${worker.worker} ${worker.state} ${worker.role}`.toLowerCase().includes(text));
  wanted.sort((one, other) => ORDERS[order.value](one, other) || ORDERS.name(one, other));
  showRows(body, wanted, (worker) => worker.worker, makeRow, showWorker);
}

function makeRow(worker) {
  const bar = h("div", { class: "pool", role: "img" });
  bar.append(...POOL_PARTS.map((part) => h("span", { class: part })));
  const cells = COLUMNS.slice(1).map(([, kind]) => h("td", { class: kind }));
  cells[1].append(bar);
  return h("tr", {}, h("th", { scope: "row", class: "name" }, worker.worker), ...cells);
}

function showWorker(row, worker) {
  const [, state, bar, used, gauge, memory, host, rows, running, waiting, report] = row.children;
  const load = worker.load;
  const reason = worker.reason ? `: ${worker.reason}` : "";
  setText(state, `${worker.state}${reason}`);
  state.title = state.textContent;
  state.dataset.state = worker.state;
  const parts = pool(load);
  showPool(bar.firstElementChild, parts);
  const usage = load?.kv_physical_usage;
  setText(used, percent(of(usage), 1));
  used.title = usage ? `from ${usage.source}, ${millis(usage.age_ms)} ago` : "";
  setText(gauge, parts ? percent(parts.gauge, parts.total) : "–");
  const devices = load?.devices ?? [];
  const inUse = sum(devices.map((device) => device.memory_used_bytes));
  const whole = sum(devices.map((device) => device.memory_total_bytes));
  setText(memory, whole == null ? "–" : `${gibibytes(inUse)} of ${gibibytes(whole)} GiB`);
  const tier = load?.host;
  setText(host, tier ? `${count(of(tier.used_tokens))} of ${count(of(tier.total_tokens))}` : "–");
  host.title = tier ? hostText(tier) : "the engine keeps no KV in the host's memory";
  setText(rows, `${count(of(load?.rows_held))} of ${count(of(load?.rows_total))}`);
  setText(running, count(of(load?.requests_running) ?? load?.turns_running));
  setText(waiting, count(load ? queued(worker) : null));
  setText(report, millis(worker.report_age_ms));
}

function hostText(tier) {
  const moving = `${count(of(tier.loading_tokens))} loading, ${count(of(tier.writing_tokens))} writing`;
  const rate = tier.load_tokens_per_s;
  const from = rate?.source === "shim" ? "measured" : "by the settings";
  return `${count(of(tier.evictable_tokens))} tokens can be evicted, ${moving}; ` +
    `loads ${count(of(rate))} tokens/s (${from})`;
}

function showPool(bar, parts) {
  POOL_PARTS.forEach((part, index) => {
    const width = parts ? (100 * parts[part]) / parts.total : 0;
    bar.children[index].style.width = `${width.toFixed(2)}%`;
  });
  const name = (part) => (part === "free" && parts.physical == null ? "free or evictable" : part);
  const told = (part) => `${name(part)} ${count(parts[part])}`;
  const text = parts
    ? `${POOL_PARTS.map(told).join(", ")} of ${count(parts.total)} tokens`
    : "no figures";
  bar.setAttribute("aria-label", text);
  bar.title = text;
}
