// Makes buttons that act at the second press, so that nothing is done by mistake.

import { h, setText } from "./dom.js";

const ASKS_MS = 10_000;

/** Whether a button below this element waits for its second press. */
export const asks = (element) => element.querySelector("[data-asks]") !== null;

/**
 * Returns a button that asks at its first press and runs `action` at the second. The question ends
 * after ten seconds, or with Escape. `what` says the whole action, for a screen reader.
 */
export function confirmButton(text, what, action) {
  let timer;
  const button = h("button", { type: "button" }, text);
  const ask = (isAsking) => {
    clearTimeout(timer);
    button.toggleAttribute("data-asks", isAsking);
    setText(button, isAsking ? "Sure?" : text);
    button.setAttribute("aria-label", isAsking ? `Sure? ${what}` : what);
    if (isAsking) timer = setTimeout(ask, ASKS_MS, false);
  };
  button.addEventListener("click", async () => {
    const isSure = button.hasAttribute("data-asks");
    ask(!isSure);
    if (!isSure) return;
    // Disabled, the button would lose the focus.
    button.setAttribute("aria-disabled", "true");
    try {
      await action();
    } finally {
      button.removeAttribute("aria-disabled");
    }
  });
  button.addEventListener("keydown", ({ key }) => {
    if (key === "Escape") ask(false);
  });
  ask(false);
  return button;
}
