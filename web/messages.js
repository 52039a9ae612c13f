/** Of a message of ours: what a person reads first, and what is folded below it. Used by errors.js, panel.js and tests in Node. */

const SENTENCES = 2;

/** Two sentences of a message with lines of output in it, and those; a message of one line is read as a whole. Returns [words, rest]. */
export function headOf(message) {
  const [first, ...lines] = message.trim().split("\n");
  if (!lines.length) return [first, ""];
  const sentences = first.split(/(?<=[.!?])\s+(?=[A-Z])|(?<=[。！？])\s*(?=.)/);
  return [sentences.slice(0, SENTENCES).join(" "), [sentences.slice(SENTENCES).join(" "), ...lines].join("\n").trim()];
}
