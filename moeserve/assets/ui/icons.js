// The icons of buttons: strokes on a grid of 24.

import { el, svg } from "./dom.js";

const PATHS = {
  back: "M15 6l-6 6 6 6",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  down: "M12 5v14M6 13l6 6 6-6",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  forward: "M9 6l6 6-6 6",
  go: "M5 5v14M10 6l9 6-9 6z",
  list: "M4 5h16v14H4zM9 5v14",
  more: "M4.5 12h1M11.5 12h1M18.5 12h1",
  plus: "M12 5v14M5 12h14",
  retry: "M20 11a8 8 0 1 0-2.3 6M20 5v6h-6",
  send: "M12 19V6M6 12l6-6 6 6",
  sliders: "M4 8h8M18 8h2M4 16h2M12 16h8M12 8a3 3 0 1 0 6 0 3 3 0 1 0-6 0"
    + "M6 16a3 3 0 1 0 6 0 3 3 0 1 0-6 0",
  stop: "M7 7h10v10H7z",
};

/** Returns the drawing of an icon. */
export function icon(name) {
  const attributes = { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" };
  return svg("svg", attributes, svg("path", { d: PATHS[name] }));
}

/** Returns a button that is an icon with a name. */
export function iconButton(name, label, onclick) {
  const props = { type: "button", className: "quiet icon-button", onclick };
  return el("button", { ...props, title: label, "aria-label": label }, icon(name));
}

/** Draws the icon that a button of the page asks for in `data-icon`. */
export function drawIcons() {
  for (const button of document.querySelectorAll("[data-icon]")) {
    button.prepend(icon(button.dataset.icon));
  }
}
