// Sampled tokens, coloured by their probability, with the alternatives of each in a tooltip.

import { el, tooltip } from "../dom.js";

const SURE = [0.9, 0.6, 0.3, 0.1]; // a token below the last is of level 4, the least likely

/** A run of tokens. One of them can be reached by Tab, the others from there with the arrow keys. */
export class Tokens {
  constructor() {
    this.node = el("p", { className: "tokens", role: "group", "aria-label": "Tokens with their probabilities; arrow keys move" });
    this.decoder = new TextDecoder();
    this.node.addEventListener("pointerover", (event) => this.show(event.target, event));
    this.node.addEventListener("pointerleave", () => tooltip(null));
    this.node.addEventListener("focusin", (event) => this.show(event.target));
    this.node.addEventListener("focusout", () => tooltip(null));
    this.node.addEventListener("keydown", (event) => this.move(event));
  }

  /** Appends the entries of a chunk's `logprobs.content`. */
  push(entries) {
    for (const entry of entries) {
      // a token may end inside a character, which then shows with the token that completes it
      const text = entry.bytes ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
      const level = SURE.findIndex((limit) => Math.exp(entry.logprob) >= limit);
      const node = el("span", { className: `token sure-${level < 0 ? SURE.length : level}`, tabIndex: this.node.firstChild ? -1 : 0 }, text || "·");
      node.entry = entry;
      node.ariaLabel = `${entry.token}, ${percent(entry.logprob)}`;
      this.node.append(node);
    }
  }

  show(node, at) {
    if (!node.entry) return;
    const box = node.getBoundingClientRect();
    tooltip(alternatives(node.entry), at?.clientX ?? box.left, at?.clientY ?? box.bottom - 14);
  }

  move(event) {
    const way = { ArrowRight: "nextSibling", ArrowLeft: "previousSibling" }[event.key];
    const next = way && event.target[way];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function alternatives(entry) {
  const listed = entry.top_logprobs ?? [];
  const all = listed.some((other) => other.token === entry.token) ? listed : [entry, ...listed];
  const rows = all.map((other) => {
    const bar = el("i", { className: "share" });
    bar.style.width = `${Math.exp(other.logprob) * 60}px`;
    const row = el("tr", {}, el("td", { className: "code" }, visible(other.token)), el("td", { className: "num" }, percent(other.logprob)), el("td", {}, bar));
    row.className = other.token === entry.token ? "chosen" : "";
    return row;
  });
  return el("table", {}, el("tbody", {}, ...rows));
}

const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : `${share.toPrecision(1)} %`;
}
