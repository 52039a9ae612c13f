/** What the page says in its messages, in ComfyUI's languages that the pack knows. Errors are the nodes' own. */

const TEXTS = {
  en: {
    run_all: "Run on all GPUs (xDiT)",
    run_one: "Run on one GPU (xDiT)",
    all_done: "{count} nodes now run on all GPUs",
    one_done: "{count} nodes are again what they were",
    all_nothing: "No node to convert: this workflow has no loader that Load xDiT Model could take the place of",
    one_nothing: "No node to turn back: nothing in this workflow was converted",
    failed: "The workflow is as it was",
    left: "Left as they are:",
    more: "and {count} more; the browser's console has them all",
    undo: "Ctrl+Z undoes it in one step.",
    no_counterpart: "Load xDiT Model does not take its place",
    dtype: "weight_dtype {dtype} is not one that both loaders know",
    file: "{text}",
    promoted: "its file is chosen on the subgraph's node; open the subgraph and choose it there",
    patch: "xDiT refuses what {by} does to the model",
    no_model: "no model is connected",
    model_stays: "its model comes from {by}, which stays",
    no_model_here: "no model of this workflow runs on all GPUs",
    partner: "Load CLIP and VAE has lost the Load xDiT Model that was made with it",
    files_differ: "Load xDiT Model has another file now ({text})",
    not_converted: "it was not made by Run on all GPUs",
    unreachable: "ComfyUI did not say which files the workers can have ({text})",
  },
  zh: {
    run_all: "在全部 GPU 上运行 (xDiT)",
    run_one: "在单个 GPU 上运行 (xDiT)",
    all_done: "{count} 个节点现在使用全部 GPU 运行",
    one_done: "{count} 个节点已恢复原样",
    all_nothing: "没有可转换的节点：此工作流中没有可由“加载 xDiT 模型”替代的加载器",
    one_nothing: "没有可恢复的节点：此工作流中没有转换过的节点",
    failed: "工作流保持原样",
    left: "保持不变的节点：",
    more: "另有 {count} 个；完整列表见浏览器控制台",
    undo: "按 Ctrl+Z 可一步撤销。",
    no_counterpart: "“加载 xDiT 模型”不能替代它",
    dtype: "weight_dtype {dtype} 不是两个加载器都支持的值",
    file: "{text}",
    promoted: "它的文件在子图节点上选择；请打开子图并在其中选择",
    patch: "xDiT 不支持 {by} 对模型所做的修改",
    no_model: "没有连接模型",
    model_stays: "它的模型来自保持不变的 {by}",
    no_model_here: "此工作流中没有在全部 GPU 上运行的模型",
    partner: "与“加载 CLIP 和 VAE”一同创建的“加载 xDiT 模型”已不存在",
    files_differ: "“加载 xDiT 模型”现在使用另一个文件（{text}）",
    not_converted: "它不是由“在全部 GPU 上运行”创建的",
    unreachable: "ComfyUI 没有回答工作进程可以使用哪些文件（{text}）",
  },
};

export const LANGUAGES = TEXTS;

/** The text of a key in a language (ComfyUI's code, English where it is not known), with {names} filled in. */
export function say(language, key, values = {}) {
  return (TEXTS[language] ?? TEXTS.en)[key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}
