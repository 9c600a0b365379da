// One traced step of all ranks, drawn as rows of spans; the whole file opens in ui.perfetto.dev.

import { $, el, svg } from "../dom.js";
import { ApiError, request } from "../api.js";

const ROW = 18, WIDTH = 1000;
const KINDS = ["attention", "experts", "dispatch", "combine", "plan", "vote", "run", "update"]; // coloured by place

/** Connects the button that takes a trace. */
export function setUp() {
  $("trace").addEventListener("click", take);
}

async function take() {
  const button = $("trace"), host = $("timeline");
  button.disabled = true;
  host.replaceChildren(el("p", { className: "muted" }, "Waiting for the next step: send a request if none is running."));
  try {
    const file = await (await request("v1/admin/trace", { method: "POST" })).json();
    host.replaceChildren(...draw(file));
    URL.revokeObjectURL($("trace-file").href);
    $("trace-file").href = URL.createObjectURL(new Blob([JSON.stringify(file)], { type: "application/json" }));
    $("trace-file").hidden = false;
  } catch (error) {
    const text = error instanceof ApiError ? error.message : String(error);
    const hint = [401, 403].includes(error.status) ? " Enter an administrator's key with the button API key above." : "";
    host.replaceChildren(el("p", { className: "problem", role: "alert" }, `${text}.${hint}`));
  }
  button.disabled = false;
}

function draw({ traceEvents: items, otherData: { missing } }) {
  const names = new Map();
  for (const { name, ph, pid, tid, args } of items) if (ph === "M" && name.endsWith("_name")) names.set(`${name}/${pid}/${tid}`, args.name);
  const spans = items.filter(({ ph }) => ph === "X"), end = Math.max(1, ...spans.map(({ ts, dur }) => ts + dur));
  const nodes = [];
  for (const [id, rank] of names) {
    if (!id.startsWith("process_name")) continue;
    const pid = Number(id.split("/")[1]);
    nodes.push(el("h3", {}, rank));
    for (const [thread, track] of names) {
      if (!thread.startsWith(`thread_name/${pid}/`)) continue;
      const tid = Number(thread.split("/")[2]);
      const boxes = spans.filter((span) => span.pid === pid && span.tid === tid).map((span) => box(span, end));
      nodes.push(el("div", { className: "track" }, el("span", { className: "muted" }, track), svg("svg", { viewBox: `0 0 ${WIDTH} ${ROW}`, preserveAspectRatio: "none", role: "img", "aria-label": `${rank}, ${track}: ${boxes.length} spans` }, ...boxes)));
    }
  }
  const legend = el("p", { className: "legend" }, ...KINDS.map((kind, at) => el("span", { className: `key s${at}` }, kind)));
  const note = `${(end / 1000).toFixed(2)} ms from the first span to the last` + (missing.length ? `; no answer from ${missing.join(", ")}` : "");
  return [el("p", { className: "muted" }, note), legend, ...nodes];
}

function box({ name, ts, dur, args }, end) {
  const title = svg("title");
  title.textContent = `${name}${args.layer === undefined ? "" : ` of layer ${args.layer}`}: ${dur.toFixed(0)} µs, from ${ts.toFixed(0)} µs`;
  const kind = KINDS.indexOf(name);
  return svg("rect", { class: `span s${kind < 0 ? KINDS.length : kind}`, x: WIDTH * ts / end, y: 1, width: Math.max(0.8, WIDTH * dur / end), height: ROW - 2 }, title);
}
