/** The notes of our templates in Chinese, line by line. As zh.js; used by translate.js. */

export const ZH_NOTES = {
  "### {} on all your GPUs":
    "### 在全部 GPU 上运行 {0}",
  "### {} on all your GPUs: video and sound":
    "### 在全部 GPU 上运行 {0}：视频和声音",
  "### A picture from a picture, on all your GPUs":
    "### 在全部 GPU 上由图像生成图像",
  "### {}: a picture changed by words":
    "### {0}：用文字修改图像",
  "### {} image to video on all your GPUs":
    "### 在全部 GPU 上运行 {0}：图像生成视频",
  "### {} text to video on all your GPUs":
    "### 在全部 GPU 上运行 {0}：文本生成视频",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side, which gives exactly the picture of one GPU.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行，得到的图像与单个 GPU 完全相同。",
  "The same workflow runs on one GPU.":
    "同一工作流也可在单个 GPU 上运行。",
  "**Files**":
    "**文件**",
  "| file | folder |":
    "| 文件 | 文件夹 |",
  "On Hugging Face: `lodestones/Chroma1-HD` has the model, `comfyanonymous/flux_text_encoders` the text encoder, `Comfy-Org/Lumina_Image_2.0_Repackaged` the VAE.":
    "在 Hugging Face 上：`lodestones/Chroma1-HD` 有模型，`comfyanonymous/flux_text_encoders` 有文本编码器，`Comfy-Org/Lumina_Image_2.0_Repackaged` 有 VAE。",
  "To halve the memory, choose `fp8_e4m3fn` as `weight_dtype`.":
    "要使显存占用减半，请把 `weight_dtype` 设为 `fp8_e4m3fn`。",
  "### Is it the same picture?":
    "### 图像相同吗？",
  "One seed, drawn by **Parallel Sampler** on all your devices and by ComfyUI's own **KSampler** on one. The third picture is their difference: black where they are equal.":
    "同一个种子，由**并行采样器**在您的全部设备上画一次，由 ComfyUI 自己的**K采样器** 在一个设备上画一次。第三张图像是两者之差：相同处为黑色。",
  "With CFG, data, Ulysses and Ring parallelism it is black but for rounding. **PipeFusion** and **DistriFusion** work with what was known a step before, and change the picture a little: set `mode` of **xDiT Parallel Config** to `manual`, and `pipefusion_degree` to the number of your devices, to see how much. More `warmup_steps` bring it closer.":
    "使用 CFG、数据、Ulysses 和 Ring 并行时，除舍入外为全黑。**PipeFusion** 和 **DistriFusion** 使用上一步的数据，会使图像略有变化：把 **xDiT 并行配置**的 `mode` 设为 `manual`，并把 `pipefusion_degree` 设为设备数，即可看到差多少。增加 `warmup_steps` 会更接近。",
  "`cpu,cpu` as `devices` tries two devices where there is one.":
    "只有一个设备时，可把 `devices` 设为 `cpu,cpu` 来试用两个设备。",
  "The model comes with the pack. Compare your own in the same way: the same file in both loaders.":
    "模型随本扩展提供。您自己的模型也可以这样比较：在两个加载器中使用同一个文件。",
  "### A picture at once, with no download":
    "### 无需下载，立即得到图像",
  "`xdit_demo.safetensors` and `xdit_demo_vae.safetensors` come with the pack. The model is small and draws emoji: one face, person, animal or thing, 128 x 128 pixels.":
    "`xdit_demo.safetensors` 和 `xdit_demo_vae.safetensors` 随本扩展提供。模型很小，画表情符号：一张脸、一个人、动物或物体，128 x 128 像素。",
  "Type a prompt into **Demo Prompt**, such as `woman astronaut on a purple background`. At most 24 words; backgrounds: white, black, gray, red, orange, yellow, green, blue, purple, pink, brown, cyan.":
    "在**演示提示词**中输入英文提示词，例如 `woman astronaut on a purple background`。最多 24 个词；背景可为 white、black、gray、red、orange、yellow、green、blue、purple、pink、brown、cyan。",
  "Without a GPU two CPU workers share the work.":
    "没有 GPU 时由两个 CPU 工作进程分担工作。",
  "It is here to try the nodes and their settings with. It is far too small for two GPUs to be faster than one: use your own models for that.":
    "它用于试用节点及其设置。模型太小，两个 GPU 不会比一个快：请用您自己的模型比较速度。",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side, which gives exactly the picture of one GPU. ComfyUI's own SamplerCustomAdvanced samples here: it runs our MODEL on all GPUs as well.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行，得到的图像与单个 GPU 完全相同。这里由 ComfyUI 自己的 SamplerCustomAdvanced 采样：它也在全部 GPU 上运行我们的 MODEL。",
  "On Hugging Face: `Comfy-Org/flux2-klein` has the model and the text encoder, `Comfy-Org/flux2-dev` the VAE.":
    "在 Hugging Face 上：`Comfy-Org/flux2-klein` 有模型和文本编码器，`Comfy-Org/flux2-dev` 有 VAE。",
  "For FLUX.2 dev take its model and text encoder (`mistral_3_small_flux2_bf16.safetensors`), **FluxGuidance** 4 on the prompt, and **BasicGuider** in place of CFGGuider: its GPUs share the picture's tokens.":
    "要使用 FLUX.2 dev，请用它的模型和文本编码器（`mistral_3_small_flux2_bf16.safetensors`），在提示词上加值为 4 的 **FluxGuidance**，并用 **BasicGuider** 代替 CFGGuider：各 GPU 分担图像的令牌。",
  "**Load Image** takes your picture; the prompt says what to change. Its tokens stand beside those of the new picture, and **xDiT Parallel Config** has all CUDA devices share both.":
    "**加载图像**读取您的图像；提示词说明要改什么。它的令牌与新图像的令牌并列，**xDiT 并行配置**让所有 CUDA 设备分担两者。",
  "On Hugging Face: `black-forest-labs/FLUX.1-Kontext-dev` has the model, `comfyanonymous/flux_text_encoders` the text encoders, `Comfy-Org/Lumina_Image_2.0_Repackaged` the VAE.":
    "在 Hugging Face 上：`black-forest-labs/FLUX.1-Kontext-dev` 有模型，`comfyanonymous/flux_text_encoders` 有文本编码器，`Comfy-Org/Lumina_Image_2.0_Repackaged` 有 VAE。",
  "For several pictures chain **Set Reference Latent** nodes.":
    "要使用几张图像，请串联几个 **Set Reference Latent** 节点。",
  "### Flux.1 dev where one GPU is too small":
    "### 单个 GPU 放不下时的 Flux.1 dev",
  "**xDiT Parallel Config** names two GPUs and PipeFusion: each GPU holds a part of the model's blocks, and pieces of the picture flow through them one after the other.":
    "**xDiT 并行配置**写明两个 GPU 和 PipeFusion：每个 GPU 持有模型的一部分块，图像的各块依次流过它们。",
  "After the first step (`warmup_steps`) a piece sees the others as they were a step before, so the picture differs a little from that of one GPU. `num_patches` 1 gives the exact one, more slowly.":
    "第一步（`warmup_steps`）之后，每一块看到的其他块是上一步的，因此图像与单个 GPU 的略有不同。`num_patches` 设为 1 得到完全相同的图像，但较慢。",
  "For unlike GPUs, write how many of the 57 blocks each gets into `stage_blocks`, for example `20,37`. Other GPUs: change `devices` and `pipefusion_degree`.":
    "GPU 不同时，在 `stage_blocks` 中写明 57 个块中每个 GPU 有多少，例如 `20,37`。使用其他 GPU：更改 `devices` 和 `pipefusion_degree`。",
  "On Hugging Face: `Comfy-Org/flux1-dev` has the model, `comfyanonymous/flux_text_encoders` the text encoders, `Comfy-Org/Lumina_Image_2.0_Repackaged` the VAE.":
    "在 Hugging Face 上：`Comfy-Org/flux1-dev` 有模型，`comfyanonymous/flux_text_encoders` 有文本编码器，`Comfy-Org/Lumina_Image_2.0_Repackaged` 有 VAE。",
  "**xDiT Parallel Config** takes every CUDA device there is. Flux runs at cfg 1.0, so the GPUs share each step's image tokens (Ulysses).":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。Flux 在 cfg 1.0 下运行，因此各 GPU 分担每一步的图像令牌（Ulysses）。",
  "For Flux.1 schnell pick `flux1-schnell.safetensors` and set steps to 4.":
    "要使用 Flux.1 schnell，请选择 `flux1-schnell.safetensors`，并把步数设为 4。",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side, with more it also shares out the tokens: exactly the picture of one GPU.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；更多 GPU 还分担令牌：图像与单个 GPU 完全相同。",
  "**Load xDiT Model** takes the diffusion model out of the checkpoint, **Load CLIP and VAE** the two text encoders and the VAE. Prompts may be in English or Chinese.":
    "**加载 xDiT 模型**从 checkpoint 中读取扩散模型，**加载 CLIP 和 VAE** 读取两个文本编码器和 VAE。提示词可用英文或中文。",
  "On Hugging Face it is in `{}`.":
    "在 Hugging Face 上，它在 `{0}` 中。",
  "On Hugging Face, all of them are in `{}`.":
    "在 Hugging Face 上，全部在 `{0}` 中。",
  "**xDiT Parallel Config** takes every CUDA device there is: they share the tokens of text, sound and video. The video is exactly that of one GPU, unless the weights need more than one: then each GPU has some of the blocks, or the rest comes from host memory, as the node says.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备：它们分担文本、声音和视频的令牌。视频与单个 GPU 的完全相同，除非权重需要不止一个 GPU：这时每个 GPU 持有一部分块，或者其余部分来自主机内存，节点会说明。",
  "**Distributed VAE Decode** shares out the tiles that the video's VAE works on. ComfyUI's own nodes load the text encoder and both VAEs, and decode the sound.":
    "**分布式 VAE 解码** 分担视频的 VAE 所处理的分块。ComfyUI 自带的节点加载文本编码器和两个 VAE，并解码声音。",
  "On Hugging Face: `Comfy-Org/MiniMax-H3` has all of them.":
    "在 Hugging Face 上：`Comfy-Org/MiniMax-H3` 有全部文件。",
  "To begin or end with a picture, connect `first_frame` or `last_frame`. For references of pictures, videos and sounds use MiniMax H3 Reference to Video with the `ref2va` file.":
    "要以图像开始或结束，请连接 `first_frame` 或 `last_frame`。要参考图像、视频和声音，请使用 MiniMax H3 Reference to Video 和 `ref2va` 文件。",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side; with more they share the frames' tokens. The video is exactly that of one GPU.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；更多 GPU 分担各帧的令牌。视频与单个 GPU 的完全相同。",
  "A length is 4 n + 1 frames.":
    "长度为 4 n + 1 帧。",
  "**xDiT Parallel Config** takes every CUDA device there is. They share the frames' tokens, and the video is exactly that of one GPU; where the model (26 GB) does not fit on one, each holds a part of it. The VAE decodes in parts on all of them.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。它们分担各帧的令牌，视频与单个 GPU 的完全相同；模型（26 GB）放不进一个 GPU 时，每个 GPU 持有其中一部分。VAE 在全部 GPU 上分部分解码。",
  "On Hugging Face: `comfyanonymous/flux_text_encoders` has `clip_l`, `Comfy-Org/HunyuanVideo_repackaged` the others.":
    "在 Hugging Face 上：`comfyanonymous/flux_text_encoders` 有 `clip_l`，`Comfy-Org/HunyuanVideo_repackaged` 有其余文件。",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side; with more they share the tokens of video and sound. The video is exactly that of one GPU, unless the weights need more than one: then each GPU has some of the blocks.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；更多 GPU 分担视频和声音的令牌。视频与单个 GPU 的完全相同，除非权重需要不止一个 GPU：这时每个 GPU 持有一部分块。",
  "**Load xDiT Model** takes the diffusion model out of the checkpoint, **Load CLIP and VAE** the VAE; ComfyUI's own nodes load the text encoder and the VAE of the sound, and put video and sound together.":
    "**加载 xDiT 模型**从 checkpoint 中读取扩散模型，**加载 CLIP 和 VAE** 读取 VAE；ComfyUI 自己的节点加载文本编码器和声音的 VAE，并把视频和声音合在一起。",
  "On Hugging Face: `Lightricks/LTX-2` has the checkpoint, `Comfy-Org/ltx-2` the text encoder.":
    "在 Hugging Face 上：`Lightricks/LTX-2` 有 checkpoint，`Comfy-Org/ltx-2` 有文本编码器。",
  "A length is 8 n + 1 frames, and the same in both empty latents. The frame rate stands in three nodes: LTXVConditioning, LTXV Empty Latent Audio and Create Video.":
    "长度为 8 n + 1 帧，两个空 latent 中相同。帧率写在三个节点中：LTXVConditioning、LTXV Empty Latent Audio 和 Create Video。",
  "Where memory is short, set `weight_dtype` to fp8_e4m3fn.":
    "显存不足时，请把 `weight_dtype` 设为 fp8_e4m3fn。",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side; with more they share the frames' tokens. The video is exactly that of one GPU. ComfyUI's own SamplerCustom samples here: it runs our MODEL on all GPUs as well.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；更多 GPU 分担各帧的令牌。视频与单个 GPU 的完全相同。这里由 ComfyUI 自己的 SamplerCustom 采样：它也在全部 GPU 上运行我们的 MODEL。",
  "**Load xDiT Model** takes the diffusion model out of the checkpoint, **Load CLIP and VAE** the VAE.":
    "**加载 xDiT 模型**从 checkpoint 中读取扩散模型，**加载 CLIP 和 VAE** 读取 VAE。",
  "On Hugging Face: `Lightricks/LTX-Video` has the checkpoint, `comfyanonymous/flux_text_encoders` the text encoder.":
    "在 Hugging Face 上：`Lightricks/LTX-Video` 有 checkpoint，`comfyanonymous/flux_text_encoders` 有文本编码器。",
  "A length is 8 n + 1 frames.":
    "长度为 8 n + 1 帧。",
  "**Load Image** takes your picture; the prompt says what to change. With two GPUs it runs the positive and the negative prompt side by side; where the model (41 GB) does not fit on one GPU, each holds a part of it.":
    "**加载图像**读取您的图像；提示词说明要改什么。有两个 GPU 时，正向和负向提示词同时运行；模型（41 GB）放不进一个 GPU 时，每个 GPU 持有其中一部分。",
  "On Hugging Face: `Comfy-Org/Qwen-Image-Edit_ComfyUI` has the model, `Comfy-Org/Qwen-Image_ComfyUI` the others.":
    "在 Hugging Face 上：`Comfy-Org/Qwen-Image-Edit_ComfyUI` 有模型，`Comfy-Org/Qwen-Image_ComfyUI` 有其余文件。",
  "For several pictures connect `image2` and `image3` of both prompts. To halve the memory, choose `fp8_e4m3fn` as `weight_dtype`.":
    "要使用几张图像，请连接两个提示词的 `image2` 和 `image3`。要使显存占用减半，请把 `weight_dtype` 设为 `fp8_e4m3fn`。",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side; where the model (41 GB) does not fit on one GPU, each holds a part of it.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；模型（41 GB）放不进一个 GPU 时，每个 GPU 持有其中一部分。",
  "**Load xDiT Model** takes the diffusion model out of the checkpoint, **Load CLIP and VAE** the rest.":
    "**加载 xDiT 模型**从 checkpoint 中读取扩散模型，**加载 CLIP 和 VAE** 读取其余部分。",
  "More GPUs help with a batch of several pictures.":
    "更多 GPU 有助于多张图像的批次。",
  "**Load Image** takes your picture; its sides should be multiples of 16. **Distributed VAE Encode** turns it into a latent, and `denoise` of **Parallel Sampler** says how much of it may change.":
    "**加载图像**读取您的图像；其边长应为 16 的倍数。**分布式 VAE 编码**把它变为 latent，**并行采样器**的 `denoise` 说明可以改变多少。",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行。",
  "On Hugging Face, all of them are in `stabilityai/stable-diffusion-3.5-medium`: the text encoders in `text_encoders/`, the VAE as `vae/diffusion_pytorch_model.safetensors` (rename it).":
    "在 Hugging Face 上，全部在 `stabilityai/stable-diffusion-3.5-medium` 中：文本编码器在 `text_encoders/` 中，VAE 为 `vae/diffusion_pytorch_model.safetensors`（请改名）。",
  "With four GPUs set `mode` to manual, `cfg_degree` 2 and `displaced_degree` 2: DistriFusion shares out the rows of one picture, which changes it a little. More GPUs also help with a batch of several pictures.":
    "有四个 GPU 时，把 `mode` 设为 manual，`cfg_degree` 设为 2，`displaced_degree` 设为 2：DistriFusion 分担一张图像的各行，图像会略有变化。更多 GPU 也有助于多张图像的批次。",
  "**xDiT Parallel Config** takes every CUDA device there is. With two GPUs it runs the positive and the negative prompt side by side; with more they share the frames' tokens. The video is exactly that of one GPU, and the VAE decodes it in parts on all of them.":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行；更多 GPU 分担各帧的令牌。视频与单个 GPU 的完全相同，VAE 在全部 GPU 上分部分解码。",
  "The 14B model is `wan2.1_t2v_14B_fp16.safetensors`: where it does not fit on one GPU, each holds a part of it. A length is 4 n + 1 frames.":
    "14B 模型是 `wan2.1_t2v_14B_fp16.safetensors`：放不进一个 GPU 时，每个 GPU 持有其中一部分。长度为 4 n + 1 帧。",
  "**xDiT Parallel Config** takes every CUDA device there is, for both models. With two GPUs it runs the positive and the negative prompt side by side. Both models stay loaded where they fit; else the second takes the place of the first at step 10, and comes from host memory the next time.":
    "**xDiT 并行配置**为两个模型使用现有的每个 CUDA 设备。有两个 GPU 时，正向和负向提示词同时运行。放得下时两个模型都保持加载；否则第二个在第 10 步取代第一个，下次再从主机内存取回。",
  "On Hugging Face: `Comfy-Org/Wan_2.1_ComfyUI_repackaged` has the text encoder, `Comfy-Org/Wan_2.2_ComfyUI_Repackaged` the others.":
    "在 Hugging Face 上：`Comfy-Org/Wan_2.1_ComfyUI_repackaged` 有文本编码器，`Comfy-Org/Wan_2.2_ComfyUI_Repackaged` 有其余文件。",
  "ComfyUI's own KSampler (Advanced) samples here: it runs our MODEL on all GPUs as well.":
    "这里由 ComfyUI 自己的K采样器（高级） 采样：它也在全部 GPU 上运行我们的 MODEL。",
  "**xDiT Parallel Config** takes every CUDA device there is. The model runs at cfg 1.0, so the GPUs share each step's image tokens (Ulysses).":
    "**xDiT 并行配置**使用现有的每个 CUDA 设备。模型在 cfg 1.0 下运行，因此各 GPU 分担每一步的图像令牌（Ulysses）。",
  "It is made for 8 steps.":
    "它适用于 8 步。",
};

/** Titles of nodes in templates. */
export const ZH_TITLES = {
  "Positive Prompt": "正向提示词",
  "Negative Prompt": "负向提示词",
  "Files and folders": "文件与文件夹",
  "All devices": "全部设备",
  "One device": "单个设备",
  "Shift, high noise": "Shift，高噪声",
  "Shift, low noise": "Shift，低噪声",
  "High noise: steps 0 to 10": "高噪声：第 0 至 10 步",
  "Low noise: steps 10 to 20": "低噪声：第 10 至 20 步",
  "Seed of both": "两者的种子",
  "All minus one": "全部减单个",
  "One minus all": "单个减全部",
  "Both": "两者之和",
  "Difference (black: none)": "差异（黑色：无）",
  "One device and all": "单个设备与全部设备",
  "The demo model": "演示模型",
};
