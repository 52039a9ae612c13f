/** How the page lists our templates, whose titles are the names of their files. Used by xdit.js, and by tests in Node. */

const FIRST = ["Demo", "Compare"];

/** A sentence about each, in ComfyUI's languages that the pack knows. The page shows hyphens as spaces. */
export const SENTENCES = {
  en: {
    "Demo": "Draws emoji at once, with a small model that comes with the pack.",
    "Compare": "One seed on one device and on all, and their difference.",
    "Chroma": "A picture, with both prompts side by side on two GPUs.",
    "FLUX.2 klein": "A picture, with both prompts side by side on two GPUs.",
    "Flux.1": "A picture at cfg 1, whose tokens all GPUs share.",
    "Flux.1 Kontext": "A picture changed by words.",
    "Flux.1 larger than one GPU, PipeFusion": "Each GPU holds a part, through which the picture flows in pieces.",
    "HunyuanDiT": "A picture from a prompt in English or Chinese.",
    "HunyuanVideo": "A video whose tokens all GPUs share.",
    "HunyuanVideo 1.5": "A video, with both prompts side by side on two GPUs.",
    "LTX-2, video with sound": "A video and its sound, both on all GPUs.",
    "LTX-Video": "A short video out of one checkpoint.",
    "MiniMax H3, video with sound": "A video and its sound, whose tokens all GPUs share.",
    "Qwen-Image": "A picture by a model of 41 GB, spread where one GPU is too small.",
    "Qwen-Image-Edit": "A picture changed by words, by a model of 41 GB.",
    "SD 1.5": "A picture, with both prompts side by side on two GPUs.",
    "SD3.5": "A picture, with both prompts side by side on two GPUs.",
    "SD3.5, picture to picture": "Your picture drawn anew, as far as denoise says.",
    "SDXL": "A picture out of one checkpoint, each prompt on a GPU of its own.",
    "Wan 2.1, video from words": "A video from a prompt, which the GPUs also decode together.",
    "Wan 2.2, video from a picture": "A video from your picture, by two models one after the other.",
    "Wan 2.2, video from words": "A video from a prompt, by two models one after the other.",
    "Z-Image-Turbo": "A picture in eight steps, whose tokens all GPUs share.",
  },
  zh: {
    "Demo": "用随本扩展提供的小模型立即画出表情符号。",
    "Compare": "同一个种子在单个设备和全部设备上的图像，以及两者之差。",
    "Chroma": "图像：在两个 GPU 上同时运行两个提示词。",
    "FLUX.2 klein": "图像：在两个 GPU 上同时运行两个提示词。",
    "Flux.1": "cfg 为 1 的图像：由全部 GPU 分担其令牌。",
    "Flux.1 Kontext": "用文字修改图像。",
    "Flux.1 larger than one GPU, PipeFusion": "每个 GPU 持有模型的一部分，图像的各块依次流过。",
    "HunyuanDiT": "由英文或中文提示词生成图像，只需一个 checkpoint。",
    "HunyuanVideo": "视频：由全部 GPU 分担其令牌。",
    "HunyuanVideo 1.5": "视频：在两个 GPU 上同时运行两个提示词。",
    "LTX-2, video with sound": "视频及其声音，都在全部 GPU 上生成。",
    "LTX-Video": "短视频，只需一个 checkpoint。",
    "MiniMax H3, video with sound": "视频及其声音：由全部 GPU 分担其令牌。",
    "Qwen-Image": "用 41 GB 的模型生成图像，单个 GPU 放不下时分到各个 GPU。",
    "Qwen-Image-Edit": "用 41 GB 的模型按文字修改图像。",
    "SD 1.5": "图像：在两个 GPU 上同时运行两个提示词。",
    "SD3.5": "图像：在两个 GPU 上同时运行两个提示词。",
    "SD3.5, picture to picture": "按 denoise 的程度重画您的图像。",
    "SDXL": "图像：只需一个 checkpoint，两个提示词各用一个 GPU。",
    "Wan 2.1, video from words": "由提示词生成视频，解码也由各 GPU 共同完成。",
    "Wan 2.2, video from a picture": "以您的图像开始的视频，先后使用两个模型。",
    "Wan 2.2, video from words": "由提示词生成视频，先后使用两个模型。",
    "Z-Image-Turbo": "八步生成图像：由全部 GPU 分担其令牌。",
  },
};

/** Titles in the order in which they are shown: those that need no file first, then by letter. */
export function inOrder(titles) {
  const place = (title) => (FIRST.includes(title) ? FIRST.indexOf(title) : FIRST.length);
  return [...titles].sort((one, other) => place(one) - place(other) || one.localeCompare(other, "en"));
}

/**
 * Lists our templates as ComfyUI lists its own, with a sentence each, where an extension's would have their titles twice. folder: this pack's,
 * under which the server has them, in the order of the disk.
 */
export function listTemplates(api, folder) {
  const { getWorkflowTemplates, getCoreWorkflowTemplates } = api;
  let titles = null;                       // the page asks for those of extensions first
  api.getWorkflowTemplates = async function (...given) {
    const { [folder]: ours, ...others } = await getWorkflowTemplates.apply(this, given);
    titles = ours ?? [];
    return others;
  };
  api.getCoreWorkflowTemplates = async function (locale, ...given) {
    const listed = await getCoreWorkflowTemplates.call(this, locale, ...given);
    if (!titles?.length) return listed;
    const sentences = SENTENCES[locale] ?? SENTENCES.en;
    const templates = inOrder(titles).map((title) => ({ name: title, title, description: sentences[title] ?? SENTENCES.en[title] ?? "",
      mediaType: "image", mediaSubtype: "jpg" }));
    return [...listed, { moduleName: folder, title: "xDiT", templates }];
  };
}
