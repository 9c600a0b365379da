// The request that an answer came from, built again from the messages before it.

/** Returns the body of the request. `history`: the messages before the answer. */
export function requestBody(history, { fields, prefix }) {
  const { model, system, ...rest } = fields;
  const messages = history.filter(isSendable).map(asMessage);
  if (system) messages.unshift({ role: "system", content: system });
  if (prefix) messages.push({ role: "assistant", content: prefix });
  return {
    ...(model ? { model } : {}),
    messages,
    ...rest,
    ...(prefix ? { continue_final_message: true, add_generation_prompt: false } : {}),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

/** Returns the calls of an answer; undefined if it was cut off, since the last one is not whole. */
const callsOf = (message) => (message.cut ? undefined : message.tool_calls);

const isSendable = (message) => (
  message.role !== "assistant" || message.content || callsOf(message));

/** Returns a message as the API takes it. */
function asMessage(message) {
  const { role, content } = message;
  if (role === "user") return { role, content };
  if (role === "tool") return { role, tool_call_id: message.tool_call_id, content };
  const calls = callsOf(message);
  return {
    role,
    content: calls ? content || null : content,
    ...(calls ? { tool_calls: calls } : {}),
    ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
  };
}
