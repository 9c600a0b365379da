// Requests to the server that this page came from: key, errors, and streams of server-sent events.

const KEY = "moeserve.key";

/** The API key of this tab. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** A refusal of the server, with its text, or a connection that broke. status 0: there was no answer. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, id = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, id });
  }
}

/** Returns the URL of a path, which also holds behind a proxy that serves the page in a folder. */
export const url = (path) => new URL(path, document.baseURI).href;

/** Returns the response of the server. Throws ApiError unless its status is good, AbortError if `signal` says so. */
export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
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

/** Yields the JSON of each event until [DONE]. Throws ApiError if an event says so or the stream breaks off. */
export async function* events(response) {
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
        const data = frame.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue; // a comment that keeps the connection open
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, { ...event.error, id });
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Returns the shell command that sends `body` as this page did. The key stays out of it. */
export function curl(path, body) {
  const quote = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const lines = [`curl -N ${quote(url(path))}`, "-H 'Content-Type: application/json'"];
  if (apiKey.get()) lines.push('-H "Authorization: Bearer $MOESERVE_API_KEY"');
  lines.push(`-d ${quote(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}
