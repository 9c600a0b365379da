// What the server tells about itself: /readyz and /metrics in turns, /v1/experts as a stream while somebody looks.
//
// Fires "sample" after each reading, "experts" for each state of the experts, "state" when the server's state changes.

import { ApiError, events, request } from "../api.js";

export const WINDOW_S = 180;
const RATE_S = 3; // rates are means over this time
const MAX_EVENTS = 100;
const FRESH_MS = 10_000;

export class Feed extends EventTarget {
  samples = []; // {t, values or null for a gap}, oldest first
  log = []; // {at, kind, text}, newest first
  state = "loading";
  phase = "connecting";
  experts = null;
  noExperts = ""; // why there is nothing to show
  watching = false; // whether somebody looks at the engine
  #expertsAt = 0;
  #raw = []; // readings of the counters, for rates
  replaced = new Map(); // when an engine was last seen to be another process than before, by engine
  #engines = new Map(); // what was last known of each engine
  #placement = null;
  #model = "";

  /** Runs as long as the page is open. */
  start() {
    this.#loop(() => this.#read(), () => (this.watching ? 1000 : 2000));
    this.#loop(() => this.#watch(), () => 1000);
  }

  async #loop(work, pause) {
    for (;;) {
      if (!document.hidden) await work();
      await new Promise((resolve) => setTimeout(resolve, pause()));
    }
  }

  async #read() {
    try {
      const status = await (await fetch(new URL("readyz", document.baseURI), { cache: "no-store" })).json();
      const loading = ["loading", "lost"].includes(status.status) && status.percent < 100;
      this.#become(status.status, loading ? `${status.phase} (${status.percent} %)` : status.phase);
    } catch {
      this.#become("unreachable", "the server cannot be reached; trying again");
      this.#push(null);
      return;
    }
    try {
      if (!this.#model && this.state === "ready") {
        const models = (await (await request("v1/models")).json()).data.map(({ id }) => id);
        this.#model = models[0];
        this.dispatchEvent(new CustomEvent("models", { detail: models }));
      }
      const metrics = parse(await (await request("metrics")).text());
      const values = this.#measure(metrics);
      if (!this.freshExperts) this.#noteEngines(values.engines);
      this.#push(values);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#push(null);
    }
  }

  async #watch() {
    if (!this.watching || this.noExperts || this.state !== "ready") return;
    const leave = new AbortController();
    const check = setInterval(() => (!this.watching || document.hidden) && leave.abort(), 500);
    try {
      const interval = (this.experts?.num_layers ?? 0) * (this.experts?.num_experts ?? 0) > 2000 ? 2 : 0.5;
      const response = await request(`v1/experts?stream=true&interval_s=${interval}`, { signal: leave.signal });
      for await (const shown of events(response)) {
        this.experts = shown;
        this.#expertsAt = Date.now();
        this.#noteExperts(shown);
        this.dispatchEvent(new Event("experts"));
      }
    } catch (error) {
      if (error.status === 404) this.noExperts = error.message;
      this.dispatchEvent(new Event("experts"));
    } finally {
      clearInterval(check);
    }
  }

  #become(state, phase) {
    if (state !== this.state && this.samples.length) {
      this.note(state === "ready" ? "good" : state === "unreachable" ? "bad" : "info", `the server is ${state}`);
    }
    Object.assign(this, { state, phase });
    this.dispatchEvent(new Event("state"));
  }

  /** The experts' state, if it is of now. */
  get freshExperts() {
    return Date.now() - this.#expertsAt < 5000 ? this.experts : null;
  }

  /** Returns how many seconds ago an engine was replaced, null if that is no news. */
  replacedAgo(engine) {
    const ms = Date.now() - (this.replaced.get(engine) ?? -Infinity);
    return ms < FRESH_MS ? Math.floor(ms / 1000) : null;
  }

  /** Adds a line to the log. */
  note(kind, text) {
    this.log.unshift({ at: Date.now(), kind, text });
    this.log.length = Math.min(this.log.length, MAX_EVENTS);
  }

  /** Compares the engines, [{engine, up, restarts}], with what they were: a replacement may take less than a reading. */
  #noteEngines(engines) {
    const now = new Map(engines.map((each) => [each.engine, each]));
    for (const [engine, { up, restarts, state }] of now) {
      const before = this.#engines.get(engine);
      if (!before && this.#engines.size) this.note("info", `engine ${engine} was added`);
      if (before && restarts > before.restarts) {
        this.replaced.set(engine, Date.now());
        this.note("bad", `engine ${engine} was lost; a new process takes its place`);
      } else if (before?.up && !up) {
        if (state === "waiting") this.note("info", `engine ${engine} waits for the others`);
        else this.note("bad", `engine ${engine} ${state ? `is ${state}` : "does not serve"}`);
      }
      if (up && (before && !before.up || restarts > before?.restarts)) this.note("good", `engine ${engine} serves again`);
    }
    for (const engine of this.#engines.keys()) if (!now.has(engine)) this.note("info", `engine ${engine} was removed`);
    this.#engines = now;
  }

  #noteExperts({ engines, placement: { version }, rebalancing }) {
    this.#noteEngines(engines.map(({ engine, state, restarts }) => ({ engine, restarts, state, up: state === "serving" })));
    if (this.#placement !== null && version !== this.#placement) this.note("info", `placement ${version} is in force: ${rebalancing.why}`);
    this.#placement = version;
  }

  #push(values) {
    const now = Date.now() / 1000;
    this.samples.push({ t: now, values });
    while (this.samples[0].t < now - WINDOW_S - 5) this.samples.shift();
    this.dispatchEvent(new Event("sample"));
  }

  /** Returns the numbers of now; rates are over the last seconds, null where nothing happened that they could tell of. */
  #measure(metrics) {
    const now = { t: performance.now() / 1000, metrics };
    if (this.#raw.at(-1)?.metrics.sum("generation_tokens_total") > metrics.sum("generation_tokens_total")) this.#raw = []; // a new server
    this.#raw.push(now);
    while (this.#raw.length > 2 && this.#raw[1].t <= now.t - RATE_S) this.#raw.shift();
    const then = this.#raw[0], seconds = now.t - then.t;
    const grown = (name, engine) => metrics.sum(name, engine) - then.metrics.sum(name, engine);
    const ratio = (part, all) => (all > 0 ? part / all : null);
    const steps = {};
    for (const { labels: { engine } } of metrics.rows("engine_up")) {
      const count = grown("engine_steps_total", engine);
      const each = (name) => (count > 0 ? Math.max(0, 1000 * grown(name, engine) / count) : null);
      const exposed = each("engine_exposed_comm_seconds_total"), whole = each("engine_step_seconds_total");
      steps[engine] = count > 0 ? { compute: Math.max(0, whole - exposed), exposed, vote: each("engine_vote_seconds_total") } : null;
    }
    return {
      tokens: seconds ? grown("generation_tokens_total") / seconds : 0,
      prompt: seconds ? grown("prompt_tokens_total") / seconds : 0,
      running: Math.min(metrics.sum("num_requests_running"), metrics.sum("num_requests_active")), // the first is of the last step
      waiting: metrics.sum("num_requests_waiting"),
      kv: metrics.sum("kv_cache_usage_perc"),
      hits: ratio(grown("prefix_cache_hits_total"), grown("prefix_cache_queries_total")),
      hitsEver: ratio(metrics.sum("prefix_cache_hits_total"), metrics.sum("prefix_cache_queries_total")),
      accepted: ratio(grown("spec_decode_num_accepted_tokens_total"), grown("spec_decode_num_draft_tokens_total")),
      acceptedEver: ratio(metrics.sum("spec_decode_num_accepted_tokens_total"), metrics.sum("spec_decode_num_draft_tokens_total")),
      exposed: ratio(grown("exposed_comm_seconds_total"), grown("engine_step_seconds_total")),
      exposedEver: ratio(metrics.sum("exposed_comm_seconds_total"), metrics.sum("engine_step_seconds_total")),
      imbalance: metrics.rows("expert_balance").length ? 1 / Math.max(metrics.sum("expert_balance"), 1e-3) : null,
      up: metrics.sum("engine_up"),
      engines: metrics.rows("engine_up").map(({ labels }) => ({
        engine: Number(labels.engine),
        up: metrics.sum("engine_up", labels.engine) > 0,
        running: metrics.sum("engine_requests_running", labels.engine),
        waiting: metrics.sum("engine_requests_waiting", labels.engine),
        steps: metrics.sum("engine_steps_total", labels.engine),
        restarts: metrics.sum("engine_restarts_total", labels.engine),
      })),
      steps,
    };
  }
}

const PREFIX = "moeserve:";
const LINE = /^moeserve:(\w+)(?:\{(.*)\})? (\S+)$/;

/** Reads Prometheus's text format: those of our metrics that the page shows, by name without the prefix. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line.startsWith(PREFIX) || line.startsWith("moeserve:expert_rows") || line.includes("_bucket{")) continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  const rows = (name) => found.get(name) ?? [];
  const sum = (name, engine) => rows(name).reduce((all, { labels, value }) => all + (engine === undefined || labels.engine === engine ? value : 0), 0);
  return { rows, sum };
}
