// The figures below an answer: tokens, times and how it ended.

const ENDS = { stop: "complete", length: "cut at the limit", tool_calls: "calls tools" };

/** Returns a time in words. */
export function seconds(ms) {
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 60_000) return `${Math.round(ms / 1000)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
}

/** Returns how fast an answer comes that has not ended. */
export function speed(message) {
  return [tokens(message), rate(message, Date.now())].filter(Boolean).join(" · ");
}

/** Returns what is known of an answer that has ended. */
export function outcome(message) {
  const { usage, firstAt, beganAt, endedAt, resumed } = message;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return [
    usage && `${usage.prompt_tokens} + ${tokens(message)}`,
    cached && `${cached} cached`,
    drafts(usage?.completion_tokens_details),
    firstAt && beganAt && !resumed && `first after ${firstAt - beganAt} ms`,
    rate(message, endedAt),
    end(message),
  ].filter(Boolean).join(" · ");
}

const tokens = ({ usage }) => usage && `${usage.completion_tokens} tokens`;

/** What came in one piece, such as a call of a tool, has no rate; nor has what was resumed. */
function rate({ usage, firstAt, resumed }, now) {
  const count = usage?.completion_tokens ?? 0;
  if (count < 2 || !firstAt || now - firstAt < 5 || resumed) return "";
  return `${((1000 * (count - 1)) / (now - firstAt)).toFixed(0)} tokens/s`;
}

function drafts(details) {
  if (!details?.accepted_prediction_tokens) return "";
  const { accepted_prediction_tokens: right, rejected_prediction_tokens: wrong } = details;
  return `${right} of ${right + wrong} drafts right`;
}

function end({ edited, stopped, interrupted, finish }) {
  if (edited) return "edited by you";
  if (stopped) return "stopped by you";
  if (interrupted) return "interrupted";
  return ENDS[finish] ?? finish;
}
