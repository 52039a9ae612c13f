/** Splitting of an error message into a summary and details. */

const SENTENCES = 2;

/** Return [summary, details]: the first two sentences of a message with several lines, and the rest; a one-line message has no details. */
export function headOf(message) {
  const [first, ...lines] = message.trim().split("\n");
  if (!lines.length) return [first, ""];
  const sentences = first.split(/(?<=[.!?])\s+(?=[A-Z])|(?<=[。！？])\s*(?=.)/);
  return [sentences.slice(0, SENTENCES).join(" "), [sentences.slice(SENTENCES).join(" "), ...lines].join("\n").trim()];
}
