// One answer while it comes: the stream is added to its message, and the message is stored.

import { ApiError, events, request } from "../api.js";

const PATH = "v1/chat/completions";
const SAVE_MS = 500; // what a reload may lose
const MAX_TRIES = 6; // to resume a stream after its connection broke
const CUT = ["length", "abort", "error"]; // reasons for which an answer ends before its end

/** Fires "change" when the message has grown, "end" when it is complete. */
export class Answer extends EventTarget {
  #controller = new AbortController();
  #saving = null;

  /** `body`: the request. `save`: stores the message. */
  constructor(message, { body, save }) {
    super();
    this.message = message;
    this.body = body;
    this.save = save;
  }

  /** Asks for the answer, or for the rest of one that has an event id. */
  async run() {
    const { message } = this;
    try {
      await this.#receive();
    } catch (error) {
      if (error.name === "AbortError") message.stopped = true;
      else if (error instanceof ApiError) message.error = { ...error, message: error.message };
      else message.error = { message: String(error) };
    }
    if (message.resumed && message.error && [400, 404].includes(message.error.status)) {
      message.error = undefined; // the server does not have the rest any more
      message.interrupted = true;
    }
    endAnswer(message);
    clearTimeout(this.#saving);
    this.dispatchEvent(new Event("end"));
    await this.save(message);
  }

  /** Ends the answer here. A server that would go on for a while without a reader is told. */
  stop() {
    this.#controller.abort();
    const { eventId, requestId } = this.message;
    if (!eventId || !requestId) return;
    request(`v1/requests/${requestId}`, { method: "DELETE" }).catch(() => {}); // it has ended then
  }

  #flush() {
    this.#saving = null;
    return this.save(this.message, { silent: true });
  }

  async #receive() {
    const { message } = this;
    for (let tries = 1; ; tries += 1) {
      const known = message.eventId;
      try {
        return await this.#stream();
      } catch (error) {
        if (message.eventId !== known) tries = 1;
        if (!message.eventId || error.status !== 0 || tries === MAX_TRIES) throw error;
        message.resumed = true;
        await this.#pause(250 * 2 ** tries);
      }
    }
  }

  async #stream() {
    const { message } = this;
    const headers = message.eventId ? { "Last-Event-ID": message.eventId } : {};
    const { signal } = this.#controller;
    const response = await request(PATH, { method: "POST", body: this.body, signal, headers });
    message.requestId = response.headers.get("X-Request-Id");
    const onId = (id) => { message.eventId = id; };
    for await (const chunk of events(response, onId)) {
      addChunk(message, chunk);
      this.#saving ??= setTimeout(() => this.#flush(), SAVE_MS);
      this.dispatchEvent(new CustomEvent("change", { detail: chunk }));
    }
  }

  #pause(ms) {
    return new Promise((resolve, reject) => {
      const stop = () => reject(new DOMException("stopped", "AbortError"));
      this.#controller.signal.addEventListener("abort", stop, { once: true });
      setTimeout(resolve, ms);
    });
  }
}

/** Marks an answer as ended. */
export function endAnswer(message) {
  message.ended = true;
  message.endedAt = Date.now();
  message.cut = !message.finish || CUT.includes(message.finish);
}

/** Adds a chunk of the stream to the message. */
function addChunk(message, chunk) {
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices.find((each) => !each.index); // one answer is shown, whatever n is
  if (!choice) return;
  const delta = choice.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning || delta.content || delta.tool_calls) message.firstAt ??= Date.now();
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  if (delta.content || delta.tool_calls) message.answeredAt ??= Date.now();
  if (delta.content) message.content += delta.content;
  for (const part of delta.tool_calls ?? []) addCall(message, part);
  if (choice.logprobs?.content) (message.tokens ??= []).push(...choice.logprobs.content);
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function addCall(message, part) {
  const calls = (message.tool_calls ??= []);
  const empty = { id: "", type: "function", function: { name: "", arguments: "" } };
  const call = (calls[part.index ?? calls.length] ??= empty);
  call.id ||= part.id ?? "";
  call.function.name += part.function?.name ?? "";
  call.function.arguments += part.function?.arguments ?? "";
}
