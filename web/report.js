/** Report of a conversion: the toast's heading and lines, with each node once. A pure function. */

const NOTHING = { all_done: "all_nothing", one_done: "one_nothing" };
const WORKS = ["as_it_is", "placed"];       // reasons of nodes that stay and work
const MAX_LINES = 6;                       // of nodes that are not converted, with reasons
const MAX_NAMES = 6;                       // of nodes in one line

/**
 * Return {severity, head, lines, all} for the result of a conversion. severity: "success" only if ComfyUI can run the workflow as it is now.
 * lines: what the toast shows; all: every line, for the console.
 *
 * done: "all_done" or "one_done". absent: files that are not here and were to be checked. missing: other models that are not. unknown: node types that this ComfyUI lacks. others: nodes around
 * the model by verdict ("unchanged", "no_effect"). text(key, values), nameOf(node), titleOf(type) and translated(message) return texts.
 */
export function reportOf({ changed, left, already, stay = [], dropped = [] }, done, { absent = [], missing = [], unknown = [], others = {} }, { text, nameOf, titleOf, translated }) {
  const byOf = ({ by }) => (by && typeof by === "object" ? nameOf(by) : by && titleOf(by));
  const line = (node) => `${nameOf(node)}: ${text(node.reason, { ...node, by: byOf(node), text: translated(node.text) })}`;
  const works = [...(changed ? others.unchanged ?? [] : []), ...stay.filter(({ reason }) => WORKS.includes(reason))].map(nameOf);
  const idle = changed ? (others.no_effect ?? []).map(nameOf) : [];
  const reasons = unique([...left, ...(others.refused ?? []), ...(changed ? stay.filter(({ reason }) => !WORKS.includes(reason)) : [])].map(line));
  const cause = changed ? undefined : reasons.shift();         // the reason that nothing was converted comes first
  const files = changed && absent.length ? text(absent.length === 1 ? "not_here_1" : "not_here", { files: absent.join(", ") }) : "";
  const count = changed ? text(changed === 1 ? `${done}_1` : done, { count: changed }) + files : "";
  const lacks = [...(unknown.length ? [text("unknown_types", { types: unknown.join(", ") })] : []),
    ...(changed && missing.length ? [text("missing_files", { files: missing.join(", ") })] : [])];
  const idleSettings = changed ? unique(dropped.map(line)) : [];
  const groups = (limit) => [
    ...idleSettings.slice(0, limit),
    ...(works.length ? [text("works_unchanged", { names: listed(unique(works), limit, text) })] : []),
    ...(idle.length ? [text("changes_nothing", { names: listed(unique(idle), limit, text) })] : []),
    ...(reasons.length ? [text("left"), ...reasons.slice(0, limit),
      ...(reasons.length > limit ? [text("more", { count: reasons.length - limit })] : [])] : [])];
  return {
    severity: changed ? (absent.length || missing.length || unknown.length || others.refused?.length ? "warn" : "success") : already && !cause ? "info" : "warn",
    head: cause ?? (changed ? count : text(already ? "all_already" : NOTHING[done])),
    lines: [...lacks, ...groups(MAX_LINES), ...(changed ? [text("undo")] : [])], all: [...lacks, ...groups(Infinity)],
  };
}

const unique = (values) => [...new Set(values)];
const listed = (names, limit, text) => (names.length > limit ? [...names.slice(0, Math.min(limit, MAX_NAMES)),
  text("more_names", { count: names.length - Math.min(limit, MAX_NAMES) })] : names).join(", ");
