// Makes and updates elements. Text is only ever set as text, never parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** Returns a new element with these properties, attributes and children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Sets an element's text if it differs, so that a screen reader hears only changes. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Shows one row for each item and reuses the rows of known items, so that the focus stays and
 * nothing jumps. `make` returns a row, `update` shows an item in it.
 */
export function showRows(body, items, keyOf, make, update) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const focused = document.activeElement;
  let next = body.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let row = old.get(key);
    old.delete(key);
    if (!row) {
      row = make(item);
      row.dataset.key = key;
    }
    if (row === next) next = next.nextElementSibling;
    else body.insertBefore(row, next);
    update(row, item);
  }
  old.forEach((row) => row.remove());
  // A row that moves loses the focus.
  if (focused !== document.activeElement && body.contains(focused)) {
    focused.focus({ preventScroll: true });
  }
}

/** Returns a table with a caption for screen readers, and its body. */
export function table(caption, columns) {
  const body = h("tbody");
  const heads = columns.map(([text, kind]) => h("th", { scope: "col", class: kind }, text));
  const element = h(
    "table", {}, h("caption", { class: "unseen" }, caption),
    h("thead", {}, h("tr", {}, ...heads)), body,
  );
  const frame = { class: "scroll", tabindex: "0", role: "region", "aria-label": caption };
  return { frame: h("div", frame, element), body };
}
