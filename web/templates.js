/** Listing of the pack's templates in the template browser. Their titles are their file names. */

const FIRST = ["Demo", "Compare"];

/** Descriptions in the supported ComfyUI languages, keyed by title. The page shows hyphens as spaces. */
export const DESCRIPTIONS = {
  en: {
    "Demo": "Generates emoji right away, with a small bundled model.",
    "Compare": "One seed on a single device and on all, and the difference.",
    "Chroma": "Text to image, with both prompts side by side on two GPUs.",
    "FLUX.2 klein": "Text to image, with both prompts side by side on two GPUs.",
    "Flux.1": "Text to image at cfg 1, with the tokens split across all GPUs.",
    "Flux.1 Kontext": "Edits an image according to a prompt.",
    "Flux.1 larger than one GPU, PipeFusion": "Each GPU has some of the blocks; image patches flow through.",
    "HunyuanDiT": "Text to image from a prompt in English or Chinese.",
    "HunyuanVideo": "Text to video, with the tokens split across all GPUs.",
    "HunyuanVideo 1.5": "Text to video, with both prompts side by side on two GPUs.",
    "LTX-2, video with audio": "Text to video with audio, both on all GPUs.",
    "LTX-Video": "A short video from a single checkpoint.",
    "MiniMax H3, video with audio": "Text to video with audio, tokens split across all GPUs.",
    "Qwen-Image": "Text to image with a 41 GB model, split if it exceeds one GPU.",
    "Qwen-Image-Edit": "Edits an image according to a prompt, with a 41 GB model.",
    "SD 1.5": "Text to image, with both prompts side by side on two GPUs.",
    "SD3.5": "Text to image, with both prompts side by side on two GPUs.",
    "SD3.5, image to image": "Image to image; denoise sets how much of your image changes.",
    "SDXL": "Text to image from one checkpoint, each prompt on its own GPU.",
    "Wan 2.1, text to video": "Text to video, decoded on all GPUs as well.",
    "Wan 2.2, image to video": "Image to video with two models, one after the other.",
    "Wan 2.2, text to video": "Text to video with two models, one after the other.",
    "Z-Image-Turbo": "Text to image in eight steps, tokens split across all GPUs.",
  },
  zh: {
    "Demo": "用随附的小模型立即生成表情符号。",
    "Compare": "同一个种子在单个设备和全部设备上的图像，以及两者之差。",
    "Chroma": "文生图：两个提示词在两个 GPU 上同时运行。",
    "FLUX.2 klein": "文生图：两个提示词在两个 GPU 上同时运行。",
    "Flux.1": "cfg 为 1 的文生图：token 由全部 GPU 分担。",
    "Flux.1 Kontext": "按提示词编辑图像。",
    "Flux.1 larger than one GPU, PipeFusion": "每个 GPU 有一部分块，图像的各个 patch 依次流过。",
    "HunyuanDiT": "由英文或中文提示词生成图像，只需一个 checkpoint。",
    "HunyuanVideo": "文生视频：token 由全部 GPU 分担。",
    "HunyuanVideo 1.5": "文生视频：两个提示词在两个 GPU 上同时运行。",
    "LTX-2, video with audio": "文生视频和音频，都在全部 GPU 上生成。",
    "LTX-Video": "短视频，只需一个 checkpoint。",
    "MiniMax H3, video with audio": "文生视频和音频：token 由全部 GPU 分担。",
    "Qwen-Image": "用 41 GB 的模型文生图，单个 GPU 放不下时分到各 GPU。",
    "Qwen-Image-Edit": "用 41 GB 的模型按提示词编辑图像。",
    "SD 1.5": "文生图：两个提示词在两个 GPU 上同时运行。",
    "SD3.5": "文生图：两个提示词在两个 GPU 上同时运行。",
    "SD3.5, image to image": "图生图：denoise 设定图像改变的程度。",
    "SDXL": "文生图：只需一个 checkpoint，两个提示词各用一个 GPU。",
    "Wan 2.1, text to video": "文生视频，解码也在全部 GPU 上进行。",
    "Wan 2.2, image to video": "图生视频，先后使用两个模型。",
    "Wan 2.2, text to video": "文生视频，先后使用两个模型。",
    "Z-Image-Turbo": "八步文生图：token 由全部 GPU 分担。",
  },
};

/** Sort titles for display: those that need no download first, then alphabetically. */
export function inOrder(titles) {
  const place = (title) => (FIRST.includes(title) ? FIRST.indexOf(title) : FIRST.length);
  return [...titles].sort((one, other) => place(one) - place(other) || one.localeCompare(other, "en"));
}

/**
 * List the templates as ComfyUI lists its own, with a description each; for those of extensions, it would show the title twice. folder: the
 * pack's folder name, under which the server lists the templates, in the order of the file system.
 */
export function listTemplates(api, folder) {
  const { getWorkflowTemplates, getCoreWorkflowTemplates } = api;
  let titles = null;                       // the page requests those of extensions first
  api.getWorkflowTemplates = async function (...args) {
    const { [folder]: ours, ...others } = await getWorkflowTemplates.apply(this, args);
    titles = ours ?? [];
    return others;
  };
  api.getCoreWorkflowTemplates = async function (locale, ...args) {
    const listed = await getCoreWorkflowTemplates.call(this, locale, ...args);
    if (!titles?.length) return listed;
    const descriptions = DESCRIPTIONS[locale] ?? DESCRIPTIONS.en;
    const templates = inOrder(titles).map((title) => ({ name: title, title, description: descriptions[title] ?? DESCRIPTIONS.en[title] ?? "",
      mediaType: "image", mediaSubtype: "jpg" }));
    return [...listed, { moduleName: folder, title: "xDiT", templates }];
  };
}
