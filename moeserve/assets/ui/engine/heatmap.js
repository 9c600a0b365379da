// The expert heat map: a row per layer, a column per physical expert, in blocks of a rank each.

import { dark, el, tooltip } from "../dom.js";

const LEFT = 30, RIGHT = 66, TOP = 34, GAP = 8;
const RAMPS = { // light to strong, for loads of 0 to 3 times the layer's mean and more
  light: [[238, 242, 247], [150, 190, 232], [38, 104, 184], [12, 42, 92]],
  dark: [[30, 37, 47], [30, 82, 136], [74, 160, 236], [218, 240, 255]],
};

export class HeatMap {
  constructor(host) {
    this.canvas = el("canvas", { tabIndex: 0, role: "application", "aria-label": "Expert heat map; arrow keys move from expert to expert" });
    this.spoken = el("p", { className: "sr", "aria-live": "polite" });
    this.scroll = el("div", { className: "scroll" }, this.canvas);
    host.append(this.scroll, el("div", { className: "ramp" }, el("span", {}, "idle"), el("i", {}), el("span", {}, "3 × the layer's mean"), el("span", { className: "corner" }, "has replicas")), this.spoken);
    this.kind = "recent";
    new ResizeObserver(() => this.draw()).observe(this.scroll);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => this.select(null));
    this.canvas.addEventListener("blur", () => this.select(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  /** Shows a state of /v1/experts. isNew: whether an engine was replaced a moment ago. */
  update(shown, isNew) {
    this.shown = shown;
    const { placement: { experts: placed, experts_per_rank: perRank } } = shown;
    this.layers = placed.length;
    this.slots = placed[0]?.length ?? 0;
    this.perRank = perRank;
    this.ranks = perRank ? Math.ceil(this.slots / perRank) : 0;
    const states = new Map(shown.engines.map(({ engine, state }) => [engine, state === "serving" && isNew(engine) ? "replaced" : state]));
    this.rankState = Array.from({ length: this.ranks }, (_, rank) => (shown.ep_sharded ? states.get(Math.floor(rank / shown.tp)) ?? "gone" : "serving"));
    this.copies = placed.map((row) => {
      const counts = new Array(shown.num_experts).fill(0);
      for (const expert of row) counts[expert]++;
      return counts;
    });
    this.draw();
  }

  /** Returns the rows of a physical expert: replicas share their expert's evenly. */
  rows(layer, slot) {
    const expert = this.shown.placement.experts[layer][slot];
    return this.shown.load[this.kind][layer][expert] / this.copies[layer][expert];
  }

  rankLoads(layer) {
    const loads = new Array(this.ranks).fill(0);
    for (let slot = 0; slot < this.slots; slot++) loads[Math.floor(slot / this.perRank)] += this.rows(layer, slot);
    return loads;
  }

  layout() {
    const room = this.scroll.clientWidth - LEFT - RIGHT - GAP * this.ranks;
    this.w = Math.min(90, Math.max(4, room / this.slots));
    this.h = Math.min(34, Math.max(5, 330 / this.layers));
    this.width = LEFT + RIGHT + GAP * this.ranks + this.w * this.slots;
    this.height = TOP + this.layers * this.h + 4;
  }

  x(slot) {
    return LEFT + slot * this.w + Math.floor(slot / this.perRank) * GAP;
  }

  draw() {
    if (!this.shown || !this.scroll.clientWidth || !this.slots) return;
    this.layout();
    const { canvas } = this, scale = devicePixelRatio || 1;
    canvas.width = this.width * scale;
    canvas.height = this.height * scale;
    canvas.style.width = `${this.width}px`;
    canvas.style.height = `${this.height}px`;
    Object.assign(canvas.dataset, { layers: this.layers, slots: this.slots, lost: this.rankState.filter((state) => state !== "serving").length });
    const draw = (this.pen = canvas.getContext("2d"));
    draw.scale(scale, scale);
    const style = getComputedStyle(canvas);
    this.ink = style.color;
    this.bad = style.outlineColor;
    this.warn = style.caretColor;
    draw.font = `11px ${style.fontFamily}`;
    draw.textBaseline = "middle";
    this.drawRanks();
    for (let layer = 0; layer < this.layers; layer++) this.drawLayer(layer);
    this.drawSelected();
  }

  drawRanks() {
    const draw = this.pen, width = this.w * this.perRank;
    const loads = Array.from({ length: this.layers }, (_, layer) => this.rankLoads(layer)).reduce((a, b) => a.map((load, rank) => load + b[rank]));
    const all = loads.reduce((a, b) => a + b, 0);
    for (let rank = 0; rank < this.ranks; rank++) {
      const x = this.x(rank * this.perRank), lost = this.rankState[rank] !== "serving";
      const share = all ? ` · ${Math.round(100 * loads[rank] / all)} %` : "";
      const colour = !lost ? this.ink : ["lost", "gone", "replaced"].includes(this.rankState[rank]) ? this.bad : this.warn;
      draw.fillStyle = colour;
      const text = [`rank ${rank} ${lost ? this.rankState[rank] : share}`, `${rank}${share}`, `${rank}`].find((each) => draw.measureText(each).width <= width + GAP / 2);
      if (text) draw.fillText(text, x, 9);
      draw.strokeStyle = colour;
      draw.globalAlpha = lost ? 1 : 0.35;
      draw.lineWidth = lost ? 2 : 1;
      draw.strokeRect(x - 2.5, TOP - 4.5, width + 4, this.layers * this.h + 7);
      draw.globalAlpha = 0.5;
      if (all) draw.fillRect(x - 2, 18, (width + 3) * Math.min(1, (loads[rank] / all) * this.ranks / 2), 4); // half: as much as the mean
      draw.globalAlpha = 1;
    }
    draw.fillStyle = this.ink;
    draw.fillText("fullest", this.width - RIGHT + 8, 9);
    draw.fillText("÷ mean", this.width - RIGHT + 8, 22);
  }

  drawLayer(layer) {
    const draw = this.pen, y = TOP + layer * this.h, loads = this.rankLoads(layer);
    const all = loads.reduce((a, b) => a + b, 0), mean = all / this.slots;
    const every = Math.ceil(14 / this.h);
    draw.fillStyle = this.ink;
    if (layer % every === 0) draw.fillText(`L${layer}`, 2, y + this.h / 2);
    for (let slot = 0; slot < this.slots; slot++) {
      const expert = this.shown.placement.experts[layer][slot], x = this.x(slot);
      const heat = mean ? this.rows(layer, slot) / mean : 0, lost = this.rankState[Math.floor(slot / this.perRank)] !== "serving";
      const pad = this.w > 8 ? 1 : 0.25;
      draw.globalAlpha = lost ? 0.4 : 1;
      const colour = shade(heat);
      draw.fillStyle = `rgb(${colour.join()})`;
      draw.fillRect(x, y, this.w - pad, this.h - pad);
      draw.fillStyle = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 125 ? "#101820" : "#fff";
      if (this.copies[layer][expert] > 1) {
        const size = Math.min(7, this.w / 2, this.h / 2);
        draw.beginPath();
        draw.moveTo(x + this.w - pad - size, y);
        draw.lineTo(x + this.w - pad, y);
        draw.lineTo(x + this.w - pad, y + size);
        draw.fill();
      }
      if (this.w >= 20 && this.h >= 14) draw.fillText(expert, x + 4, y + this.h / 2);
      draw.globalAlpha = 1;
    }
    if (all && this.h >= 5) {
      const ratio = Math.max(...loads) / (all / this.ranks);
      draw.fillStyle = this.ink;
      draw.globalAlpha = 0.4;
      draw.fillRect(this.width - RIGHT + 8, y + this.h * 0.2, Math.min(1, ratio - 1) * 26, this.h * 0.6);
      draw.globalAlpha = 1;
      if (layer % every === 0) draw.fillText(ratio.toFixed(2), this.width - RIGHT + 36, y + this.h / 2);
    }
  }

  drawSelected() {
    if (!this.selected) return;
    const [layer, at] = this.selected, expert = this.shown.placement.experts[layer]?.[at];
    this.pen.strokeStyle = this.ink;
    this.pen.lineWidth = 2;
    for (let slot = 0; slot < this.slots; slot++) {
      if (this.shown.placement.experts[layer]?.[slot] === expert) this.pen.strokeRect(this.x(slot), TOP + layer * this.h, this.w - 1, this.h - 1);
    }
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const px = event.clientX - box.left, layer = Math.floor((event.clientY - box.top - TOP) / this.h);
    const slot = Array.from({ length: this.slots ?? 0 }, (_, each) => each).find((each) => px >= this.x(each) && px < this.x(each) + this.w);
    this.select(slot !== undefined && layer >= 0 && layer < this.layers ? [layer, slot] : null, event.clientX, event.clientY);
  }

  key(event) {
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [];
    if (down === undefined || !this.slots) return;
    event.preventDefault();
    const [layer, slot] = this.selected ?? [0, -1];
    const bound = (value, size) => Math.min(size - 1, Math.max(0, value));
    const next = [bound(layer + down, this.layers), bound(slot + right, this.slots)];
    const box = this.canvas.getBoundingClientRect();
    this.select(next, box.left + this.x(next[1]) + this.w, box.top + TOP + next[0] * this.h);
    this.spoken.textContent = this.describe(...next).join(", ");
  }

  select(cell, px, py) {
    this.selected = cell;
    this.draw();
    tooltip(cell && el("div", {}, ...this.describe(...cell).map((line, at) => el(at ? "div" : "strong", {}, line))), px, py);
  }

  describe(layer, slot) {
    const { placement, load } = this.shown, expert = placement.experts[layer][slot], rank = Math.floor(slot / this.perRank);
    const sum = load[this.kind][layer].reduce((a, b) => a + b, 0);
    const share = sum ? ` (${(100 * load[this.kind][layer][expert] / sum).toFixed(1)} % of the layer)` : "";
    const ranks = placement.experts[layer].flatMap((other, at) => (other === expert ? [Math.floor(at / this.perRank)] : []));
    return [`layer ${layer}, expert ${expert}`, `rank ${rank}, ${this.rankState[rank]}`, `${Math.round(load[this.kind][layer][expert]).toLocaleString()} rows ${this.kind === "recent" ? "recently" : "since the start"}${share}`,
      ...(ranks.length > 1 ? [`${ranks.length} replicas, on ranks ${ranks.join(", ")}`] : [])];
  }
}

/** Returns the colour of a load, in times the mean, as [red, green, blue]. */
function shade(heat) {
  const ramp = RAMPS[dark() ? "dark" : "light"], at = Math.min(heat, 2.999), low = Math.floor(at);
  return ramp[low].map((value, i) => Math.round(value + (ramp[low + 1][i] - value) * (at - low)));
}
