// Makes text of figures. An absent figure is a dash, never a zero.

const DASH = "–";

export function count(value) {
  if (value == null) return DASH;
  for (const [unit, size] of [["M", 1e6], ["k", 1e3]]) {
    if (value >= 10 * size) return `${Math.round(value / size)} ${unit}`;
    if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  }
  return String(value);
}

export function gibibytes(value) {
  return value == null ? DASH : (value / 2 ** 30).toFixed(value < 2 ** 33 ? 1 : 0);
}

export function millis(value) {
  if (value == null) return DASH;
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60_000) return `${(value / 1000).toFixed(1)} s`;
  if (value < 3_600_000) return `${Math.floor(value / 60_000)} min`;
  return `${Math.floor(value / 3_600_000)} h`;
}

export function percent(part, whole) {
  return whole > 0 && part != null ? `${Math.round((100 * part) / whole)} %` : DASH;
}

/** The value of a figure that has a source and an age. */
export const of = (figure) => figure?.value ?? null;

/** Sums the known figures; null if none is known. */
export function sum(values) {
  const known = values.filter((value) => value != null);
  return known.length ? known.reduce((total, value) => total + value, 0) : null;
}

/**
 * Returns the parts of a worker's KV pool in tokens, from its load. Their sum is the pool.
 * `physical` is what is not free, null if that is unknown; `gauge` is what the engine says that it
 * uses.
 */
export function pool(load) {
  const total = of(load?.pool_total_tokens);
  if (total == null) return null;
  const gauge = of(load.pool_used_tokens) ?? 0;
  const pinned = of(load.pinned_tokens) ?? 0;
  const classes = load.pages?.classes;
  const inTree = classes ? Math.round((classes.cached_in_use / load.pages.pages) * total) : 0;
  const locked = Math.min(inTree, Math.max(gauge - pinned, 0));
  const running = Math.max(gauge - pinned - locked, 0);
  const available = of(load.pool_available_tokens);
  const cached = of(load.pool_evictable_tokens) ?? (available && total - gauge - available);
  const evictable = Math.max(cached ?? 0, 0);
  const free = Math.max(total - pinned - locked - running - evictable, 0);
  // Without the shim, nobody says how much of the rest is cache.
  const physical = cached == null ? null : total - free;
  return { total, pinned, locked, running, evictable, free, gauge, physical };
}

export const POOL_PARTS = ["pinned", "locked", "running", "evictable", "free"];
