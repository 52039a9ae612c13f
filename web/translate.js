/** Words of the backend and of our templates in the page's language. Used by xdit.js, outcome.js, errors.js, panel.js, and by tests in Node. */

import { ZH } from "./zh.js";
import { ZH_NOTES, ZH_TITLES } from "./zh_notes.js";

const TABLES = { zh: { ...ZH, ...ZH_NOTES } };
const TITLES = { zh: ZH_TITLES };
const MAX_DEPTH = 10;                      // of texts within texts
const compiled = {};                       // language -> [[expression, translation]], first those that begin with words of their own, and have most

/** A message in a language: as a whole, else sentence by sentence; what has no translation stays as it is. */
export function translated(language, message, depth = 0) {
  if (!(language in TABLES) || !message || depth > MAX_DEPTH) return message;
  const whole = byTable(language, message.trim(), depth);
  if (whole !== null) return whole;
  const sentences = message.split(/(?<=[.!?]) (?=[A-Z"])/);
  return sentences.length < 2 ? message : sentences.map((one) => byTable(language, one.trim(), depth) ?? one).join(" ");
}

/** The note of a template of ours in a language; null of another note, or of one that someone has changed. */
export function translatedNote(language, note) {
  if (!(language in TABLES)) return null;
  const lines = note.split("\n").map((line) => (/^$|^\| [`-]/.test(line) ? line : byTable(language, line, 0)));
  return lines.includes(null) ? null : lines.join("\n");
}

/** The title of a node of our templates in a language; another's as it is. */
export const translatedTitle = (language, title) => TITLES[language]?.[title] ?? title;

function byTable(language, message, depth) {
  compiled[language] ??= compile(TABLES[language]);
  for (const [pattern, translation] of compiled[language]) {
    const found = pattern.exec(message);
    if (found) return translation.replace(/\{(\d+)\}/g, (_, index) => translated(language, found[Number(index) + 1], depth + 1));
  }
  return null;
}

function compile(table) {
  const words = (text) => text.replaceAll("{}", "").length;
  const isOpen = (text) => Number(text.startsWith("{}"));
  return Object.entries(table).sort(([one], [other]) => isOpen(one) - isOpen(other) || words(other) - words(one)).map(([text, translation]) => [
    new RegExp(`^${text.trim().split("{}").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("([\\s\\S]*?)")}$`), translation.trim()]);
}
