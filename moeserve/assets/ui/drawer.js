// A panel at the side: beside the content where there is room, otherwise over it.

import { browser } from "./browser-storage.js";
import { $ } from "./dom.js";

/** A panel, and the button that opens and closes it. `room` is the media query for beside. */
export class Drawer {
  constructor({ panel, button, room, key }) {
    this.panel = panel;
    this.button = button;
    this.key = key;
    this.wide = matchMedia(room);
    this.wide.addEventListener("change", () => this.fit());
    button.addEventListener("click", () => this.toggle());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.covers) this.close();
    });
    $("shade").addEventListener("click", () => this.covers && this.close());
    this.fit();
  }

  /** Whether the panel is open over the content. */
  get covers() {
    return !this.panel.hidden && !this.wide.matches;
  }

  fit() {
    this.show(this.wide.matches && browser.get(this.key) !== "closed");
  }

  toggle() {
    if (this.panel.hidden) this.open();
    else this.close();
  }

  open() {
    this.show(true);
    this.remember("open");
    if (this.covers) this.panel.querySelector("button, input, textarea")?.focus();
  }

  close() {
    const back = this.panel.contains(document.activeElement) || this.covers;
    this.show(false);
    this.remember("closed");
    if (back) this.button.focus();
  }

  /** Closes the panel if it is over the content. */
  uncover() {
    if (this.covers) this.show(false);
  }

  remember(state) {
    if (this.wide.matches) browser.set(this.key, state);
  }

  show(open) {
    this.panel.hidden = !open;
    this.button.ariaExpanded = String(open);
    const covered = [...document.querySelectorAll(".drawer")].some((panel) => (
      !panel.hidden && getComputedStyle(panel).position === "fixed"));
    $("shade").hidden = !covered;
    $("talk").inert = covered;
  }
}
