// Requests to the server that this page came from: key, errors, and streams of server-sent events.

import { tab } from "./browser-storage.js";

const KEY = "moeserve.key";

/** The API key of this tab. */
export const apiKey = {
  get: () => tab.get(KEY) ?? "",
  set: (value) => (value ? tab.set(KEY, value) : tab.remove(KEY)),
};

/** A refusal of the server, with its text. status 0: the connection broke. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, id = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, id });
  }
}

/** Returns the URL of a path, which also holds behind a proxy that serves the page in a folder. */
export const url = (path) => new URL(path, document.baseURI).href;

/**
 * Returns the response of the server.
 *
 * Throws ApiError unless its status is good, AbortError if `signal` says so.
 */
export async function request(path, { method = "GET", body, signal, headers = {} } = {}) {
  headers = { ...headers };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(url(path), { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached");
  }
  if (response.ok) return response;
  if (response.status === 401) dispatchEvent(new CustomEvent("key-needed"));
  throw await refusal(response);
}

async function refusal(response) {
  const id = response.headers.get("X-Request-Id");
  const text = await response.text().catch(() => "");
  try {
    const { message, code, param } = JSON.parse(text).error;
    return new ApiError(message, { status: response.status, code, param, id });
  } catch {
    return new ApiError(`${response.status} ${response.statusText} ${text.slice(0, 300)}`.trim(), { status: response.status, id });
  }
}

/**
 * Yields the JSON of each event until [DONE]; `onId` gets the ids of events.
 *
 * Throws ApiError if an event says so or the stream breaks off.
 */
export async function* events(response, onId = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const id = response.headers.get("X-Request-Id");
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) throw new ApiError("the connection ended before the answer did", { id });
      const frames = (buffer + value).split("\n\n");
      buffer = frames.pop();
      for (const frame of frames) {
        const data = field(frame, "data");
        if (data === "[DONE]") return;
        if (!data) continue; // a comment that keeps the connection open
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, { ...event.error, id });
        yield event;
        if (field(frame, "id")) onId(field(frame, "id"));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function field(frame, name) {
  const lines = frame.split("\n").filter((line) => line.startsWith(`${name}:`));
  return lines.map((line) => line.slice(name.length + 1).trim()).join("\n");
}

/** Returns the shell command that sends `body` as this page did. The key stays out of it. */
export function curl(path, body) {
  const quote = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const lines = [`curl -N ${quote(url(path))}`, "-H 'Content-Type: application/json'"];
  if (apiKey.get()) lines.push('-H "Authorization: Bearer $MOESERVE_API_KEY"');
  lines.push(`-d ${quote(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}
