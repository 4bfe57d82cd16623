// Talks to the router. The key is in this module's memory alone: not in the address, in no storage
// and in no cookie. It is gone when the page is.

let key = "";

export function useKey(text) {
  key = text.trim();
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(`/dashboard/${path}`, {
    ...options, headers, credentials: "omit", cache: "no-store", redirect: "error",
  });
  if (answer.ok) return answer;
  const refusal = await answer.json().catch(() => null);
  throw new Refused(answer.status, refusal?.error?.message ?? `status ${answer.status}`);
}

export const get = async (path) => (await ask(`api/${path}`)).json();
export const remove = (path) => ask(`api/${path}`, { method: "DELETE" });
export const post = (path) => ask(`api/${path}`, { method: "POST" });

/**
 * Reads the live events until the stream ends. Server-sent events are read by hand, because a
 * browser's own reader can send no key.
 */
export async function watch(onFleet, signal) {
  const answer = await ask("events", { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const events = text.split("\n\n");
    text = events.pop();
    // A slow page shows the newest list alone.
    const data = events.at(-1)?.split("\n").find((line) => line.startsWith("data: "));
    if (data) onFleet(JSON.parse(data.slice(6)));
  }
}
