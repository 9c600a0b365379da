// Small line charts of the last three minutes; the pointer or the arrow keys read them.

import { el, svg, tooltip } from "../dom.js";
import { WINDOW_S } from "./feed.js";

const WIDTH = 300, HEIGHT = 56; // of the drawing; CSS stretches it
const LEAST_S = 40; // a page that was just opened shows less time

/** A chart. series: [{name, of: values => number or null}], stacked on each other if asked. */
export class Chart {
  constructor(host, { title, help = "", series, format, stacked = false, max = 0, note = () => "" }) {
    Object.assign(this, { title, series, format, stacked, least: max, note });
    this.value = el("strong", {}, "–");
    this.small = el("span", { className: "muted" });
    this.top = el("span", { className: "top muted" });
    this.areas = series.map((_, at) => svg("path", { class: `area s${at}` }));
    this.lines = series.map((_, at) => svg("path", { class: `line s${at}` }));
    this.marks = svg("path", { class: "marks" });
    this.cursor = svg("path", { class: "cursor" });
    this.svg = svg("svg", { class: stacked ? "stacked" : "", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: 0 }, ...this.areas.toReversed(), ...this.lines, this.marks, this.cursor);
    const legend = series.length > 1 ? el("span", { className: "legend" }, ...series.map(({ name }, at) => el("span", { className: `key s${at}` }, name))) : null;
    this.node = el("figure", { className: "chart card", title: help }, el("figcaption", {}, el("span", { className: "title" }, title), this.value, this.small, legend), el("div", { className: "plot" }, this.svg, this.top));
    host.append(this.node);
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.point((event.clientX - box.left) / box.width, event.clientX, event.clientY);
    });
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", (event) => this.step(event));
  }

  /** Draws the samples; marks: times at which something went wrong. */
  draw(samples, marks) {
    this.samples = samples;
    this.end = samples.at(-1)?.t ?? 0;
    this.span = Math.min(WINDOW_S, Math.max(LEAST_S, this.end - (samples[0]?.t ?? 0)));
    const tops = samples.map(({ values }) => {
      const numbers = this.read(values);
      return this.stacked ? numbers.reduce((a, b) => a + (b ?? 0), 0) : Math.max(...numbers.map((number) => number ?? 0));
    });
    const max = Math.max(this.least, ...tops) || 1;
    const x = (t) => this.x(t), y = (value) => HEIGHT - 1 - (HEIGHT - 6) * (value / max);
    for (let at = 0; at < this.series.length; at++) {
      let line = "", area = "", run = [];
      const flush = () => {
        if (run.length) {
          line += `M${run.map(([px, py]) => `${px},${py}`).join("L")}${run.length === 1 ? "h1" : ""}`;
          area += `M${run[0][0]},${HEIGHT}L${run.map(([px, py]) => `${px},${py}`).join("L")}L${run.at(-1)[0]},${HEIGHT}Z`;
        }
        run = [];
      };
      for (const { t, values } of samples) {
        const numbers = this.read(values);
        if (numbers[at] == null) flush();
        else run.push([x(t).toFixed(1), y(this.stacked ? numbers.slice(0, at + 1).reduce((a, b) => a + b, 0) : numbers[at]).toFixed(1)]);
      }
      flush();
      this.lines[at].setAttribute("d", line);
      this.areas[at].setAttribute("d", area);
    }
    this.marks.setAttribute("d", marks.filter((t) => t > this.end - this.span).map((t) => `M${x(t).toFixed(1)},0V${HEIGHT}`).join(""));
    const last = samples.at(-1)?.values;
    this.value.textContent = last ? this.tell(last) : "–";
    this.small.textContent = last ? this.note(last) : "";
    this.top.textContent = this.format(max);
    this.svg.setAttribute("aria-label", `${this.title}: ${this.value.textContent}`);
  }

  x(t) {
    return WIDTH * (1 - (this.end - t) / this.span);
  }

  read(values) {
    return this.series.map(({ of }) => (values ? of(values) : null));
  }

  tell(values) {
    const numbers = this.read(values);
    const one = this.stacked ? (numbers[0] == null ? null : numbers.reduce((a, b) => a + b, 0)) : numbers[0];
    if (this.stacked || numbers.length === 1) return one == null ? "–" : this.format(one);
    return numbers.map((number) => (number == null ? "–" : this.format(number))).join(" / ");
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.samples?.length) return;
    event.preventDefault();
    this.at = Math.min(1, Math.max(0, (this.at ?? 1) + by / 60));
    const box = this.svg.getBoundingClientRect();
    this.point(this.at, box.left + this.at * box.width, box.top + box.height / 2);
  }

  point(share, px, py) {
    const t = this.end - this.span * (1 - share);
    const near = this.samples?.reduce((best, each) => (Math.abs(each.t - t) < Math.abs(best.t - t) ? each : best), this.samples[0]);
    if (!near || Math.abs(near.t - t) > 4) return this.leave();
    const numbers = this.read(near.values);
    const rows = this.series.map(({ name }, at) => el("tr", {}, el("td", {}, name), el("td", { className: "num" }, numbers[at] == null ? "–" : this.format(numbers[at]))));
    this.cursor.setAttribute("d", `M${this.x(near.t).toFixed(1)},0V${HEIGHT}`);
    const ago = Math.round(this.end - near.t);
    tooltip(el("table", {}, el("caption", {}, ago ? `${ago} s ago` : "now"), el("tbody", {}, ...rows)), px, py);
  }

  leave() {
    this.at = undefined;
    this.cursor.setAttribute("d", "");
    tooltip(null);
  }
}
