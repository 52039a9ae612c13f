/**
 * The frontend extension: commands that convert the open workflow, visibility of xDiT Parallel Config's widgets, settings, the sidebar panel,
 * error display and templates.
 */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { idleWidgets } from "./config.js";
import { markErrors, recheck } from "./errors.js";
import { checkOf, unknownTypes, verdictsOf } from "./check.js";
import { filesToTakeOver, toAllGpus, toOneGpu } from "./convert.js";
import { toStock } from "./stock.js";
import { registerPanel } from "./panel.js";
import { reportOf } from "./report.js";
import { listTemplates } from "./templates.js";
import { say } from "./texts.js";
import { translated, translatedNote, translatedTitle } from "./translate.js";

const ALL = "xdit.RunOnAllGpus";
const ONE = "xdit.RunOnOneGpu";
const SHOWN_MS = 12000;

let isTemplate = false;                    // whether the graph being loaded has a note of the pack's templates

const language = () => app.extensionManager.setting.get("Comfy.Locale");
const text = (key, values) => say(language(), key, values);

/** Return {type: definition} of the installed nodes, as /object_info returned them to the page. */
const definitions = () => Object.fromEntries(Object.entries(LiteGraph.registered_node_types).map(([type, { nodeData }]) => [type, nodeData]));

async function runOnAllGpus() {
  const workflow = app.rootGraph.serialize();
  const check = await checkOf(api, (await app.graphToPrompt()).output, filesToTakeOver(workflow, definitions()));
  if (check.failed) return show("error", text("failed"), [text("unreachable", { text: check.failed })]);
  const { refusals, others } = verdictsOf(workflow, check);
  const unknown = unknownTypes(workflow, (type) => type in LiteGraph.registered_node_types);
  await replace(toAllGpus(workflow, refusals, definitions()), "all_done", { absent: check.absent, missing: check.missing, unknown, others });
}

async function runOnOneGpu() {
  const back = toOneGpu(app.rootGraph.serialize());
  const plain = toStock(back.workflow, { checkpoints: listed("CheckpointLoaderSimple", "ckpt_name"), models: listed("UNETLoader", "unet_name") });
  await replace({ workflow: plain.workflow, changed: back.changed + plain.changed, left: [...back.left, ...plain.left] }, "one_done");
}

const titleOf = (type) => LiteGraph.registered_node_types[type]?.title || type;

/** Return the display name of a node that is not converted. */
function nameOf({ id, type, title, inside }) {
  const name = title || titleOf(type);
  return inside ? text("inside", { name, inside }) : `${name} (${id})`;
}

/** Return the files that one of ComfyUI's loaders lists. */
function listed(type, widget) {
  const spec = LiteGraph.registered_node_types[type]?.nodeData?.input?.required?.[widget];
  return (Array.isArray(spec?.[0]) ? spec[0] : spec?.[1]?.options) ?? [];
}

/**
 * Replace the open workflow with a converted one, as one step of its undo history, and show what each node comes to. done, found: see reportOf.
 */
async function replace(result, done, found = {}) {
  const { workflow, changed } = result;
  if (changed) {
    const open = app.extensionManager.workflow.activeWorkflow;
    const history = open.changeTracker;
    history.captureCanvasState();
    const before = history.activeState;
    history._restoringState = true;        // otherwise loading clears the history, as when a file is opened
    try {
      await app.loadGraphData(workflow, false, false, open, { silentAssetErrors: true });
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));     // slots of type * resolve their types
    } finally {
      history._restoringState = false;
      history.activeState = before;        // newer pages have taken the new workflow for the last one known
    }
    history.captureCanvasState();
  }
  const { severity, head, lines, all } = reportOf(result, done, found, { text, nameOf, titleOf, translated: (message) => translated(language(), message) });
  if (all.length) console.info("xDiT:", head, all);
  show(severity, head, lines);
}

function show(severity, summary, lines) {
  app.extensionManager.toast.add({ severity, summary, detail: lines.join("\n"), life: SHOWN_MS });
}

/**
 * Hide the widgets of xDiT Parallel Config that have no effect, except linked ones. They keep their values, also in files. Advanced ones are shown if
 * one is in use.
 */
function showRelevant(node) {
  const { required, optional } = node.constructor.nodeData.input;
  const defaults = Object.fromEntries(Object.entries({ ...required, ...optional }).map(([name, [type, options]]) => [name, options?.default]));
  const values = Object.fromEntries(node.widgets.map((widget) => [widget.name, widget.value]));
  const idle = idleWidgets(values, defaults);
  for (const widget of node.widgets) {
    const isLinked = node.inputs.some((slot) => slot.widget?.name === widget.name && slot.link != null);
    widget.hidden = widget.options.hidden = idle.includes(widget.name) && !isLinked;
    if (widget.options.advanced && !widget.hidden && (isLinked || widget.value !== defaults[widget.name])) node.showAdvanced = true;
  }
  node.setDirtyCanvas(true, true);
}

function fitToRelevant(node) {
  showRelevant(node);
  node.setSize([node.size[0], node.computeSize()[1]]);
}

app.registerExtension({
  name: "xdit",
  commands: [
    { id: ALL, label: () => text("run_all"), icon: "pi pi-th-large", function: runOnAllGpus },
    { id: ONE, label: () => text("run_one"), icon: "pi pi-stop", function: runOnOneGpu },
  ],
  keybindings: [
    { commandId: ALL, combo: { key: "g", alt: true, shift: true } },
    { commandId: ONE, combo: { key: "o", alt: true, shift: true } },
  ],
  settings: [                              // read by nodes/bridge/workers/settings.py; Chinese in locales/
    { id: "xdit.Residency", category: ["xDiT", "Workers", "Residency"], name: "Idle workers", type: "combo",
      options: [{ text: "stay loaded", value: "keep" }, { text: "move to system RAM", value: "park" }, { text: "exit", value: "release" }],
      defaultValue: "keep", sortOrder: 2,
      tooltip: "Stay loaded: models stay in VRAM. Move to system RAM: weights are offloaded to system RAM and VAEs are unloaded. Exit: all memory of the workers is freed." },
    { id: "xdit.IdleMinutes", category: ["xDiT", "Workers", "IdleMinutes"], name: "Idle after (minutes)", type: "number",
      attrs: { min: 1, max: 1440, step: 1 }, defaultValue: 10, sortOrder: 1, tooltip: "Time until idle workers move to system RAM or exit." },
    { id: "xdit.Address", category: ["xDiT", "Other machines", "Address"], name: "Address of this machine for remote workers",
      type: "text", defaultValue: "",
      tooltip: "For example 192.168.1.10. Empty: remote workers are disabled. List their devices in xDiT Parallel Config, for example cuda:0,other-pc/cuda:0. Use in private networks only: see docs/guide/several-machines.md." },
  ],
  menuCommands: [{ path: ["Edit"], commands: [ALL, ONE] }],
  setup() {
    registerPanel();
    markErrors();
    listTemplates(api, decodeURIComponent(new URL(import.meta.url).pathname.split("/").at(-2)));
  },
  nodeCreated(node) {
    if (node.comfyClass !== "XDiTParallelConfig") return;
    for (const widget of node.widgets) {
      const { callback } = widget;
      widget.callback = function (...values) {
        const result = callback?.apply(this, values);
        fitToRelevant(node);
        recheck(node);
        return result;
      };
    }
    fitToRelevant(node);                   // a node loaded from a file gets the file's size afterwards
  },
  loadedGraphNode(node) {
    if (node.comfyClass === "XDiTParallelConfig") showRelevant(node);
    const [note] = node.type === "MarkdownNote" ? node.widgets ?? [] : [];
    const translation = note && translatedNote(language(), note.value);
    if (translation) [note.value, isTemplate] = [translation, true];
  },
  afterConfigureGraph() {
    if (isTemplate) for (const node of app.rootGraph.nodes) node.title = translatedTitle(language(), node.title);
    isTemplate = false;
  },
  getCanvasMenuItems() {
    const { command } = app.extensionManager;
    return [null, { content: text("run_all"), callback: () => command.execute(ALL) },
      { content: text("run_one"), callback: () => command.execute(ONE) }];
  },
});
