// Shows the time to the first token and the share of cached prompt tokens over the last minutes.

import { h, setText } from "./dom.js";
import { millis, percent } from "./figures.js";

const BUCKET_MS = 10_000;
const BUCKETS = 60;
const [WIDTH, HEIGHT] = [600, 120];
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

class Chart {
  constructor(title) {
    this.title = title;
    this.lines = ["line", "line second"].map((name) => svg("polyline", { class: name }));
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this.picture = svg("svg", box);
    this.picture.append(...this.lines);
    this.top = h("span", { class: "top" });
    this.caption = h("figcaption", {}, title);
    const plot = h("div", { class: "plot" }, this.top, this.picture);
    this.element = h("figure", {}, this.caption, plot);
  }

  /** Shows up to two lines of values from 0 to `top`; null values leave a line out. */
  show(series, top, topText, text) {
    series.forEach((values, line) => {
      const point = (value, index) => {
        const x = (WIDTH * (index + 0.5)) / BUCKETS;
        return `${x.toFixed(1)},${(HEIGHT - 2 - ((HEIGHT - 4) * value) / top).toFixed(1)}`;
      };
      const points = values.flatMap((value, index) => (value == null ? [] : [point(value, index)]));
      this.lines[line].setAttribute("points", points.join(" "));
    });
    setText(this.top, topText);
    setText(this.caption, `${this.title}: ${text}`);
    this.picture.setAttribute("aria-label", `${this.title}, last 10 minutes: ${text}`);
  }
}

const ttft = new Chart("Time to first token");
const hits = new Chart("Prompt tokens cached");

export const elements = [ttft.element, hits.element];

const quantile = (sorted, share) => sorted[Math.floor(share * (sorted.length - 1))] ?? null;

/** Shows the turns of the last 10 minutes. Each has `endedAt`, in the page's own time. */
export function update(turns) {
  const start = performance.now() - BUCKETS * BUCKET_MS;
  const buckets = Array.from({ length: BUCKETS }, () => []);
  for (const turn of turns) {
    buckets[Math.floor((turn.endedAt - start) / BUCKET_MS)]?.push(turn);
  }
  const times = (some) =>
    some.map((turn) => turn.ttft_ms).filter((time) => time != null).sort((a, b) => a - b);
  const middle = buckets.map((bucket) => quantile(times(bucket), 0.5));
  const slow = buckets.map((bucket) => quantile(times(bucket), 0.95));
  const top = Math.max(...slow.map((value) => value ?? 0), 1);
  const all = times(turns);
  const text = all.length
    ? `median ${millis(quantile(all, 0.5))}, p95 ${millis(quantile(all, 0.95))}`
    : "no turns yet";
  ttft.show([middle, slow], top, millis(top), text);
  const ratio = (some) => {
    const told = some.filter((turn) => turn.cached_tokens != null && turn.prompt_tokens > 0);
    const total = (name) => told.reduce((sum, turn) => sum + turn[name], 0);
    return told.length ? [total("cached_tokens"), total("prompt_tokens")] : null;
  };
  const ratios = buckets.map((bucket) => {
    const parts = ratio(bucket);
    return parts && parts[0] / parts[1];
  });
  const whole = ratio(turns);
  hits.show([ratios, []], 1, "100 %", whole ? percent(...whole) : "the engines report none");
}
