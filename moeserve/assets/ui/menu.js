// The one menu of actions, which opens beside the button that it belongs to.

import { $, el } from "./dom.js";

/** Opens the menu. `actions`: pairs of a name and what it does. */
export function openMenu(button, actions) {
  const menu = $("menu");
  const items = actions.map(([name, act]) => el("button", {
    type: "button",
    role: "menuitem",
    className: "quiet",
    onclick: () => {
      menu.hidePopover();
      act();
    },
  }, name));
  menu.replaceChildren(...items);
  menu.onkeydown = (event) => move(event, items);
  menu.showPopover();
  place(menu, button);
  items[0].focus();
}

function place(menu, button) {
  const at = button.getBoundingClientRect();
  const { width, height } = menu.getBoundingClientRect();
  const below = at.bottom + height + 8 < innerHeight;
  menu.style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  menu.style.top = `${below ? at.bottom + 4 : Math.max(8, at.top - height - 4)}px`;
}

function move(event, items) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const now = items.indexOf(document.activeElement);
  items[(now + step + items.length) % items.length].focus();
}
