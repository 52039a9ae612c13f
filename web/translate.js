/** Translation of the backend's messages and of the templates' notes and node titles. */

import { ZH } from "./zh.js";
import { ZH_NOTES, ZH_TITLES } from "./zh_notes.js";

const TABLES = { zh: { ...ZH, ...ZH_NOTES } };
const TITLES = { zh: ZH_TITLES };
const MAX_DEPTH = 10;                      // of messages nested in messages
const compiled = {};                       // language -> [[expression, translation]], in order of specificity

/** Translate a message as a whole, or else sentence by sentence; text without a translation is returned unchanged. */
export function translated(language, message, depth = 0) {
  if (!(language in TABLES) || !message || depth > MAX_DEPTH) return message;
  const whole = byTable(language, message.trim(), depth);
  if (whole !== null) return whole;
  const sentences = message.split(/(?<=[.!?]) (?=[A-Z"])/);
  return sentences.length < 2 ? message : sentences.map((one) => byTable(language, one.trim(), depth) ?? one).join(" ");
}

/** Translate the note of one of the pack's templates; null for any other note, including one that the user has edited. */
export function translatedNote(language, note) {
  if (!(language in TABLES)) return null;
  const lines = note.split("\n").map((line) => (/^$|^\| [`-]/.test(line) ? line : byTable(language, line, 0)));
  return lines.includes(null) ? null : lines.join("\n");
}

/** Translate the title of a node in one of the pack's templates; other titles are returned unchanged. */
export const translatedTitle = (language, title) => TITLES[language]?.[title] ?? title;

function byTable(language, message, depth) {
  compiled[language] ??= compile(TABLES[language]);
  for (const [pattern, translation] of compiled[language]) {
    const found = pattern.exec(message);
    if (found) return translation.replace(/\{(\d+)\}/g, (_, index) => translated(language, found[Number(index) + 1], depth + 1));
  }
  return null;
}

/** Compile a table to [[expression, translation]]: patterns that begin with literal text first, then those with the most literal text. */
function compile(table) {
  const literalLength = (text) => text.replaceAll("{}", "").length;
  const isOpen = (text) => Number(text.startsWith("{}"));
  return Object.entries(table).sort(([one], [other]) => isOpen(one) - isOpen(other) || literalLength(other) - literalLength(one)).map(([text, translation]) => [
    new RegExp(`^${text.trim().split("{}").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("([\\s\\S]*?)")}$`), translation.trim()]);
}
