// The engine view: charts, the heat map, events, and a row per engine.

import { $, el } from "../dom.js";
import { Chart } from "./charts.js";
import { HeatMap } from "./heatmap.js";
import * as trace from "./trace.js";

const MAX_STEP_CHARTS = 16;
const number = (value) => (value >= 100 ? Math.round(value).toLocaleString() : value >= 10 ? value.toFixed(1) : Number(value.toFixed(2)).toString());
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const ever = (value) => (value == null ? "" : `${percent(value)} since the start`);

const CHARTS = [
  { title: "Tokens per second", help: "Tokens given out; prompt tokens taken up, cached ones included", series: [{ name: "given out", of: (v) => v.tokens }, { name: "prompt", of: (v) => v.prompt }], format: number, max: 10 },
  { title: "Requests", help: "Sequences in the engines' batches, and waiting in the engines", series: [{ name: "running", of: (v) => v.running }, { name: "waiting", of: (v) => v.waiting }], format: number, max: 4 },
  { title: "KV cache in use", help: "Share of the KV blocks that requests hold", series: [{ name: "in use", of: (v) => v.kv }], format: percent, max: 0.05 },
  { title: "Prefix cache hits", help: "Share of prompt tokens that were found in the prefix cache", series: [{ name: "hits", of: (v) => v.hits }], format: percent, max: 1, note: (v) => ever(v.hitsEver) },
  { title: "Drafts accepted", help: "Share of the verified drafts that were right (needs --speculate)", series: [{ name: "accepted", of: (v) => v.accepted }], format: percent, max: 1, note: (v) => ever(v.acceptedEver) || "no drafts" },
  { title: "Exposed communication", help: "Share of the steps' time for which the model stood still for rows of other ranks", series: [{ name: "exposed", of: (v) => v.exposed }], format: percent, max: 0.2, note: (v) => ever(v.exposedEver) },
  { title: "Imbalance of ranks", help: "Load of the fullest rank over the mean, for the recent rows; 1 is even", series: [{ name: "fullest ÷ mean", of: (v) => v.imbalance }], format: (value) => `${value.toFixed(2)} ×`, max: 2 },
  { title: "Engines that serve", help: "Engines that take part now", series: [{ name: "serving", of: (v) => v.up }], format: number, max: 1, note: (v) => `of ${v.engines.length}` },
];
const STEP_SERIES = [
  { name: "computing", of: (step) => step.compute },
  { name: "exposed communication", of: (step) => step.exposed },
  { name: "agreeing", of: (step) => step.vote },
];

/** Draws the view while it is open. */
export class EngineView {
  constructor(feed) {
    this.feed = feed;
    this.charts = CHARTS.map((chart) => new Chart($("charts"), chart));
    this.steps = new Map(); // charts by engine
    this.heat = new HeatMap($("heat"));
    trace.setUp();
    feed.addEventListener("sample", () => this.draw());
    feed.addEventListener("experts", () => this.drawExperts());
    for (const input of document.querySelectorAll("input[name=load]")) {
      input.addEventListener("change", () => {
        this.heat.kind = input.value;
        this.heat.draw();
      });
    }
    addEventListener("theme", () => this.heat.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.heat.draw());
  }

  draw() {
    if (!this.feed.watching) return;
    const { samples, log } = this.feed;
    const marks = log.filter(({ kind }) => kind === "bad").map(({ at }) => at / 1000);
    for (const chart of this.charts) chart.draw(samples, marks);
    this.drawSteps(samples, marks);
    this.drawEngines();
    $("events").replaceChildren(...(log.length ? log.map(({ at, kind, text }) => el("li", { className: kind }, el("time", {}, new Date(at).toLocaleTimeString()), text)) : [el("li", { className: "muted" }, "nothing yet")]));
  }

  drawSteps(samples, marks) {
    const engines = Object.keys(samples.at(-1)?.values?.steps ?? {}).slice(0, MAX_STEP_CHARTS);
    for (const engine of engines) {
      if (this.steps.has(engine)) continue;
      const format = (value) => `${number(value)} ms`;
      this.steps.set(engine, new Chart($("steps"), { title: `Engine ${engine}`, series: STEP_SERIES, format, stacked: true }));
    }
    for (const [engine, chart] of this.steps) {
      chart.draw(samples.map(({ t, values }) => ({ t, values: values?.steps[engine] ?? null })), marks);
    }
  }

  drawEngines() {
    const fresh = this.feed.freshExperts;
    const counted = this.feed.samples.at(-1)?.values?.engines;
    const known = new Map((fresh?.engines ?? []).map((each) => [each.engine, each]));
    if (!counted) return;
    const rows = counted.map((engine) => {
      const more = known.get(engine.engine) ?? {};
      const plain = more.state ?? (engine.up ? "serving" : "not serving");
      const ago = this.feed.replacedAgo(engine.engine), state = plain === "serving" && ago !== null ? `replaced ${ago} s ago` : plain;
      const kind = state === "serving" ? "good" : plain === "serving" || !["lost", "gone", "not serving"].includes(plain) ? "warn" : "bad";
      const cells = [engine.running, engine.waiting, engine.steps.toLocaleString(), more.mean_step_s ? `${(1e3 * more.mean_step_s).toFixed(1)} ms` : "–",
        more.comm_s ? percent(more.overlap_efficiency) : "–", engine.restarts, more.pid ?? "–", more.host ?? "–"];
      return el("tr", { className: kind, "data-engine": engine.engine, "data-state": state }, el("th", { scope: "row" }, `engine ${engine.engine}`), el("td", { className: `badge ${kind}` }, state), ...cells.map((cell) => el("td", { className: "num" }, String(cell))));
    });
    const heads = ["", "state", "running", "waiting", "steps", "step", "overlap", "restarts", "process", "machine"];
    $("engines").replaceChildren(el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, ...rows));
    $("engines-note").textContent = fresh ? `${fresh.dp} × ${fresh.tp} ranks, epoch ${fresh.epoch}${fresh.waiting ? `, ${fresh.waiting} requests wait for an engine` : ""}` : "";
  }

  drawExperts() {
    if (!this.feed.watching) return;
    const { experts: shown, noExperts } = this.feed;
    $("heat").hidden = !shown;
    if (!shown) {
      $("heat-note").textContent = noExperts;
      return;
    }
    const where = shown.ep_sharded ? "sharded over all ranks" : "every engine has all";
    $("heat-note").textContent = `${shown.num_layers} layers × ${shown.num_experts} experts, ${where}; placement ${shown.placement.version}`;
    $("why").textContent = shown.rebalancing.why;
    this.heat.update(shown, (engine) => this.feed.replacedAgo(engine) !== null);
    this.drawEngines();
  }
}
