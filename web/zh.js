/** Errors and what nodes say while they run, in Chinese. {} in the English stands for any text, which {0}, {1} ... have in the Chinese. Used by translate.js. */

export const ZH = {
  "Update xDiT, or use {}: this ComfyUI {}is newer than the pack knows, and in its model of {} {}.":
    "请更新 xDiT，或使用{0}：此 ComfyUI {1}比本插件所知的版本新，其 {2} 模型：{3}。",
  "Install {} in the Python of the workers: the ComfyUI {} in {}, whose module this model runs as, needs it, and comfy-kitchen is {} ({}).":
    "请在工作进程的 Python 中安装 {0}：此模型使用 {2} 中 ComfyUI {1} 的模块，它需要这个包，而 comfy-kitchen 为 {3}（{4}）。",
  "Use the bf16, fp16 or plain fp8 file of this model for nodes that write or mix a MODEL's own weights (ModelSave, CheckpointSave, LoraSave, ModelMerge nodes that take it as their second model): {} has quantised weights or is a GGUF file. As the first model of a ModelMerge node, and with LoRA, it works.":
    "写入或混合 MODEL 自身权重的节点（ModelSave、CheckpointSave、LoraSave，以及把它作为第二个模型的 ModelMerge 节点）请使用此模型的 bf16、fp16 或普通 fp8 文件：{0} 含有量化的权重，或者是 GGUF 文件。作为 ModelMerge 节点的第一个模型，以及与 LoRA 一起，它可以使用。",
  "Use the publisher's full file, or a text encoder that prepares this text: {} lacks the weights {} that ComfyUI needs for it.":
    "请使用发布者的完整文件，或使用会准备文本的文本编码器：{0} 缺少 ComfyUI 为此所需的权重 {1}。",
  "{} {} is a diffusers folder of a {} model, and some of its tensors have no known name in ComfyUI's format.":
    "{0} {1} 是 {2} 模型的 diffusers 文件夹，其中有些张量在 ComfyUI 格式中没有已知的名称。",
  "{} {} is a {} model with {} = {}, which ComfyUI cannot detect from its tensors: it would use {}.":
    "{0} {1} 是 {3} = {4} 的 {2} 模型，ComfyUI 无法从其张量检测到这一点：它会使用 {5}。",
  "Use another model: {} needs the sampling of its scheduler_config.json ({}, {} = {}), which ComfyUI does not have for such models.":
    "请使用其他模型：{0} 需要其 scheduler_config.json 的采样方式（{1}，{2} = {3}），而 ComfyUI 对这类模型没有这种方式。",
  "Set devices in xDiT Parallel Config, which runs this MODEL on several GPUs itself, and remove the node that requests a copy on {}.":
    "请在“xDiT 并行配置”中设置设备，它自己就在多个 GPU 上运行此 MODEL，并删除要求在 {0} 上建立副本的节点。",
  "Set weight_dtype to default for nodes that write or mix a MODEL's own weights (ModelSave, CheckpointSave, LoraSave, ModelMerge nodes that take it as their second model): this one was quantised as it was loaded (weight_dtype {}). As the first model of a ModelMerge node, and with LoRA, it works.":
    "写入或混合 MODEL 自身权重的节点（ModelSave、CheckpointSave、LoraSave，以及把它作为第二个模型的 ModelMerge 节点）请把 weight_dtype 设为 default：此 MODEL 在加载时被量化（weight_dtype {0}）。作为 ModelMerge 节点的第一个模型，以及与 LoRA 一起，它可以使用。",
  "Use Load Diffusion Model: {} is not in the file of this MODEL, so a node cannot save it.":
    "请使用“UNet加载器”：{0} 不在此 MODEL 的文件中，节点无法保存它。",
  "Use a LoRA that was made for {}: no tensor of this one matches. ComfyUI's log lists its tensors.":
    "请使用为 {0} 制作的 LoRA：此 LoRA 中没有匹配的张量。ComfyUI 的日志列出了它的张量。",
  "Remove Create Hook Model as LoRA, or use Load Diffusion Model: xDiT does not support it and would silently ignore it.":
    "请删除 Create Hook Model as LoRA，或使用“UNet加载器”：xDiT 不支持它，会在没有提示的情况下忽略它。",
  "Install the pack that has the node {}, or update ComfyUI: this ComfyUI does not have it.":
    "请安装含有节点 {0} 的插件，或更新 ComfyUI：此 ComfyUI 没有该节点。",
  "this node is for {}, which xDiT does not support.":
    "此节点用于 {0}，xDiT 不支持它。",
  "Use Load Diffusion Model for the node that needs a second copy of this MODEL's weights: xDiT's workers have one.":
    "请为需要此 MODEL 权重第二份副本的节点使用“UNet加载器”：xDiT 的工作进程只有一份。",
  "Set weight_dtype to fp32, or to bf16 if the device supports it: values of {} exceed the range of {}, in which {} would compute.":
    "请把 weight_dtype 设为 fp32，或在设备支持时设为 bf16：{0} 的数值超出 {1} 的范围，而 {2} 会用它计算。",
  "Set weight_dtype to default, which leaves weights as they are, or use the bf16 or fp16 file of the same model: weight_dtype {} would quantise {} a second time, whose weights are {} already.":
    "请把 weight_dtype 设为 default，使其保持不变，或使用同一模型的 bf16 或 fp16 文件：weight_dtype {0} 会再次量化 {1}：它的权重已经是 {2}。",
  "Use the all-in-one checkpoint of {} as published: {} lacks {}, with which ComfyUI encodes numbers for the model.":
    "请使用所发布的 {0} 一体化检查点：{1} 缺少 {2}，ComfyUI 用它为模型编码数值。",
  "Use another file of this model: ComfyUI does not recognise {} as a {} model.":
    "请使用此模型的其他文件：ComfyUI 不能把 {0} 识别为 {1} 模型。",
  "Use Load Diffusion Model: the metadata of {} describes a variant of {} that xDiT does not support.":
    "请使用“UNet加载器”：{0} 的元数据描述了 xDiT 不支持的 {1} 变体。",
  "Use another model: {} is a {} model whose scheduler has the prediction type {}, and ComfyUI supports only {} for it.":
    "请使用其他模型：{0} 是 {1} 模型，其调度器的预测类型为 {2}，而 ComfyUI 对它只支持 {3}。",
  "Use Load Diffusion Model for the node that reads weights of this MODEL (diffusion_model.{}) while no sampler runs it: they are on xDiT's workers.":
    "请为在没有采样器运行时读取此 MODEL 权重（diffusion_model.{0}）的节点使用“UNet加载器”：权重在 xDiT 的工作进程中。",
  "Use the bf16, fp16, plain fp8 or GGUF file of the same model: {} has a scale for {}, which ComfyUI ignores, so that the intended weights are not clear.":
    "请使用同一模型的 bf16、fp16、普通 fp8 或 GGUF 文件：{0} 有 {1} 的缩放系数，ComfyUI 会忽略它，因此无法确定应有的权重。",
  "Use a LoRA, or another weight patch, that was made for this model: this one does not fit {} ({}).":
    "请使用为此模型制作的 LoRA 或其他权重补丁：此补丁不适合 {0}（{1}）。",
  "Remove the LoRA or node that changes {}, or use Load Diffusion Model: the file of this MODEL does not have it.":
    "请删除更改 {0} 的 LoRA 或节点，或使用“UNet加载器”：此 MODEL 的文件中没有它。",
  "Remove Apply ControlNet: ComfyUI's {} supports no ControlNet and would silently ignore this workflow's.":
    "请删除“应用ControlNet”：ComfyUI 的 {0} 不支持 ControlNet，会在没有提示的情况下忽略此工作流中的。",
  "Set displaced_degree to 1 in xDiT Parallel Config, and cfg_degree or data_degree higher, or remove HyperTile: it cuts full images into tiles, and each device has only some of their rows.":
    "请在 xDiT 并行配置中把 displaced_degree 设为 1，并提高 cfg_degree 或 data_degree，或移除 HyperTile：它把整张图像切成小块，而每个设备只有其中几行。",
  "Remove HyperTile: some tokens that it cuts into tiles in {} are not pixels of one image.":
    "请移除 HyperTile：它在 {0} 中切成小块的一部分 token 不是同一张图像的像素。",
  "Remove HyperTile, or the other node that changes self-attention (another HyperTile, Perturbed-Attention or Self-Attention Guidance): xDiT does not combine them.":
    "请移除 HyperTile，或另一个改变自注意力的节点（另一个 HyperTile、扰动注意力引导或自注意力引导）：xDiT 不能组合它们。",
  "Remove TomePatchModel, or use Load Diffusion Model: it selects the tokens to merge at random in every layer, and each device would select different ones.":
    "请移除 TomePatchModel，或使用“UNet加载器”：它在每一层随机选择要合并的 token，而每台设备会选出不同的 token。",
  "Set swap_size of HyperTile to 2 or less: above that it selects tile sizes at random in every layer, and each device would select different ones.":
    "请把 HyperTile 的 swap_size 设为 2 或更小：更大时它在每一层随机选择小块的大小，而每个设备会选出不同的大小。",
  "Set displaced_degree to 1 in xDiT Parallel Config, and cfg_degree or data_degree higher, or remove FreeU: it filters the frequencies of full images, and each device has only some of their rows.":
    "请在 xDiT 并行配置中把 displaced_degree 设为 1，并提高 cfg_degree 或 data_degree，或移除 FreeU：它要对整张图像的频率滤波，而每个设备只有其中几行。",
  "Remove the node that adds model patches ({}): ComfyUI's {} does not support all of them and would silently ignore them.":
    "请移除添加模型补丁（{0}）的节点：ComfyUI 的 {1} 不支持其中的全部，会在没有提示的情况下忽略它们。",
  "Remove the node that adds model patches ({}): it does not support {}.":
    "请移除添加模型补丁（{0}）的节点：它不支持 {1}。",
  "Use a model patch that was made for this model: this one has {} blocks of {} channels, and this {} model has {} of {}.":
    "请使用为此模型制作的模型补丁：此补丁有 {0} 个 {1} 通道的块，而此 {2} 模型有 {3} 个 {4} 通道的块。",
  "Use one control image, or as many as latents, for the model patch: its {} of {} tokens do not fit {} latents of {}.":
    "模型补丁请使用一张控制图像，或与 latent 数量相同的控制图像：它的 {0} 张（各 {1} 个 token）与 {2} 个 latent（各 {3} 个 token）不符。",
  "Set displaced_degree to 1 in xDiT Parallel Config, and cfg_degree or data_degree higher, or remove PatchModelAddDownscale: it downscales full images, and each device has only some of their rows.":
    "请在 xDiT 并行配置中把 displaced_degree 设为 1，并提高 cfg_degree 或 data_degree，或移除 PatchModelAddDownscale：它把整张图像缩小，而每个设备只有其中几行。",
  "Use {} without changing its patches: this MODEL has {} of them that downscale and {} that upscale.":
    "请使用 {0} 而不改动它的补丁：此 MODEL 有 {1} 个缩小的补丁和 {2} 个放大的补丁。",
  "Choose another method than {} in {}: the workers do not support it.":
    "请在 {1} 中选择 {0} 以外的方法：工作进程不支持它。",
  "Remove {} or {}: the first resizes feature maps inside the model, and the second depends on their usual sizes.":
    "请移除 {0} 或 {1}：前者改变模型内部特征图的大小，而后者依赖它们原来的大小。",
  "Remove {}: it is for images, and {} generates videos.":
    "请移除 {0}：它用于图像，而 {1} 生成视频。",
  "Remove {}: {} also has attention along frames, which the node does not support.":
    "请移除 {0}：{1} 也沿帧计算注意力，该节点不支持这一点。",
  "Use a sampler node, or Load Diffusion Model: a node calls this MODEL with {} without naming the prompts (cond_or_uncond).":
    "请使用采样器节点，或“UNet加载器”：有节点调用带 {0} 的此 MODEL，却没有指明提示词（cond_or_uncond）。",
  "Use as many negative images as images of the same kind for {}: for the two prompts it has {} and {}, of {} and {} tokens.":
    "{0} 的负面图像请与图像数量和种类相同：两个提示词分别有 {1} 张和 {2} 张，各 {3} 个和 {4} 个 token。",
  "Use an adapter that was made for this model for {}: {} has {} channels, and the adapter's layer for it {}.":
    "{0} 请使用为此模型制作的适配器：{1} 有 {2} 个通道，而适配器对应的层有 {3} 个。",
  "Use a latent that is less narrow, or reference images without a mask: the mask has no rows left for a latent of {} x {}.":
    "请使用不那么窄的 latent，或不带遮罩的参考图像：对 {0} x {1} 的 latent，遮罩没有剩下的行。",
  "Use another version of {}, or Load Diffusion Model: {} of the installed one computes something else than xDiT expects.":
    "请使用其他版本的 {0}，或“UNet加载器”：已安装版本的 {1} 的计算与 xDiT 所预期的不同。",
  "Use another hypernetwork, or Load Diffusion Model: this one has layers that xDiT does not support ({}).":
    "请使用其他 hypernetwork 或 UNet加载器：此 hypernetwork 有 xDiT 不支持的层（{0}）。",
  "Remove Self-Attention Guidance: the node needs attention between the pixels of one image, and {} also attends along frames there.":
    "请移除 Self-Attention Guidance：该节点需要同一张图像的像素之间的注意力，而 {0} 在那里也沿帧计算注意力。",
  "Use a latent of one frame: LLLite is for images, and this latent has {} frames.":
    "请使用只有一帧的 latent：LLLite 用于图像，而此 latent 有 {0} 帧。",
  "Use an LLLite that was made for this model: this one has {} channels, and this {} model has {}.":
    "请使用为此模型制作的 LLLite：此 LLLite 有 {0} 个通道，而此 {1} 模型有 {2} 个。",
  "Use one control image, or as many as latents, for the LLLite: {} do not fit {} latents.":
    "LLLite 请使用一张控制图像，或与 latent 数量相同的控制图像：{0} 张与 {1} 个 latent 不符。",
  "Remove the node that adds an LLLite: it does not support {}.":
    "请移除添加 LLLite 的节点：它不支持 {0}。",
  "Use Apply Anima LLLite without changing its patches: a node has changed some of them ({}).":
    "请使用 Apply Anima LLLite 而不改动它的补丁：有节点改动了其中一部分（{0}）。",
  "Use a ControlNet that was made for this model: this one has {} outputs for the {} skip connections of {}, which need one each.":
    "请使用为此模型制作的 ControlNet：它为 {2} 的 {1} 个跳跃连接给出 {0} 个输出，而每个连接需要一个。",
  "Use a ControlNet for {}: this one was made for another model, as it has outputs for {} blocks. Supported are {} only.":
    "请使用适用于 {0} 的 ControlNet：此 ControlNet 有用于 {1} 块的输出，是为其他模型制作的。只支持 {2}。",
  "Use {}: this ControlNet's output for {} of this {} model is {}, and it must be {} for this latent.":
    "请使用 {0}：此 ControlNet 为此 {2} 模型的 {1} 输出 {3}，而对此 latent 必须是 {4}。",
  "Set displaced_degree to at most {}, or use a taller latent: displaced_degree={} is too high for a latent of {} rows, which {} splits in multiples of {}.":
    "请把 displaced_degree 设为最多 {0}，或使用更高的 latent：displaced_degree={1} 对 {2} 行的 latent 太大，{3} 按 {4} 行的倍数切分。",
  "Queue the prompt again: the model patch {} is not loaded.":
    "请再次排队：模型补丁 {0} 未加载。",
  "Use a larger latent or lower degrees: it has {} tokens, too few for displaced_degree x ring_degree x ulysses_degree = {}.":
    "请使用更大的 latent 或更小的并行度：latent 有 {0} 个 token，对 displaced_degree x ring_degree x ulysses_degree = {1} 太少。",
  "Use KSampler: Parallel Sampler cannot run this workflow patch by patch, as its patches request different prompts at the same step.":
    "请使用K采样器：并行采样器不能逐块运行此工作流：各块在同一步请求不同的提示词。",
  "Use a sampler node, or a model that the node supports: it calls this MODEL with other arguments than the latent, timestep and conditioning that {} takes.":
    "请使用采样器节点，或该节点所支持的模型：有节点调用此 MODEL 时所用的参数不同于 {0} 所接受的 latent、时间步和条件。",
  "Use the VAE or the empty latent node that belongs to this model{}: the latent has {}, and {} needs (batch, {}). It was made for another model.":
    "请使用属于此模型的 VAE 或空 latent 节点{0}：latent 有 {1}，而 {2} 需要 (batch, {3})。它是为其他模型制作的。",
  "Set dim to 0 in the context window node, and causal_window_fix to false: the conditioning is for {} frames, and the latent has {} images, which are the frames of {}.":
    "请在上下文窗口节点中把 dim 设为 0，并把 causal_window_fix 设为 false：条件属于 {0} 帧，而 latent 有 {1} 张图像，对 {2} 来说它们就是帧。",
  "Move, enlarge or remove an area that lies outside the image: the latent, or the area of it that a prompt is for, is empty (its shape is {}).":
    "请移动、扩大或删除位于图像之外的区域：latent 或提示词所用的区域为空（形状为 {0}）。",
  "Encode an empty text with the text encoder's node for an empty prompt: the conditioning has no text tokens (its shape is {}), and {} needs at least one.":
    "要使用空提示词，请用文本编码节点编码空文本：条件中没有文本 token（形状为 {0}），而 {1} 至少需要一个。",
  "{}: {} contains NaN or infinite values, so no image can be generated.":
    "{0}：{1} 含有 NaN 或无穷大的数值，无法生成图像。",
  "Connect the output of a suitable node: {} is {}, and must be {}.":
    "请连接合适节点的输出：{0} 是 {1}，而必须是 {2}。",
  "Set shift_t of Scale ROPE to 0: xDiT recognises the tokens of Flux.2's reference images at timestep 0, which this workflow uses, by these positions.":
    "请把 Scale ROPE 的 shift_t 设为 0：xDiT 靠这些位置识别 Flux.2 参考图像的 token，而此工作流让它们处于时间步 0。",
  "Connect Apply SeedVR2 Conditioning to the sampler: the conditioning has no video for SeedVR2 to restore.":
    "请把 Apply SeedVR2 Conditioning 接到采样器：条件中没有供 SeedVR2 修复的视频。",
  "Connect the same latent to Apply SeedVR2 Conditioning and to the sampler: their sizes are {} and {}.":
    "请把同一个 latent 接到 Apply SeedVR2 Conditioning 和采样器：两者的尺寸为 {0} 和 {1}。",
  "Make the latent with TripoSplat Conditioning: its components have the shapes {}, and TripoSplat needs up to {} tokens of {} values and a camera of (batch, 1, {}).":
    "请用 TripoSplat Conditioning 生成它：latent 各部分的形状是 {0}，而 TripoSplat 处理最多 {1} 个 {2} 个数的 token 和形状为 (batch, 1, {3}) 的相机。",
  "Connect Flux.2's VAE to TripoSplat Conditioning: the image's latent has the shape {}, and this model takes {} channels.":
    "请把 Flux.2 的 VAE 接到 TripoSplat Conditioning：图像的 latent 的形状是 {0}，而此模型需要 {1} 个通道。",
  "Load a Bernini or Wan text-to-video model: the reference latents of Bernini Conditioning have {} channels, and this Wan model takes {}.":
    "请加载 Bernini 或 Wan 文生视频模型：Bernini Conditioning 的参考 latent 有 {0} 个通道，而此 Wan 接受 {1} 个。",
  "Remove the noise mask, or Bernini Conditioning: references have one timestep, and with a noise mask each frame of this Wan model has its own.":
    "请移除噪波遮罩或 Bernini Conditioning：参考只有一个时间步，而有噪波遮罩时此 Wan 模型的每一帧各有自己的时间步。",
  "Remove WanInfiniteTalkToVideo: it is for Wan, and this is {}.":
    "请移除 WanInfiniteTalkToVideo：它用于 Wan，而此模型是 {0}。",
  "Connect one image to mask_1 and one to mask_2 of WanInfiniteTalkToVideo: it has {} masks for two speakers.":
    "请给 WanInfiniteTalkToVideo 的 mask_1 和 mask_2 各连接一张图像：两位说话者现在有 {0} 个遮罩。",
  "Set width and height of WanInfiniteTalkToVideo to multiples of 16 and use the latent that it outputs: its masks have {} tokens for each frame, and this latent has {}.":
    "请把 WanInfiniteTalkToVideo 的宽和高设为 16 的倍数，并使用它输出的 latent：它的遮罩每帧有 {0} 个 token，而此 latent 每帧有 {1} 个。",
  "Use the latent that WanInfiniteTalkToVideo outputs: its audio is for {} latent frames, and this latent has {}.":
    "请使用 WanInfiniteTalkToVideo 输出的 latent：它的音频对应 {0} 帧 latent，而此 latent 有 {1} 帧。",
  "Encode the reference image with this model's VAE: the conditioning has a reference latent of {} channels and {} dims, and this {} model needs {} and {}. Models with other image inputs (Fill, Canny, Depth) support no reference latents.":
    "请用属于此模型的 VAE 编码参考图像：条件中的参考 latent 有 {0} 个通道和 {1} 个维度，而此 {2} 模型需要 {3} 和 {4}。有其他图像输入的模型（Fill、Canny、Depth）不支持参考 latent。",
  "Use {}: the conditioning has {} of {} channels, and this {} model needs {}. It was made by another text encoder.":
    "请使用 {0}：条件中有 {2} 通道的 {1}，而此 {3} 模型需要 {4} 个通道。它由其他文本编码器产生。",
  "Use a sampler node, or Load Diffusion Model: a node calls this MODEL's diffusion model directly, without the positions that ComfyUI sets for {}'s tokens (rope_options).":
    "请使用采样器节点，或“UNet加载器”：有节点直接调用此 MODEL 的扩散模型，没有 ComfyUI 为 {0} 的 token 设置的位置（rope_options）。",
  "Change the node that adds {}, or use Load Diffusion Model: xDiT does not support it for {}.":
    "请更改添加 {0} 的节点，或使用“UNet加载器”：xDiT 不支持 {1} 使用它。",
  "Remove the node that adds {} to the conditioning, or use Load Diffusion Model: xDiT does not support it for {} and would silently ignore it.":
    "请删除向条件添加 {0} 的节点，或使用“UNet加载器”：xDiT 不支持 {1} 使用它，会在没有提示的情况下忽略它。",
  "Remove the node that adds it, or use Load Diffusion Model: xDiT does not support {}{} on this MODEL and would silently ignore it.":
    "请删除添加它的节点，或使用“UNet加载器”：xDiT 在此 MODEL 上不支持 {0}{1}，会在没有提示的情况下忽略它。",
  "Use Load Diffusion Model for the node that reads the weights of this MODEL or computes with its layers itself ({}): they are on xDiT's workers.":
    "请为读取此 MODEL 的权重或自己用其层计算的节点使用“UNet加载器”（{0}）：它们在 xDiT 的工作进程中。",
  "Remove the node ({}): ComfyUI's {} does not support the patches that it adds to this workflow ({}) and would silently ignore them.":
    "请删除该节点（{0}）：ComfyUI 的 {1} 不支持它添加到此工作流的补丁（{2}），会在没有提示的情况下忽略它们。",
  "Remove the node that replaces attention in {}, or use Load Diffusion Model: for {} xDiT supports this in the middle block only.":
    "请删除在 {0} 中替换注意力的节点，或使用“UNet加载器”：对 {1}，xDiT 只在中间块支持这一点。",
  "Remove Bernini Conditioning, or InfiniteTalk: InfiniteTalk's audio is for frames of the video only, and references have none.":
    "请移除 Bernini Conditioning 或 InfiniteTalk：音频只属于视频的各帧，参考没有音频。",
  "Connect the VAE that belongs to the model: the latent has {} channels and {} dims, and this VAE decodes {} channels and {} dims.":
    "请连接属于此模型的 VAE：latent 有 {0} 个通道和 {1} 个维度，而此 VAE 解码 {2} 个通道和 {3} 个维度。",
  "Use an image of at least {} x {} pixels: the latent has {} x {} rows and columns, and this VAE decodes {} x {} or more.":
    "请使用至少 {0} x {1} 像素的图像：latent 有 {2} x {3} 行和列，而此 VAE 至少解码 {4} x {5}。",
  "Use an image of at least {} x {} pixels, the minimum of this VAE: the image has {} x {}.":
    "请使用至少 {0} x {1} 像素的图像，这是此 VAE 的最小尺寸：该图像为 {2} x {3}。",
  "Use VAE {} for this VAE ({}): Distributed VAE {} does not support it. It supports the VAEs of {}.":
    "请对此 VAE（{1}）使用 VAE {0}：分布式 VAE {2} 不支持它。它支持 {3} 的 VAE。",
  "Install {}, which this Python does not have: python -m pip install -r requirements.txt (in the folder of the xDiT nodes, with ComfyUI's Python), and restart ComfyUI.":
    "请安装此 Python 中没有的 {0}：python -m pip install -r requirements.txt（在 xDiT 节点的文件夹中，用 ComfyUI 的 Python），然后重新启动 ComfyUI。",
  "Leave out {}, or set the address of this machine in Settings > xDiT > Other machines to one of {} after reading docs/guide/several-machines.md: devices=\"{}\" names other machines, and ComfyUI does not listen for any.":
    "请去掉 {0}，或先阅读 docs/guide/several-machines.md，再在 设置 > xDiT > 其他机器 中把本机的地址设为 {1} 之一：devices=\"{2}\" 指定了其他机器，而 ComfyUI 没有监听任何机器。",
  "Name one of {} in xDiT Parallel Config: {} has no device {}.":
    "请在“xDiT 并行配置”中写上 {0} 之一：{1} 没有设备 {2}。",
  "Set several devices in xDiT Parallel Config and run once: there is nothing to measure, as only {} is used.":
    "请在“xDiT 并行配置”中设置多个设备，并运行一次：没有可测量的，因为只使用 {0}。",
  "Set weight_dtype to default, use a file of that type, or close other programs: the weights of {} do not fit in VRAM, and the offloaded ones need {} GB of system RAM, of which {} GB are free. Weights that are used as the file stores them need no RAM of their own.":
    "请把 weight_dtype 设为 default，使用该类型的文件，或关闭其他程序：{0} 的权重在显存中放不下，卸载的权重需要 {1} GB 内存，其中 {2} GB 空闲。按文件中的形式直接使用的权重不另占内存。",
  "Set attention to sdpa in xDiT Parallel Config, or remove the node that selects {}: {} {}.":
    "请在 xDiT Parallel Config 中把 attention 设为 sdpa，或移除选择 {0} 的节点：{1} {2}。",
  "Use cfg_degree or data_degree instead of displaced_degree: Smoothed Energy Guidance blurs queries over the full image.":
    "请用 cfg_degree 或 data_degree 代替 displaced_degree：Smoothed Energy Guidance 会在整幅图像上模糊查询。",
  "Remove RifleX, or the node that scales positions, adds references or sets a first frame: for {} xDiT does not combine them.":
    "请移除 RifleX，或移除缩放位置、添加参考图或设置首帧的节点：对于 {0}，xDiT 不支持将它们组合使用。",
  "Remove Enhance-A-Video: for {} xDiT does not support its change of the attention in {}.":
    "请移除 Enhance-A-Video：对于 {0}，xDiT 不支持它对 {1} 中注意力的修改。",
  "Remove Enhance-A-Video, or the node that adds {}: the first processes the frames of the latent only.":
    "请移除 Enhance-A-Video，或移除添加 {0} 的节点：前者只处理潜变量的帧。",
  "Remove Enhance-A-Video, or connect a latent of more frames to it: it compares frames, and its latent has {}.":
    "请移除 Enhance-A-Video，或为它连接帧数更多的潜变量：它比较各帧，而其潜变量有 {0} 帧。",
  "Connect the latent that the sampler gets to Enhance-A-Video: its latent has {} frames, which do not divide the {} tokens of this one.":
    "请把采样器所用的潜变量连接到 Enhance-A-Video：其潜变量有 {0} 帧，不能整除此潜变量的 {1} 个 token。",
  "Remove Token Perturbation Guidance: it is for image models with a U-Net, and this is {}.":
    "请移除 Token Perturbation Guidance：它用于带 U-Net 的图像模型，而此模型是 {0}。",
  "Use cfg_degree or data_degree instead of displaced_degree: Token Perturbation Guidance shuffles the tokens of the full image.":
    "请用 cfg_degree 或 data_degree 代替 displaced_degree：Token Perturbation Guidance 会打乱整幅图像的 token。",
  "Remove Token Perturbation Guidance or PatchModelAddDownscale: the second resizes the feature maps whose tokens the first shuffles.":
    "请移除 Token Perturbation Guidance 或 PatchModelAddDownscale：后者会缩放前者打乱其 token 的特征图。",
  "Connect one prompt to Normalized Attention Guidance (sd-perturbed-attention): it has a batch of several, with which ComfyUI fails.":
    "请为 Normalized Attention Guidance（sd-perturbed-attention）连接一个提示词：它得到的是一批多个提示词，ComfyUI 会因此失败。",
  "Use a sampler node for a MODEL with Normalized Attention Guidance (sd-perturbed-attention): this call has its prompts in the order {}, and the node requires the positive ones (0) last.":
    "请对带 Normalized Attention Guidance（sd-perturbed-attention）的 MODEL 使用采样器节点：本次调用的提示词顺序为 {0}，而该节点要求正向提示词（0）在最后。",
  "Use SkipLayerGuidanceDiT or SkipLayerGuidanceDiTSimple instead of SkipLayerGuidanceWanVideo: it needs options that ComfyUI does not pass to it, so that a run fails with Load Diffusion Model too.":
    "请用 SkipLayerGuidanceDiT 或 SkipLayerGuidanceDiTSimple 代替 SkipLayerGuidanceWanVideo：它需要 ComfyUI 不会传给它的选项，因此使用 Load Diffusion Model 时运行也会失败。",
  "Use EasyCache or LazyCache instead of {}, or Load Diffusion Model: it replaces the model's blocks on one device during each call, and they are on xDiT's workers.":
    "请用 EasyCache 或 LazyCache 代替 {0}，或使用 Load Diffusion Model：它在每次调用期间替换一个设备上的模型块，而这些块在 xDiT 的工作进程上。",
  "Remove the node that guides attention to the text (such as WanVideoNAG): xDiT does not support it for {}.":
    "请移除引导文本注意力的节点（例如 WanVideoNAG）：xDiT 不支持将其用于 {0}。",
  "Use one node that guides attention to the text, in all blocks: xDiT does not support {} of them in {} of {} blocks.":
    "请只用一个引导文本注意力的节点，并作用于所有块：xDiT 不支持 {0} 个这样的节点作用于 {2} 个块中的 {1} 个。",
  "Set batch_size to 1, or input_type of WanVideoNAG to batch with cfg 1: otherwise the node mixes the images of a batch, and this call has {}.":
    "请把 batch_size 设为 1，或把 WanVideoNAG 的 input_type 设为 batch 并使用 cfg 1：否则该节点会混合一批中的图像，而本次调用有 {0} 个。",
  "Install the package, or select another attention in xDiT Parallel Config and in nodes that select one: {} on {} {}.":
    "请安装该软件包，或在 xDiT Parallel Config 以及选择 attention 的节点中另选一种：{1} 上的 {0} {2}。",
  "Set attention to sdpa in xDiT Parallel Config, or remove the node that selects {}: {} rejects queries of shape {} and type {} ({}: {}).":
    "请在 xDiT Parallel Config 中把 attention 设为 sdpa，或移除选择 {0} 的节点：{1} 拒绝形状为 {2}、类型为 {3} 的查询（{4}：{5}）。",
  "is not installed (package {})":
    "未安装（软件包 {0}）",
  "runs on CUDA devices of compute capability {}, and {}":
    "在计算能力 {0} 的 CUDA 设备上运行，而 {1}",
  "takes {}, and this model computes in {}":
    "接受 {0}，而此模型以 {1} 计算",
  "takes a head size of at most {}, the same for queries and values, and this model has {} and {}":
    "接受最多 {0} 个数且查询与值相同的注意力头，而此模型的查询和值分别为 {1} 和 {2} 个数",
  "gives no log-sum-exp in the installed version, which ring_degree needs; with {} {}, or ulysses_degree instead of ring_degree, it can be used":
    "在已安装的版本中不给出 ring_degree 所需的 log-sum-exp；安装 {0} {1}，或用 ulysses_degree 代替 ring_degree，即可使用",
  "gives no log-sum-exp, which ring_degree needs; with ulysses_degree instead of ring_degree, it can be used":
    "不给出 ring_degree 所需的 log-sum-exp；用 ulysses_degree 代替 ring_degree 即可使用",
  "needs {} {} or newer":
    "需要 {0} {1} 或更新版本",
  "cannot be imported ({}): reinstall {} for PyTorch {}":
    "无法导入（{0}）：请为 PyTorch {2} 重新安装 {1}",
  "Set compile to off in xDiT Parallel Config, or remove TorchCompileModel: PyTorch cannot compile this model here ({}).":
    "请在 xDiT Parallel Config 中把 compile 设为 off，或移除 TorchCompileModel：PyTorch 无法在这里编译此模型（{0}）。",
  "Set weights_memory to \"auto\", or to {} GB or more: the weights of {} outside its blocks and those of two blocks need that much of each device, and weights_memory=\"{}\" is less.":
    "请把 weights_memory 设为“auto”，或 {0} GB 及以上：{1} 中块之外的权重加上两个块的权重在每个设备上需要这么多，而 weights_memory=\"{2}\" 更少。",
  "Use Load Diffusion Model, or another version of ComfyUI: {} runs as ComfyUI's own module, and {} of ComfyUI {} {}, which its parallel methods rely on.":
    "请使用“UNet加载器”，或换一个版本的 ComfyUI：{0} 以 ComfyUI 自己的模块运行，而 ComfyUI {2} 的 {1} {3}，并行方法却依赖于此。",
  "Install ComfyUI on this machine, and set XDIT_COMFYUI to its folder: this model runs as ComfyUI's own module, and no ComfyUI was found.":
    "请在这台机器上安装 ComfyUI，并把 XDIT_COMFYUI 设为其文件夹：此模型以 ComfyUI 自己的模块运行，而这里找不到 ComfyUI。",
  "Upscale Image (using Model)":
    "使用模型放大图像",
  "Install spandrel in the Python of the workers: {}.":
    "请在工作进程的 Python 中安装 spandrel：{0}。",
  "Install spandrel in ComfyUI's Python, which loads upscale models: {}.":
    "请在 ComfyUI 的 Python 中安装 spandrel，它用于加载放大模型：{0}。",
  "Use {} for this upscale model: spandrel cannot load it from its tensors ({}, {}: {}).":
    "此放大模型请使用“{0}”：spandrel 无法由它的张量加载它（{1}，{2}：{3}）。",
  "Use {} for this upscale model, or connect Load Upscale Model directly: its {} differ from those of a {} model that spandrel loads ({} instead of {}).":
    "此放大模型请使用“{0}”，或直接连接“加载放大模型”：它的 {1} 与 spandrel 加载的 {2} 模型不同（为 {3}，而不是 {4}）。",
  "Use {} for this upscale model, or connect Load Upscale Model: this is a {}, and Distributed Upscale Image takes the image models that spandrel loads.":
    "此放大模型请使用“{0}”，或连接“加载放大模型”：这是 {1}，而“分布式放大图像”接受 spandrel 加载的图像模型。",
  "Use {} for this upscale model, or connect Load Upscale Model directly: a node patches it ({}), which Distributed Upscale Image does not support.":
    "此放大模型请使用“{0}”，或直接连接“加载放大模型”：有节点对它打了补丁（{1}），“分布式放大图像”不支持这一点。",
  "Use {} for this upscale model: it returns a tile of the shape {}, and spandrel says {}.":
    "此放大模型请使用“{0}”：它返回形状为 {1} 的分块，而 spandrel 给出的是 {2}。",
  "Connect an image of {} channels: the image has the shape {}, and this upscale model takes {} channels.":
    "请连接 {0} 通道的图像：该图像的形状为 {1}，而此放大模型接受 {2} 个通道。",
  "Update xDiT, or use {}: this ComfyUI splits the image into other tiles than the pack knows: {}.":
    "请更新 xDiT，或使用“{0}”：此 ComfyUI 拆分图像的分块与本扩展所知的不同：{1}。",
  "it used {} of {} tiles":
    "它使用了 {1} 个分块中的 {0} 个",
  "it has more than {} tiles":
    "它有多于 {0} 个分块",
  "tile {} has the shape {}, where the pack knows {}":
    "分块 {0} 的形状为 {1}，而本扩展所知的为 {2}",
  "tile {} has other pixels":
    "分块 {0} 的像素不同",
  "Load a file of {} in ComfyUI's format: {} is a folder of it, and xDiT runs it as ComfyUI's own module, which takes files.":
    "请加载 ComfyUI 格式的 {0} 单个文件：{1} 是它的文件夹，而 xDiT 以 ComfyUI 自己的模块运行它，只接受单个文件。",
  "Update ComfyUI: the version {} in {} has no {} in {}, which this model needs ({}).":
    "请更新 ComfyUI：{1} 中的版本 {0} 在 {3} 里没有此模型所需的 {2}（{4}）。",
  "Use one node that makes the {} and the latent with the same width and height: the {} of {} has {} x {}, and this latent needs {} x {}.":
    "请用同一个节点以相同的宽高生成 {0} 与 latent：{2} 的 {1} 为 {3} x {4}，而此 latent 对应 {5} x {6}。",
  "Use one node that makes the {} and the latent with the same length: the {} of {} has {} latent frames, and this latent needs {}.":
    "请用同一个节点以相同的长度生成 {0} 与 latent：{2} 的 {1} 为 {3} 个 latent 帧，而此 latent 为 {4} 帧。",
  "Use an image and a latent with the same height, and an even number of latent columns (16 pixels) each: HiDream-E1 puts them side by side, and they have {} x {} and {} x {} latent pixels.":
    "请让图像与 latent 图像高度相同，且两者的 latent 列数均为偶数（16 像素）：HiDream-E1 把它们并排放置，而它们的 latent 尺寸为 {0} x {1} 与 {2} x {3}。",
  "Use a width and a height that are multiples of {} pixels, as this Chroma Radiance file needs: the image is {} x {}.":
    "请使用 {0} 像素整数倍的宽度和高度：此 Chroma Radiance 文件不接受其他尺寸，而图像为 {1} x {2}。",
  "Use one node that makes the reference image and the latent with the same width and height: the reference has {} x {}, and this latent needs {} x {}.":
    "请用同一个节点生成宽高相同的参考图像和 latent：参考图像为 {0} x {1}，而此 latent 需要 {2} x {3}。",
  "Use one WanAnimate2ToVideo for the pose video and the latent: this latent needs a pose of {} latent frames, rows and columns, and the pose has {}.":
    "请用同一个 WanAnimate2ToVideo 生成姿态视频和 latent：此 latent 需要帧数、行数和列数为 {0} 的姿态 latent，而给定的姿态为 {1}。",
  "Remove the noise mask, or use Load Diffusion Model: with a noise mask, each frame of this model has its own timestep, which xDiT does not support for Wan Fun-Control.":
    "请移除噪声遮罩，或使用“UNet加载器”：有噪声遮罩时，此模型的每一帧都有自己的时间步，xDiT 对 Wan Fun-Control 不支持这一点。",
  "Make a video of 5 frames or more, or set pipefusion_degree to 1: the reference image of Wan Fun-Control is an additional frame of the video, so that a video of one frame cannot be cut into rows.":
    "请制作 5 帧或更多帧的视频，或把 pipefusion_degree 设为 1：Wan Fun-Control 把参考图作为视频的另一帧，因此单独一帧无法按行切分。",
  "Use a smaller or shorter video, such as 49 frames of 720 x 480 pixels: CogVideoX-5b-I2V has positions for {} tokens, and this latent has {}.":
    "请使用更小或更短的视频，例如 49 帧 720 x 480 像素：CogVideoX-5b-I2V 有 {0} 个 token 的位置，而此 latent 有 {1} 个。",
  "Make a video of 5 frames or more, or set pipefusion_degree to 1: the reference images of SCAIL are additional frames of the video, so that a video of one frame cannot be cut into rows.":
    "请生成 5 帧或更多帧的视频，或将 pipefusion_degree 设为 1：SCAIL 把参考图像当作视频的更多帧，因此单帧视频无法按行切分。",
  "Use one node that makes the {}, the matching mask and the latent: the mask has {} frames, rows and columns, and this latent needs {}.":
    "请用同一个节点生成 {0} 的遮罩、其图像和 latent：遮罩的帧、行、列为 {1}，而此 latent 需要 {2}。",
  "Encode audio of the video's length: it has {} frames, which do not divide the {} tokens of the video.":
    "请编码与视频等长的音频：它有 {0} 帧，视频的 {1} 个 token 无法按帧分开。",
  "Use a width and a height that are multiples of 16 pixels: Wan S2V takes references with even sides, and this one has {}.":
    "请使用 16 像素倍数的宽和高：Wan S2V 的参考需要偶数边长，而此参考为 {0}。",
  "Scale the reference images to sides that are multiples of 16 pixels, and set auto_resize_images to false: Z-Image-Omni takes references with even sides, and this latent has {} x {}.":
    "请将参考图像缩放到 16 像素倍数的边长，并将 auto_resize_images 设为 false：Z-Image-Omni 的参考需要偶数边长，而此 latent 为 {0} x {1}。",
  "Load this model's SigLIP in Load CLIP Vision: the conditioning has {} features per patch of an image, and this Z-Image-Omni takes {}.":
    "请在 Load CLIP Vision 中加载此模型所用的 SigLIP：条件中图像的每个图块有 {0} 个特征，而此 Z-Image-Omni 需要 {1} 个。",
  "Put PiD Conditioning after both prompts, with a latent of {} channels, which this PiD file decodes: the latent there has {}.":
    "请在两个提示词之后都接上 PiD Conditioning，并给它 {0} 通道的 latent，此 PiD 文件解码的正是这种 latent：那里的 latent 有 {1} 个通道。",
  "Use a width and a height of at least 64 pixels: Wan S2V reads preceding frames in squares of that size.":
    "请使用至少 64 像素的宽和高：Wan S2V 以该大小的方块读取之前的帧。",
  "Encode audio of the video's length: it has {} frames, which do not divide the {} tokens of the video and its reference.":
    "请编码与视频等长的音频：它有 {0} 帧，视频及其参考的 {1} 个 token 无法按帧分开。",
  "Choose one of {} in Settings > xDiT: {} is {} in ComfyUI's settings.":
    "请在 设置 > xDiT 中选择 {0} 之一：ComfyUI 的设置中 {1} 为 {2}。",
  "Set the idle minutes above 0 and at most {} in Settings > xDiT: {} is {} in ComfyUI's settings.":
    "请在 设置 > xDiT 中把空闲分钟数设为大于 0、不超过 {0}：ComfyUI 的设置中 {1} 为 {2}。",
  "Enter an address of this machine, or nothing, in Settings > xDiT: {} is {} in ComfyUI's settings, which is not a text.":
    "请在 设置 > xDiT 中输入本机地址，或留空：ComfyUI 的设置中 {0} 为 {1}，不是文本。",
  "Use a number from 0 to {}{}: {} is not a class of this model.":
    "请使用 0 到 {0} 的编号{1}：{2} 不是此模型的类别。",
  ", or a name such as {}":
    "，或名称，例如 {0}",
  "(the model's folder has no class names)":
    "（模型文件夹中没有类别名称）",
  "Use one of the numbers {}: several classes have the name {}.":
    "请使用编号 {0} 之一：有多个类别名为 {1}。",
  "Use the CLIP that belongs to this MODEL, or load a DiT folder in Load xDiT Model: this model is not class-conditional.":
    "请使用属于此 MODEL 的 CLIP，或在“加载 xDiT 模型”中加载 DiT 文件夹：此模型不是类别条件模型。",
  "Download {} again, or remove it and use class numbers: its class names cannot be read ({}).":
    "请重新下载 {0}，或删除它并使用类别编号：无法读取其中的类别名称（{1}）。",
  "Load the text encoder and the VAE from separate files, with Load CLIP and Load VAE: {} contains neither.":
    "请用“加载CLIP”和“加载VAE”从单独的文件加载文本编码器和 VAE：{0} 不含它们。",
  "Connect Load xDiT Model, or use KSampler: Parallel Sampler needs a MODEL from Load xDiT Model, and this one is from another loader.":
    "请连接“加载 xDiT 模型”，或使用K采样器：并行采样器需要来自“加载 xDiT 模型”的 MODEL，而此 MODEL 来自其他加载器。",
  "Set cfg above 1, or mode to auto: cfg_degree=2 needs two branches, and cfg=1.0 evaluates only the positive prompt, so half of the devices would be idle.":
    "请把 cfg 设为大于 1，或把 mode 设为 auto：cfg_degree=2 需要两个分支，而 cfg=1.0 只计算正向提示词，一半的设备会空闲。",
  "Remove the GLIGEN conditioning, or use KSampler with Load Diffusion Model: Parallel Sampler does not support it and would ignore it.":
    "请删除 GLIGEN 条件，或将K采样器与“UNet加载器”一起使用：并行采样器不支持它，会将其忽略。",
  "It lacks tensors that Cosmos-Predict1's VAE has; its {} tensors begin with {}.":
    "它缺少 Cosmos-Predict1 的 VAE 所有的张量；它的 {0} 个张量以 {1} 开头。",
  "It is {}'s, which needs diffusers {} or newer, and this is {}.":
    "它是 {0} 的，需要 diffusers {1} 或更新版本，而当前是 {2}。",
  "It is that of HunyuanImage's refiner, which works on several frames.":
    "它是 HunyuanImage 的 refiner 的 VAE，处理多帧。",
  "It lacks tensors that a HunyuanImage VAE has; its {} tensors begin with {}.":
    "它缺少 HunyuanImage 的 VAE 所有的张量；它的 {0} 个张量以 {1} 开头。",
  "It lacks tensors that a VAE of HunyuanVideo 1.5 has; its {} tensors begin with {}.":
    "它缺少 HunyuanVideo 1.5 的 VAE 所有的张量；它的 {0} 个张量以 {1} 开头。",
  "It has no tensor {}; its {} tensors begin with {}.":
    "它没有张量 {0}；它的 {1} 个张量以 {2} 开头。",
  "{} has shape {}, an image VAE's has 4 dims.":
    "{0} 的形状为 {1}，图像 VAE 的应有 4 维。",
  "It is LTX-Video 0.9.1's, whose decoder adds random noise to the image between its layers.":
    "它是 LTX-Video 0.9.1 的 VAE，其解码器在各层之间向图像加入随机噪声。",
  "It lacks tensors that Mochi's VAE has; its {} tensors begin with {}.":
    "它缺少 Mochi 的 VAE 所有的张量；它的 {0} 个张量以 {1} 开头。",
  "Queue the prompt again, which reloads the file: {} has changed on disk since Load xDiT Model read it, and its weights are needed again.":
    "请再次排队：会重新加载文件：{0} 在“加载 xDiT 模型”读取之后在磁盘上已更改，而现在又需要它的权重。",
  "Queue the prompt again, which reloads the file: {} was written to while a run was streaming weights from it.":
    "请再次排队，会重新加载文件：运行正从 {0} 流式读取权重时，该文件被写入。",
  "Queue the prompt again, which starts other workers: the weights of block {} could not be copied from system RAM to {} ({}: {}). If that fails too, close programs that use system RAM, or set weights_memory in xDiT Parallel Config to more GB, so that less is copied.":
    "请再次排队，会启动新的工作进程：块 {0} 的权重无法从内存复制到 {1}（{2}：{3}）。如果仍然失败，请关闭占用内存的程序，或在“xDiT 并行配置”中把 weights_memory 设为更大的 GB 数，以减少复制量。",
  "Repair or remove the package that is named last, in ComfyUI's Python: diffusers cannot import {}: {}":
    "请在 ComfyUI 的 Python 中修复或移除最后提到的软件包：diffusers 无法导入 {0}：{1}",
  "Put the model's file back, or choose another, and queue the prompt again: {} is no longer there.":
    "请把模型文件放回原处，或选择另一个文件，然后再次排队：{0} 已不存在。",
  "{} is not a diffusers folder with a transformer or a U-Net: {} lacks config.json.{}":
    "{0} 不是含有 transformer 或 U-Net 的 diffusers 文件夹：{1} 缺少 config.json。{2}",
  "{} {} contains a {}, and must contain an object of settings.":
    "{0} {1} 的内容是 {2}，而它应是包含设置的对象。",
  "{} is not a diffusers folder with a transformer or a U-Net that can be read: {} lacks .safetensors files.{} {}":
    "{0} 不是可读取的、含有 transformer 或 U-Net 的 diffusers 文件夹：{1} 缺少 .safetensors 文件。{2} {3}",
  "Leave the files of one model in {}: {} contains it more than once, as {}, and the choice is ambiguous.":
    "请在 {0} 中只保留一份模型的文件：{1} 中的模型不止一份（{2}），不清楚用哪一份。",
  "{} {} is incomplete: {} has {} of {} shards, including {}.":
    "{0} {1} 不完整：{2} 有 {4} 个分片中的 {3} 个，其中有 {5}。",
  "{} {} is not a JSON file that can be read ({}).":
    "{0} {1} 不是可读取的 JSON 文件（{2}）。",
  "Download {} again, it is cut short: its header promises {} bytes and the file has {}.":
    "请重新下载 {0}，它被截断：文件头说明有 {1} 字节，而文件只有 {2}。",
  "Use tensor_degree 1 with pipefusion_degree, cfg_degree, ulysses_degree or ring_degree, or the bf16, fp16, fp8, int8, mxfp8 or nvfp4 file of the same model: tensor_degree={} cannot shard {}, whose matrix multiplications round each token's inputs by their maximum, since each device would have only some of the inputs.":
    "请使用 tensor_degree 1 与 pipefusion_degree、cfg_degree、ulysses_degree 或 ring_degree，或同一模型的 bf16、fp16、fp8、int8、mxfp8 或 nvfp4 文件：tensor_degree={0} 不能拆分 {1}，它的乘积按每个 token 输入中的最大值舍入，而每个设备只有其中一部分。",
  "Use the bf16, fp8 or GGUF file of the same model: {} has weights in mxfp8, which need PyTorch 2.7 or newer, and this is {}.":
    "请使用同一模型的 bf16、fp8 或 GGUF 文件：{0} 含有 mxfp8 的权重，需要 PyTorch 2.7 或更新版本，而这里是 {1}。",
  "Install with: python -m pip install -U {} (with ComfyUI's Python), and restart ComfyUI; or choose another weight_dtype: {} needs the package {}, which this Python does not have, or not for its PyTorch.":
    "请安装：python -m pip install -U {0}（用 ComfyUI 的 Python），并重新启动 ComfyUI；或选择其他 weight_dtype：{1} 需要软件包 {2}，而此 Python 中没有，或没有适合其 PyTorch 的版本。",
  "Install or update comfy-kitchen: python -m pip install -U comfy-kitchen (with ComfyUI's Python), and restart ComfyUI; or use the bf16, fp8 or GGUF file of the same model: {} has weights in {}, which need this package in the version of ComfyUI's requirements.":
    "请安装：python -m pip install -U comfy-kitchen（用 ComfyUI 的 Python），并重新启动 ComfyUI，或使用同一模型的 bf16、fp8 或 GGUF 文件：{0} 含有 {1} 的权重，需要 ComfyUI 所要求版本的 comfy-kitchen。",
  "Use a file of this model in F32, F16, BF16 or {}: {} holds {} in the type {}, which xDiT does not read.":
    "请使用此模型的 F32、F16、BF16 或 {0} 文件：{1} 中的 {2} 为 {3} 类型，xDiT 不能读取。",
  "Download {} again: {} has the shape {} in {}{}, which do not match.":
    "请重新下载 {0}：其中形状为 {2} 的 {1} 占 {3}{4}，不相符。",
  "Download {} again: {} starts at byte {}, within {}.":
    "请重新下载 {0}：其中 {1} 从第 {2} 字节开始，位于 {3} 之内。",
  "Install the package gguf, which GGUF files need: python -m pip install -r requirements.txt (in the folder of the xDiT nodes, with ComfyUI's Python), and restart ComfyUI.":
    "请安装 GGUF 文件所需的软件包 gguf：在 xDiT 节点的文件夹中用 ComfyUI 的 Python 运行 python -m pip install -r requirements.txt，然后重新启动 ComfyUI。",
  "Download {} again: it has a header that cannot be read ({}).":
    "请重新下载 {0}：它的文件头无法读取（{1}）。",
  "Use another file of this model, or Load Diffusion Model: {} does not fit {}: {} tensors are missing ({} ...), {} are unknown ({} ...).":
    "请使用此模型的其他文件，或“UNet加载器”：{0} 与 {1} 不符：缺少 {2} 个张量（{3} ...），{4} 个未知（{5} ...）。",
  "Download {} again, or choose another file: it lacks the tensor {}, which a {} model needs.":
    "请重新下载 {0}，或选择其他文件：它缺少 {2} 模型需要的张量 {1}。",
  "Download {} again, or choose another file: it looks like a {} model, but its tensors have shapes that none has ({}).":
    "请重新下载 {0}，或选择其他文件：它看起来是 {1} 模型，但其张量的形状不属于任何一个（{2}）。",
  "Download {} again, or choose another folder: settings of its config.json are of other types than diffusers writes ({}).":
    "请重新下载 {0}，或选择其他文件夹：其 config.json 中设置的类型与 diffusers 写入的不同（{1}）。",
  "Download the folder again, or choose another: {} is a model of {} whose config.json says {} = {}, and its tensors are of {}.":
    "请重新下载文件夹，或选择其他的：{0} 是 {1} 模型，其 config.json 写明 {2} = {3}，而它的张量是 {4}。",
  "Use another model, or Load Diffusion Model: {} is a model of {} whose config.json says {} = {}, and xDiT runs {} with {} only.":
    "请使用其他模型，或“UNet加载器”：{0} 是 {1} 模型，其 config.json 写明 {2} = {3}，而 xDiT 只在 {5} 时运行 {4}。",
  "Download {} again, or choose another file: it {}: {}{}.":
    "请重新下载 {0}，或选择其他文件：{1}：{2}{3}。",
  "{} is not a diffusion model that xDiT runs. {} {}":
    "{0} 不是 xDiT 能运行的扩散模型。{1} {2}",
  "{} is the folder of a U-Net of a kind that xDiT does not run. {}":
    "{0} 是 xDiT 不运行的一种 U-Net 的文件夹。{1}",
  "{} is nearly {} {} model, but {}. Download it again, or choose another file. {}":
    "{0} 接近 {2} 模型，但 {3}。请重新下载，或选择其他文件。{4}",
  "{} is {} {} model, but {}.":
    "{0} 是 {2} 模型，但 {3}。",
  "Choose another folder: the files of {} have headers of {} bytes, and at most {} are read.":
    "请选择另一个文件夹：{0} 中各文件的文件头共有 {1} 字节，而最多读取 {2} 字节。",
  "Choose another folder: the files of {} have more than {} tensors.":
    "请选择另一个文件夹：{0} 中的文件有超过 {1} 个张量。",
  "Check that {} is there, and that this user may read it, or choose another: it cannot be opened ({}).":
    "请检查 {0} 是否存在、当前用户是否有权读取，或选择另一个：无法打开它（{1}）。",
  "Download {} again: it has a header of {} bytes, and at most {} are read.":
    "请重新下载 {0}：它的文件头有 {1} 字节，而最多读取 {2} 字节。",
  "Download {} again: it is empty.":
    "请重新下载 {0}：它是空的。",
  "Log in where it is from, and download {} again: it is a web page, which some sites send in place of a file that needs a login.":
    "请在来源网站登录后重新下载 {0}：它是网页，有些网站会用它代替需要登录的文件。",
  "Choose a .safetensors file of a diffusion model: {} is not a safetensors file.":
    "请选择扩散模型的 .safetensors 文件：{0} 不是 safetensors 文件。",
  "Use the bf16, fp16, fp8 (plain or scaled), int8 or GGUF file of the same model: {} {}.":
    "请使用同一模型的 bf16、fp16、fp8（普通或 scaled）、int8 或 GGUF 文件：{0} {1}。",
  "Download {} again: its quantisation metadata cannot be read ({}: {}).":
    "请重新下载 {0}：它的量化元数据无法读取（{1}：{2}）。",
  "Download {} again: it lacks {}.":
    "请重新下载 {0}：它缺少 {1}。",
  "Use {}tensor_degree 1 with pipefusion_degree, or weights in bf16, fp16, fp8{}: tensor_degree={} cannot shard these quantised weights, as {} has {} inputs, in blocks of {}, and each device needs whole blocks.":
    "请使用 {0}tensor_degree 1 与 pipefusion_degree，或 bf16、fp16、fp8{1} 的权重：tensor_degree={2} 不能拆分这些量化的权重，因为 {3} 有 {4} 个输入，每块 {5} 个，而每个设备需要完整的块。",
  "Use tensor_degree 1, and pipefusion_degree to split the weights: tensor parallelism does not know layer {} of a {}.":
    "请使用 tensor_degree 1，并用 pipefusion_degree 拆分权重：张量并行不认识 {1} 的层 {0}。",
  "Download the whole folder, or use the file of this model in ComfyUI's format: {} is a model of {}, whose variants only a folder with vae/config.json tells from each other.":
    "请下载整个文件夹，或使用此模型的 ComfyUI 格式文件：{0} 是 {1} 模型，只有带 vae/config.json 的文件夹才能说明是其中哪一个。",
  "Download {} again: it has metadata that cannot be read ({}).":
    "请重新下载 {0}：它的元数据无法读取（{1}）。",
  "Use Load Diffusion Model: {} is a model of {} whose metadata says {} = {}, and xDiT runs {} only.":
    "请使用“UNet加载器”：{0} 是 {1} 模型，其元数据写明 {2} = {3}，而 xDiT 只在 {4} 时运行。",
  "Use VAE Decode or VAE Encode for this VAE, which xDiT cannot run. {} Distributed VAE Decode and Encode work with the VAEs of {}.":
    "请对此 VAE 使用“VAE解码”或“VAE编码”，xDiT 不能运行它。{0} 分布式 VAE 解码和编码支持 {1} 的 VAE。",
  "Set mode to auto: no degrees make these settings work here.":
    "请把 mode 设为 auto：没有并行度能使这些设置在这里可用。",
  "Set devices to \"auto\", or to names with commas such as \"cuda:0,cuda:1\": devices is empty.":
    "请把 devices 设为“auto”，或设为用逗号分隔的设备名称，例如“cuda:0,cuda:1”：devices 为空。",
  "Name \"cpu\" at most {} times, once for each core that may be used here: devices=\"{}\" names it {} times.":
    "请最多写 {0} 次“cpu”，即这里可用的每个核心一次：devices=\"{1}\" 写了 {2} 次。",
  "Name each GPU once, for one worker: devices=\"{}\" names {} {} times.":
    "每个 GPU 请只写一次，供一个工作进程使用：devices=\"{0}\" 把 {1} 写了 {2} 次。",
  "Name devices of one kind: devices=\"{}\" mixes CPU and CUDA workers.":
    "请只写一种设备：devices=\"{0}\" 混用了 CPU 和 CUDA 工作进程。",
  "Name a device of this machine too, which has {}: devices=\"{}\" names none.":
    "请至少写上一个本机的设备，本机有 {0}：devices=\"{1}\" 中没有。",
  "Set forecast_keys_values to a number from 0 to 1: forecast_keys_values={} is outside this range.":
    "请把 forecast_keys_values 设为 0 到 1 之间的数：forecast_keys_values={0} 超出此范围。",
  "Set {} to {}: {}=\"{}\" is none of these.":
    "请把 {0} 设为 {1} 之一：{2}=\"{3}\" 不是其中之一。",
  "Set num_patches and warmup_steps to 0 or more: num_patches={} and warmup_steps={} must not be negative.":
    "请把 num_patches 和 warmup_steps 设为 0 或更大：num_patches={0} 和 warmup_steps={1} 不能为负。",
  "Give stage_blocks one number a stage, or leave it empty: stage_blocks=\"{}\" has {} stages, and pipefusion_degree={}.":
    "请为 stage_blocks 的每级给一个数，或留空：stage_blocks=\"{0}\" 写了 {1} 级，而 pipefusion_degree={2}。",
  "Set displaced_degree or pipefusion_degree to 1: displaced_degree={} and pipefusion_degree={} both use activations of the previous step, and together a stage's would be two steps old.":
    "请把 displaced_degree 或 pipefusion_degree 设为 1：displaced_degree={0} 和 pipefusion_degree={1} 都使用上一步的激活值，同时使用时一级的激活值会落后两步。",
  "Set cfg_degree to 1 or 2, as guidance has two branches: cfg_degree={} is not supported.":
    "请把 cfg_degree 设为 1 或 2，因为引导有两个分支：不支持 cfg_degree={0}。",
  "Set mode to auto, or for example {}: the degrees ({}) multiply to {}, and there {}.":
    "请把 mode 设为 auto，或例如 {0}：各并行度（{1}）的乘积为 {2}，而{3}。",
  "is 1 device":
    "有 1 个设备",
  "are {} devices":
    "有 {0} 个设备",
  "Set num_patches to 1, with which stages wait for each other, use tensor_degree, or set approximate to allowed: approximate=\"{}\" and pipefusion_degree={}, whose patches use keys and values of the previous step.":
    "请使用 tensor_degree，或 num_patches 1（各级互相等待），或把 approximate 设为 allowed：approximate=\"{0}\" 而 pipefusion_degree={1}：它的各块使用上一步的键和值。",
  "Set exchange to {}, or approximate to allowed: approximate=\"{}\" and exchange=\"{}\", which rounds the tensors that devices exchange to 8 bits.":
    "请把 exchange 设为 {0}，或把 approximate 设为 allowed：approximate=\"{1}\" 而 exchange=\"{2}\"：它把设备间交换的张量舍入到 8 位。",
  "Set sparse_attention to {}, or approximate to allowed: approximate=\"{}\" and sparse_attention=\"{}\", which changes the image.":
    "请把 sparse_attention 设为 {0}，或把 approximate 设为 allowed：approximate=\"{1}\" 而 sparse_attention=\"{2}\"：它会改变图像。",
  "Set displaced_degree to 1, or sparse_attention to {}: displaced_degree={}, which does not run with sparse_attention=\"{}\".":
    "请把 displaced_degree 设为 1，或把 sparse_attention 设为 {0}：displaced_degree={1} 不能与 sparse_attention=\"{2}\" 一起使用。",
  "Set {} in sparse_settings to a number from {} to {}: sparse_settings has \"{}\".":
    "请把 sparse_settings 中的 {0} 设为 {1} 到 {2} 之间的数：sparse_settings 中有 \"{3}\"。",
  "Set dense_blocks in sparse_settings to blocks separated by spaces, such as \"0 1 47-49\": sparse_settings has \"{}\".":
    "请把 sparse_settings 中的 dense_blocks 设为用空格分隔的块，例如 \"0 1 47-49\"：sparse_settings 中有 \"{0}\"。",
  "Set sink_conditioning in sparse_settings to {}: sparse_settings has \"{}\".":
    "请把 sparse_settings 中的 sink_conditioning 设为 {0}：sparse_settings 中有 \"{1}\"。",
  "Give sparse_settings as \"name=value\" separated by commas, with the names {}: sparse_settings has \"{}\".":
    "请以逗号分隔的 \"name=value\" 填写 sparse_settings，可用的名称为 {0}：sparse_settings 中有 \"{1}\"。",
  "Set sparse_attention to {}: {} has no self-attention over all tokens of the image, which sparse_attention=\"{}\" is about.":
    "请把 sparse_attention 设为 {0}：{1} 没有对图像所有 token 的自注意力，而 sparse_attention=\"{2}\" 针对的正是它。",
  "Set displaced_mode to full_sync, or approximate to allowed: approximate=\"{}\" and displaced_degree={}, and with displaced_mode {} devices use rows of the previous step.":
    "请把 displaced_mode 设为 full_sync，或把 approximate 设为 allowed：approximate=\"{0}\" 而 displaced_degree={1}：displaced_mode 为 {2} 时，设备使用上一步的行。",
  "Set pipefusion_degree to at most {}: pipefusion_degree={} is more than {}'s {} blocks.":
    "请把 pipefusion_degree 设为最多 {0}：pipefusion_degree={1} 多于 {2} 的 {3} 个块。",
  "Give stage_blocks numbers that add up to {}, or leave it empty to balance the stages: stage_blocks=\"{}\" adds up to {}, and this {} model has {} blocks.":
    "请为 stage_blocks 给出总和为 {0} 的数，或留空以自动平衡各级：stage_blocks=\"{1}\" 总和为 {2}，而此 {3} 模型有 {4} 个块。",
  "Set tensor_degree to {}: tensor_degree={} does not divide {}'s {}.":
    "请把 tensor_degree 设为 {0}：tensor_degree={1} 不能整除 {2} 的 {3}。",
  "Set ulysses_degree to {}, or use ring_degree: ulysses_degree={} does not divide the {} of {}'s {} attention heads that a rank has with tensor_degree={}.":
    "请把 ulysses_degree 设为 {0}，或改用 ring_degree：ulysses_degree={1} 不能整除 {3} 的 {4} 个注意力头中每个进程在 tensor_degree={5} 时所有的 {2} 个。",
  "Set weights_memory to a number of GB above 0, such as \"10\", to \"auto\" or to \"{}\": weights_memory=\"{}\" is none of these.":
    "请把 weights_memory 设为大于 0 的 GB 数，例如“10”，或“auto”，或“{0}”：weights_memory=\"{1}\" 都不是。",
  "Give stage_blocks one number a stage with commas, such as \"20,37\", or leave it empty: stage_blocks=\"{}\" is not a list of block counts of at least 1.":
    "请为 stage_blocks 的每级写一个数，用逗号分隔，例如“20,37”，或留空：stage_blocks=\"{0}\" 不是块数（至少为 1）的列表。",
  "Set devices to \"auto\", or to names such as \"cuda:0,cuda:1\" or \"cpu,cpu\"; those of another machine with its name, \"cuda:0,other-pc/cuda:0\": in devices=\"{}\", \"{}\" is not a device.":
    "请把 devices 设为“auto”，或“cuda:0,cuda:1”、“cpu,cpu”这样的名称，其他机器的设备写上机器名，“cuda:0,other-pc/cuda:0”：devices=\"{0}\" 中的“{1}”不是设备。",
  "Set devices to \"{}\" and the degrees to a product of {}, or mode to \"auto\" to use the devices of this machine: devices=\"{}\" names {}, and this machine has {}.":
    "请把 devices 设为“{0}”，并使并行度的乘积为 {1}，或把 mode 设为“auto”以使用本机的设备：devices=\"{2}\" 写有 {3}，而本机有 {4}。",
  "Set {} to 1 or more, where 1 switches the method off: {}={} is less.":
    "请把 {0} 设为 1 或更大，1 表示不使用该方法：{1}={2} 更小。",
  "Set ulysses_degree to {}, or use ring_degree: ulysses_degree={} does not divide {}'s {} attention heads.":
    "请把 ulysses_degree 设为 {0}，或改用 ring_degree：ulysses_degree={1} 不能整除 {2} 的 {3} 个注意力头。",
  "Shorten the prompt: it has {} words, and the demo model reads at most {}.":
    "请缩短：此提示词有 {0} 个词；演示模型最多读取 {1} 个。",
  "Set {}_degree to 1, and use {}: {}_degree={} is not supported for {}: {}.":
    "请把 {0}_degree 设为 1，并使用 {1}：{4} 不支持 {2}_degree={3}：{5}。",
  "Set {} to 1, and use cfg_degree, data_degree or displaced_degree: {}={} splits the tokens or blocks of a transformer, and {} is a U-Net, which has no single sequence of either.":
    "请把 {0} 设为 1，并使用 cfg_degree、data_degree 或 displaced_degree：{1}={2} 拆分 transformer 的 token 或块，而 {3} 是 U-Net，没有单一的 token 序列或块序列。",
  "Use ulysses_degree instead of ring_degree, or another weight_dtype: Ring attention on CUDA takes float16, bfloat16 and float32, and this model computes in {}.":
    "请用 ulysses_degree 代替 ring_degree，或换用其他 weight_dtype：CUDA 上的 Ring 注意力支持 float16、bfloat16 和 float32，而此模型以 {0} 计算。",
  "Use cfg_degree instead: this model masks its self-attention by a tensor of shape {} and dtype {}, which sequence parallelism and PipeFusion cannot split.":
    "请改用 cfg_degree：此模型用形状为 {0}、类型为 {1} 的张量遮盖自注意力，序列并行和 PipeFusion 不能拆分它。",
  "Use degrees whose product is {}, or a group on as many devices as the layout needs: the layout ({}) is for {} workers, and this group has {}.":
    "请使用乘积为 {0} 的并行度，或布局所需数量的设备：布局（{1}）适用于 {2} 个工作进程，而此组有 {3} 个。",
  "Use VAE Decode: a convolution with dilation={} cannot be split.":
    "请使用“VAE解码”：dilation={0} 的卷积不能拆分。",
  "Use VAE Decode: a convolution with {}=\"{}\" cannot be split.":
    "请使用“VAE解码”：{0}=\"{1}\" 的卷积不能拆分。",
  "{}: cannot be read ({}).":
    "{0}：无法读取（{1}）。",
  "{}: is not JSON ({}).":
    "{0}：不是 JSON（{1}）。",
  "Use {}: {} needs about {} GB on {} ({}), and that has {} GB.":
    "请使用 {0}：{1} 在 {3} 上需要约 {2} GB（{4}），而它有 {5} GB。",
  "Unset the attention backend that is selected for diffusers in the workers, or use one device: the attention {} of block {} did not call PyTorch's scaled_dot_product_attention, which parallel methods replace.":
    "请取消为工作进程中的 diffusers 选择的注意力后端，或使用单个设备：第 {1} 块的注意力 {0} 没有调用 PyTorch 的 scaled_dot_product_attention，而并行方法正是替换它。",
  "Unset the attention backend that is selected for diffusers in the workers, or use one device: the attention {} did not call PyTorch's scaled_dot_product_attention.":
    "请取消为工作进程中的 diffusers 选择的注意力后端，或使用单个设备：注意力 {0} 没有调用 PyTorch 的 scaled_dot_product_attention。",
  "Use cfg_degree instead: this model masks its self-attention in a way that sequence parallelism and PipeFusion do not support yet.":
    "请改用 cfg_degree：此模型遮盖自注意力的方式尚不被序列并行和 PipeFusion 支持。",
  "Use cfg_degree: this model masks its self-attention, which displaced_degree does not support.":
    "请使用 cfg_degree：此模型遮盖自注意力，displaced_degree 不支持。",
  "Use cfg_degree or data_degree: {} is run by {}, which does not use torch's attention and would see this rank's rows only.":
    "请使用 cfg_degree 或 data_degree：{0} 由 {1} 运行，它不使用 torch 的注意力，只会看到本进程的行。",
  "Queue the prompt again to start a new worker group: the workers that cached this run's tensors have ended.":
    "请再次排队以启动新的一组工作进程：缓存此次运行张量的工作进程已结束。",
  "{} ended while loading its libraries{}. {}\n{}":
    "{0} 在加载其库时结束{1}。{2}\n{3}",
  "{} ended while starting{}. {} {}Its last lines:\n{}":
    "{0} 在启动时结束{1}。{2} {3}最后几行输出：\n{4}",
  "{}: not ready after {} s. {} {}Their last lines:\n{}":
    "{0}：{1} 秒后仍未就绪。{2} {3}最后几行输出：\n{4}",
  "{} {}. Queue the prompt again to start a new group. {} {}Its last lines:\n{}":
    "{0} {1}。请再次排队以启动新的一组。{2} {3}最后几行输出：\n{4}",
  "a worker ended in a transfer between them, with these last lines of output:\n{}\n":
    "一个工作进程在它们之间传输时结束，最后几行输出为：\n{0}\n",
  "{} cannot exchange tensors: {} {}{}":
    "{0} 不能交换张量：{1} {2}{3}",
  "Worker {} {}. Queue the prompt again to start a new group. {} {}Its last lines:\n{}":
    "工作进程 {0} {1}。请再次排队以启动新的一组。{2} {3}最后几行输出：\n{4}",
  "Install PyTorch {} or newer with ComfyUI's Python, as pytorch.org says, then restart ComfyUI: on Windows, PyTorch {} to before {} cannot connect workers (unsupported gloo device), and {} is installed.":
    "请按 pytorch.org 的说明用 ComfyUI 的 Python 安装 PyTorch {0} 或更新版本，然后重启 ComfyUI：在 Windows 上，PyTorch {1} 至 {2} 之前的版本无法连接工作进程（unsupported gloo device），而已安装的是 {3}。",
  "Close other programs, or enlarge the page file: Windows can give programs {} more memory, and at least {} are needed for tensors that travel between ComfyUI and the workers.":
    "请关闭其他程序，或增大页面文件：Windows 还能分配给程序 {0} 内存，而在 ComfyUI 与工作进程之间传递的张量至少需要 {1}。",
  "The workers have ended{}. Queue the prompt again to start a new group.":
    "工作进程已结束{0}。请再次排队以启动新的一组。",
  "Install a PyTorch for your GPUs, as pytorch.org says, or set devices to \"cpu\": {} cannot be used, as this PyTorch ({}) is built for CPUs.":
    "请按 pytorch.org 的说明安装适用于您的 GPU 的 PyTorch，或把 devices 设为“cpu”：{0} 不可用，因为此 PyTorch（{1}）是为 CPU 构建的。",
  "Set devices in xDiT Parallel Config to \"auto\", or to devices of this machine: there is no {}. PyTorch finds {}.":
    "请在“xDiT 并行配置”中把 devices 设为“auto”，或设为本机的设备：这里没有 {0}。PyTorch 找到 {1}。",
  "Close other programs, unload ComfyUI's models in its menu, or give the container or WSL2 more memory: {} workers need at least {} of system RAM before they load a model, and {} of {} are free.":
    "请关闭其他程序，在 ComfyUI 的菜单中卸载模型，或给容器或 WSL2 更多内存：{0} 个工作进程在加载模型之前至少需要 {1} 系统内存，而 {3} 中有 {2} 空闲。",
  "Delete unneeded files in {}: it is full, and the workers connect to ComfyUI through files there. In Docker, --shm-size=2g enlarges /dev/shm.":
    "请删除 {0} 中不需要的文件：它已满，而工作进程通过其中的文件连接 ComfyUI。在 Docker 中，--shm-size=2g 使 /dev/shm 更大。",
  "Free some space: tensors travel between ComfyUI and the workers through {}, which has {} free, or {}, which has {}; at least {} are needed. In Docker, --shm-size=2g enlarges /dev/shm.":
    "请释放一些空间：张量通过 {0}（空闲 {1}）或 {2}（空闲 {3}）在 ComfyUI 与工作进程之间传送；至少需要 {4}。在 Docker 中，--shm-size=2g 使 /dev/shm 更大。",
  "Update {} with ComfyUI's Python (python -m pip install --upgrade {}), then restart ComfyUI: the workers need {} or newer, and {} is installed.":
    "请用 ComfyUI 的 Python 更新 {0}（python -m pip install --upgrade {1}），然后重新启动 ComfyUI：工作进程需要 {2} 或更新版本，而安装的是 {3}。",
  "Install with ComfyUI's Python, in the folder of the xDiT nodes (python -m pip install -r requirements.txt): the workers need {} {} or newer, and this Python does not have it.":
    "请用 ComfyUI 的 Python 在 xDiT 节点的文件夹中安装（python -m pip install -r requirements.txt）：工作进程需要 {0} {1} 或更新版本，而此 Python 中没有。",
  "Make sure that this user can write to {}, that there is free space, and that the paths are short: the workers cannot be started ({}). {}":
    "请确认当前用户可以写入 {0}，其中有空闲空间，并且路径较短：工作进程无法启动（{1}）。{2}",
  "Leave {} out of the devices: only ComfyUI's nodes can use devices of other machines.":
    "请从设备中去掉 {0}：只有 ComfyUI 的节点可以使用其他机器的设备。",
  "Queue the prompt again to start a new worker group: the workers have ended.":
    "请再次排队以启动新的一组工作进程：工作进程已结束。",
  "Copy the whole key again, which has 64 characters: python -m xdit_backend key shows it on the machine with ComfyUI. These {} characters are not a key.":
    "请重新复制整个密钥，它有 64 个字符：在运行 ComfyUI 的机器上，python -m xdit_backend key 会显示它。这 {0} 个字符不是密钥。",
  "Run this as the user who runs ComfyUI: the key in {} cannot be read ({}).":
    "请以运行 ComfyUI 的用户运行此命令：{0} 中的密钥无法读取（{1}）。",
  "Allow this user to write to {}, and free some space there: the key for other machines to join cannot be stored ({}).":
    "请允许当前用户写入 {0}，并在那里留出空间：供其他机器加入的密钥不能保存（{1}）。",
  "Install openssl, such as with apt install openssl, or on Windows the package cryptography (python -m pip install cryptography): other machines join over TLS, and neither, which creates the certificate, is installed.":
    "请安装 openssl，例如 apt install openssl；在 Windows 上请安装 cryptography 包（python -m pip install cryptography）：其他机器通过 TLS 加入，而创建证书的这两者都没有安装。",
  "openssl could not create a certificate for other machines to join: {}":
    "openssl 不能为其他机器的加入生成证书：{0}",
  "Set one of {} in Settings > xDiT: no network interface of this machine has the address {}, at which others joined.":
    "请在 设置 > xDiT 中设为 {0} 之一：本机没有网络接口具有其他机器加入时所用的地址 {1}。",
  "{} has not joined after {} s.{} On the machine with ComfyUI, in the folder of the xDiT nodes, run:\n{}\nIt shows what to run on {}, which needs the xDiT nodes, the same versions of {}, and the model files, but not ComfyUI. When {} says that it has joined, queue the prompt again. If it cannot connect, let port {} through the firewall here. Or leave {} out of devices in xDiT Parallel Config.":
    "{0} 在 {1} 秒后仍未加入。{2} 请在运行 ComfyUI 的机器上 xDiT 节点的文件夹中运行：\n{3}\n它会显示要在 {4} 上运行的命令；那台机器需要 xDiT 节点、相同版本的 {5} 以及模型文件，但不需要 ComfyUI。当 {6} 说已加入时，请再次排队。若不能连接，请在本机的防火墙中放行端口 {7}。或在“xDiT 并行配置”的 devices 中去掉 {8}。",
  "waiting for {} to join. To see what to run there, run this on the machine with ComfyUI, in the folder of the xDiT nodes: {}":
    "正在等待 {0} 加入。要查看在那里运行的命令，请在运行 ComfyUI 的机器上 xDiT 节点的文件夹中运行：{1}",
  "Give one address of this machine at which others could join, such as {}; a port may follow, \"{}:{}\": \"{}\" is not one.":
    "请给出一个其他机器可以加入的本机地址，例如 {0}；后面可写端口，“{1}:{2}”：“{3}”不是这样的地址。",
  "Set one of {} in Settings > xDiT, with another port, such as {}:{}, if this one is taken: other machines cannot join at {} ({}).":
    "请在 设置 > xDiT 中设为 {0} 之一；若此端口已被占用，请用其他端口，例如 {1}:{2}：其他机器不能在 {3} 加入（{4}）。",
  "Use fewer frames, or a smaller width and height: this {} model has positions for {}, and the latent has {}.":
    "请减少帧数，或减小宽度和高度：此 {0} 模型只有 {1} 的位置，而 latent 为 {2}。",
  "Use the CLIP of HunyuanDiT's checkpoint, and CLIP Text Encode: HunyuanDiT takes two texts with masks, of at least {} and {} tokens, and the conditioning has {}.":
    "请使用 HunyuanDiT checkpoint 中的 CLIP，以及“CLIP 文本编码”：HunyuanDiT 接受两段文本，至少 {0} 和 {1} 个 token，并说明其中哪些有效，而条件中有 {2}。",
  "Use the latent that Kandinsky5ImageToVideo returns: its conditioning frames have {} rows and columns, and the latent has {}.":
    "请使用 Kandinsky5ImageToVideo 给出的 latent：其条件帧有 {0} 行和列，而 latent 有 {1}。",
  "Use an empty image latent, with batch_size for several images: Krea 2 generates images, and this latent has {} frames.":
    "请使用图像的空 latent，要多张则用 batch_size：Krea 2 生成图像，而此 latent 有 {0} 帧。",
  "Use a latent of {} frames, which is a length of {} in EmptyHunyuanLatentVideo: Latte generates videos of {} frames, or images of one, and the latent has {}.":
    "请使用 {0} 帧的 latent，即 EmptyHunyuanLatentVideo 中 length 为 {1}：Latte 生成 {2} 帧的视频或一帧的图像，而 latent 有 {3} 帧。",
  "Use the publisher's file: the metadata of this LTX-2 file contradicts its tensors ({}), as if it were missing or from another file.":
    "请使用发布者的文件：此 LTX-2 文件的元数据与其张量矛盾（{0}）：元数据可能缺失，或来自其他文件。",
  "Use a text encoder that pads at the end, or Load Diffusion Model: the conditioning's attention mask excludes text tokens before the last real one, which xDiT does not support for Mochi.":
    "请使用在末尾填充的文本编码器，或“UNet加载器”：条件的注意力掩码排除了最后一个有效文本 token 之前的 token，xDiT 对 Mochi 不支持这一点。",
  "Use sides that are multiples of 16, and together at least 528: PixArt cannot generate {} x {} pixels.":
    "请使用 16 的倍数、且两边之和至少为 528 的边长：PixArt 不能生成 {0} x {1} 像素。",
  "Use a smaller latent: this SD3 model has positions for {} x {} pixels, and the latent has {} x {}.":
    "请使用更小的 latent：此 SD3 模型有 {0} x {1} 像素的位置，而 latent 为 {2} x {3}。",
  "Use a width and a height that are multiples of 16 pixels: Wan VACE takes latents with even sides, and this one has {} x {}.":
    "请使用 16 像素倍数的宽度和高度：Wan VACE 接受边长为偶数的 latent，而这个为 {0} x {1}。",
  "Use the latent that WanVaceToVideo returns: its control video has {} frames, rows and columns, and the latent has {}.":
    "请使用 WanVaceToVideo 给出的 latent：其控制视频有 {0} 帧、行和列，而 latent 有 {1}。",
  "Use cfg_degree, ulysses_degree or ring_degree instead: this model masks tokens of its image, which PipeFusion does not support yet.":
    "请改用 cfg_degree、ulysses_degree 或 ring_degree：此模型遮盖图像的 token，PipeFusion 尚不支持。",
  "{} for {} s. Queue the prompt again to start a new group. ({})":
    "{0}，已 {1} 秒。请再次排队以启动新的一组。（{2}）",
  "Use VAE Decode: {} cannot be split by rows, only {}.":
    "请使用“VAE解码”：{0} 不能按行拆分，只有 {1} 可以。",
  "Call vae.disable_tiling() first: tiling is enabled, and decoding by rows is exact, unlike blended tiles.":
    "请先调用 vae.disable_tiling()：分块已启用，而按行解码是精确的，混合的分块则不是。",
  "Use VAE Decode: {} padding by {} with {} cannot be split.":
    "请使用“VAE解码”：以 {2} 填充 {1} 的 {0} 不能拆分。",
  "Use VAE Decode: upsampling with mode={}, size={}, scale_factor={} cannot be split, only nearest by a whole factor.":
    "请使用“VAE解码”：mode={0}、size={1}、scale_factor={2} 的上采样不能拆分，只有整数倍的 nearest 可以。",
  "Use VAE Decode: masked attention in a VAE cannot be split.":
    "请使用“VAE解码”：VAE 中带掩码的注意力不能拆分。",
  "Use AttnProcessor2_0: {} is {}, which does not use torch's attention and would see this rank's rows only.":
    "请使用 AttnProcessor2_0：{0} 是 {1}，它不使用 torch 的注意力，只会看到本进程的行。",
  "Use a larger latent or lower degrees: it has {} {}, too few for ulysses_degree x ring_degree = {}.":
    "请使用更大的 latent 或更小的并行度：latent 有 {0} {1}，对 ulysses_degree x ring_degree = {2} 太少。",
  "Set pipefusion_degree to at most {}: pipefusion_degree={} is more than the model's {} blocks.":
    "请把 pipefusion_degree 设为最多 {0}：pipefusion_degree={1} 多于模型的 {2} 个块。",
  "Join the prompts as text, in one Text Encode node: the conditioning has {} text tokens and an attention mask for {}, which Conditioning (Concat) produces from prompts with masks.":
    "请在一个文本编码节点中把提示词合并为文本：条件有 {0} 个文本 token 和 {1} 的注意力掩码，这是 Conditioning (Concat) 合并带掩码的提示词时产生的。",
  "Use a text encoder whose attention mask has only ones and zeros, or Load Diffusion Model: the conditioning has an attention mask with fractions, which xDiT does not support.":
    "请使用掩码只有 1 和 0 的文本编码器，或“UNet加载器”：条件中的注意力掩码含有小数，xDiT 不支持。",
  "Connect Empty Ace Step 1.0 Latent Audio, or audio encoded by the VAE of ACE-Step: its latents have {} rows, and this one has {}.":
    "请连接空 Ace Step 1.0 音频 latent，或由 ACE-Step 的 VAE 编码的音频：其音频的 latent 有 {0} 行，而这个有 {1} 行。",
  "Use a width and a height that are multiples of {} pixels, as HiDream-O1 needs: this latent has {} x {}.":
    "请使用 {0} 像素倍数的宽度和高度：HiDream-O1 只接受这样的 latent，而这个为 {1} x {2}。",
  "Use a width and a height that are multiples of 16 pixels: {} takes latents with even sides, and this one has {} x {}.":
    "请使用 16 像素倍数的宽度和高度：{0} 接受边长为偶数的 latent，而这个为 {1} x {2}。",
  "Change it in the node that sets it, or use Load Diffusion Model: xDiT runs {} with {} = {}, and this workflow's conditioning has {}.":
    "请在设置它的节点中更改它，或使用“UNet加载器”：xDiT 只在 {1} = {2} 时运行 {0}，而此工作流的条件有 {3}。",
  "Queue the prompt again: the model {} is not loaded on rank {}.":
    "请再次排队：模型 {0} 未加载到 rank {1}。",
  "Close other programs on it (nvidia-smi shows them), unload ComfyUI's models in its menu, or leave it out in xDiT Parallel Config: {} has {} MB of {} GB free, and a worker needs at least {} MB before it loads a model.":
    "请关闭其上的其他程序（nvidia-smi 会显示），在 ComfyUI 的菜单中卸载模型，或在“xDiT 并行配置”中去掉它：{0} 的 {2} GB 中有 {1} MB 空闲，而工作进程在加载模型之前至少需要 {3} MB。",
  "data from {} arrived corrupted on {} (rank {})":
    "来自 {0} 的数据到达 {1}（进程 {2}）时已损坏",
  "Check whether another program uses all of {} (nvidia-smi shows them), or has it in exclusive mode: it cannot be used ({}: {})":
    "请检查是否有其他程序占用了全部 {0}（nvidia-smi 会显示），或使它处于独占模式：它不能使用（{1}：{2}）",
  "Make video and audio with the nodes for LTX-2's latents, and join them with LTXVConcatAVLatent: the latent's components have the shapes {}, and LTX-2 needs a video and audio of (batch, {}, length, {}).":
    "请用 LTX-2 的 latent 节点生成各部分，并用 LTXVConcatAVLatent 连接：latent 各部分的形状为 {0}，而 LTX-2 处理视频和 (batch, {1}, length, {2}) 的音频。",
  "a transfer between {} failed on rank {} with {}: {}":
    "{0} 之间的一次传输在进程 {1} 上以 {2} 失败：{3}",
  "a transfer between them was not complete after {} s on {}.":
    "它们之间的传输在 {0} 秒后仍未完成：{1}。",
  "they had not joined after {} s on {}.":
    "它们在 {0} 秒后仍未加入：{1}。",
  "Remove the environment variable XDIT_TRANSPORT, or set it to one of {}: it is \"{}\", which workers on {} cannot use.":
    "请移除环境变量 XDIT_TRANSPORT，或将其设为以下之一：{0}。其当前值为“{1}”，{2} 上的工作进程无法使用。",
  "rank {} ({}) could not join the others: {}: {}":
    "rank {0}（{1}）无法加入其他进程：{2}：{3}",
  "For a model that ComfyUI itself knows use its own loader and KSampler, on one GPU.":
    "对于 ComfyUI 自己支持的模型，请使用它自己的加载器和 K采样器，在单个 GPU 上运行。",
  "a detection or depth model, which generates no images":
    "检测或深度模型，不生成图像",
  "docs/reference/models.md lists what xDiT runs.":
    "docs/reference/models.md 列出了 xDiT 能运行的模型。",
  "{} is {}. For a model that ComfyUI itself knows use its own loader and KSampler, on one GPU. docs/reference/models.md lists what xDiT runs.":
    "{0} 是{1}。对于 ComfyUI 自己支持的模型，请使用它自己的加载器和 K采样器，在单个 GPU 上运行。docs/reference/models.md 列出了 xDiT 能运行的模型。",
  "{} is {}. docs/reference/models.md lists what xDiT runs.":
    "{0} 是{1}。docs/reference/models.md 列出了 xDiT 能运行的模型。",
  "a U-Net of a kind that xDiT does not run":
    " xDiT 不运行的一种 U-Net",
  "part of a U-Net under diffusers' names, or a quantised one, which xDiT does not read":
    "采用 diffusers 名称的 U-Net 的一部分，或量化的 U-Net，xDiT 不读取",
  "{} is a ControlNet: load it with Load ControlNet Model.":
    "{0} 是 ControlNet：请用“加载 ControlNet 模型”加载。",
  "{} is a LoRA: load it with a LoRA node.":
    "{0} 是 LoRA：请用 LoRA 节点加载。",
  "{} is a text encoder: load it with Load CLIP.":
    "{0} 是文本编码器：请用“加载CLIP”加载。",
  "{} is a CLIP vision model: load it with Load CLIP Vision.":
    "{0} 是 CLIP 视觉模型：请用“加载CLIP视觉”加载。",
  "{} is a VAE: load it with Load VAE.":
    "{0} 是 VAE：请用“加载VAE”加载。",
  "{} is a model under diffusers' names: put it into models/diffusers, in a folder with its config.json.":
    "{0} 是采用 diffusers 名称的模型：请把它与其 config.json 一起放入 models/diffusers 的一个文件夹。",
  "a text encoder or a language model in GGUF":
    " GGUF 格式的文本编码器或语言模型",
  "it lacks {}":
    "它缺少 {0}",
  "its {} has the shape {}, {}":
    "其 {0} 的形状为 {1}，{2}",
  "The VAE in {} ({}) is not one of {}.":
    "{0} 中的 VAE（{1}）不属于 {2}。",
  "Use the file of this model in ComfyUI's format.":
    "请使用此模型的 ComfyUI 格式文件。",
  "more devices, or larger ones":
    "更多或更大的设备",
  "{}, or VAE {} (Tiled): {} needs {} GB on each of {} devices, and {} GB are free.":
    "{0}，或使用 VAE {1}（分块）：{2} 在 {4} 个设备上各需要 {3} GB，而有 {5} GB 空闲。",
  "Use a smaller image or fewer frames: {} needs {} GB on each device, and {} GB are free.":
    "请使用更小的图像或更少的帧：{0} 在每个设备上需要 {1} GB，而有 {2} GB 空闲。",
  "{}, {} devices like these":
    "{0}、{1} 个这样的设备",
  "Use a smaller image":
    "请使用更小的图像",
  "Use an image of at most {} x {} pixels":
    "请使用最大 {0} x {1} 像素的图像",
  "decoding a latent of {} x {}":
    "解码 {0} x {1} 的 latent",
  "encoding {} x {} pixels":
    "编码 {0} x {1} 像素",
  "decoding a latent of {} x {} and {} frames":
    "解码 {0} x {1}、{2} 帧的 latent",
  "encoding {} x {} pixels and {} frames":
    "编码 {0} x {1} 像素、{2} 帧",
  "at most {} x {} pixels instead of {} x {}":
    "最多 {0} x {1} 像素，而不是 {2} x {3}",
  "Check the node that made it, another sampler, or an encode in half precision":
    "请检查生成它的节点：其他采样器，或半精度的编码",
  "Try another weight_dtype than {} in Load xDiT Model, without LoRA":
    "请在“加载 xDiT 模型”中试用 {0} 以外的 weight_dtype，并去掉 LoRA",
  "the prediction of {} at the first step":
    "{0} 在第一步的预测",
  "the latent":
    "Latent 图像",
  "at most {} of the {} images at once":
    "每次最多 {1} 张图像中的 {0} 张",
  "this run ({})":
    "此次运行（{0}）",
  "{} GB of weights":
    "{0} GB 权重",
  "{} GB of keys and values":
    "{0} GB 键和值",
  "{} GB of activations":
    "{0} GB 激活值",
  "running on {}: {}. Plan: {}":
    "在 {0} 上运行：{1}。方案：{2}",
  "running on {}: {}":
    "在 {0} 上运行：{1}",
  "{}. Next best: {} in {}":
    "{0}。次优：{1}，{2}",
  "{}. Next best: {}":
    "{0}。次优：{1}",
  "{}, about {}: one device is as fast":
    "{0}，约 {1}：单个设备同样快",
  "{}, about {}: one device has too little memory":
    "{0}，约 {1}：单个设备内存不足",
  "{}, about {}: one device is about as fast":
    "{0}，约 {1}：单个设备差不多快",
  "{}, about {}x as fast as one device ({}x to {}x, {} instead of {})":
    "{0}，速度约为单个设备的 {1} 倍（{2} 到 {3} 倍，{4} 而不是 {5}）",
  "{}, {} the last time ({}x as fast as one device)":
    "{0}，上次 {1}，速度为单个设备的 {2} 倍",
  "{}, {} the last time":
    "{0}，上次 {1}",
  "Weights: {} GB resident per device, {} GB offloaded to system RAM and streamed {}":
    "权重：每个设备常驻 {0} GB，{1} GB 卸载到内存，{2}",
  "at every step":
    "每一步流式传输",
  "at every step,":
    "每一步流式传输，",
  "for each of {} patches ({} GB per step)":
    "对 {0} 块中的每一块流式传输（每步 {1} GB）",
  "for each of {} patches ({} GB per step),":
    "对 {0} 块中的每一块流式传输（每步 {1} GB），",
  "{}, one shard by each device, which all-gather them":
    "{0}，每个设备读取一个分片，再相互收集（all-gather）",
  "{}, hidden behind compute ({} of {} per step)":
    "{0}，被计算掩盖（每步 {2} 中的 {1}）",
  "{}, transfer-bound: {} of transfers for {} of compute per step.":
    "{0}，受传输限制：每步传输 {1}，计算 {2}。",
  "For a faster run, use smaller weights (fp8, GGUF), fewer devices or pipefusion_degree":
    "要加快运行，请使用更小的权重（fp8、GGUF）、更少的设备或 pipefusion_degree",
  "{} more than fits in free system RAM: read from disk at {} GB/s, {} per step.":
    "{0}超出空闲内存：以 {1} GB/s 从磁盘读取，每步 {2}。",
  "For a faster run, add system RAM or use smaller weights (fp8, GGUF)":
    "要加快运行，请增加内存或使用更小的权重（fp8、GGUF）",
  "one device":
    "单个设备",
  "{}, {} patches":
    "{0}，{1} 个 patch",
  "{}, 1 patch":
    "{0}，1 个 patch",
  "{} (the latent has too few rows for {})":
    "{0}（latent 的行数不够 {1} 个 patch）",
  "{} for speed: a usual image is estimated to take {} instead of {} by {}":
    "{0}，为了速度：估计一张典型图像用 {1}，而 {3} 用 {2}",
  "{}, for speed: close to a single-GPU run ({} dB in the demo model with 4 patches)":
    "{0}，为了速度：图像接近单个设备的（演示模型用 4 个 patch 时 PSNR 为 {1} dB）",
  "{}, keys and values in fp8":
    "{0}，键和值以 fp8 传输",
  "{}, all in fp8":
    "{0}，全部以 fp8 传输",
  "{}, every step synchronous, because this workflow uses {}":
    "{0}，每一步都同步，因为此工作流使用{1}",
  "{}, steps not overlapped, because this workflow uses {}":
    "{0}，各步不重叠，因为此工作流使用{1}",
  "{}, both prompts in one batch, which Normalized Attention Guidance compares":
    "{0}，两个提示词在同一批次中，由 Normalized Attention Guidance 比较",
  "{}, both prompts in one batch, over which Enhance-A-Video averages":
    "{0}，两个提示词在同一批次中，Enhance-A-Video 对其取平均",
  "{} ({} unused: {} is 1)":
    "{0}（{1} 未使用：{2} 为 1）",
  "{} ({} of data_degree={} have no image: set batch_size to {} in the empty latent's node, or use another degree)":
    "{0}（data_degree={2} 中有 {1} 份没有图像：请在空 latent 节点中把 batch_size 设为 {3}，或使用其他并行度）",
  "an area for a prompt":
    "提示词区域",
  "a mask for a prompt":
    "提示词遮罩",
  "hooks on a prompt":
    "提示词上的 hook",
  "context windows":
    "上下文窗口",
  "a node that changes guidance":
    "改变引导的节点",
  "a node that changes the noise mask":
    "改变噪声遮罩的节点",
  "a node that wraps the model's function":
    "包装模型函数的节点",
  "a node that wraps the sampling ({})":
    "包装采样的节点（{0}）",
  "a node that wraps the model's calls":
    "包装模型调用的节点",
  "a node with sampling callbacks":
    "带有采样回调的节点",
  "a node that sets \"{}\" on the MODEL":
    "在 MODEL 上设置“{0}”的节点",
  "a node that replaces {} of the MODEL":
    "替换 MODEL 的 {0} 的节点",
  "dpm_adaptive, which selects its steps by an error over the full latent":
    " dpm_adaptive，它按整个 latent 的误差选择步长",
  "a ControlNet, which reads the full image":
    " ControlNet，它读取整张图像",
  "a latent of several components, which ComfyUI packs into one row for the sampler":
    "由多个部分组成的 latent，ComfyUI 把它们打包成一行交给采样器",
  "a sampler that is not known to work elementwise":
    "不确定是否逐元素工作的采样器",
  "hooks on the model, or a compiled model":
    "模型上的 hook，或编译过的模型",
  "step {} of {}, {} s a step, {} s left, {}":
    "第 {0} 步，共 {1} 步，每步 {2} 秒，剩余 {3} 秒，{4}",
  "1 step in {} s, {} s a step, {}":
    "1 步，用时 {0} 秒，每步 {1} 秒，{2}",
  "{} steps in {} s, {} s a step, {}":
    "{0} 步，用时 {1} 秒，每步 {2} 秒，{3}",
  "sdpa": "PyTorch 自带（sdpa）",
  "sdpa ({})": "PyTorch 自带（sdpa，{0}）",
  "sdpa {}": "PyTorch 自带（sdpa）{0}",
  "sdpa ({}) {}": "PyTorch 自带（sdpa，{0}）{1}",
  "{} %, {}": "{0} % 与 {1}",
  "masks": "有掩码",
  "no tokens": "没有 token",
  "this device": "设备不支持",
  "heads of {}": "头的大小为 {0}",
  "no flash": "没有 flash",
  "no flash3": "没有 flash3",
  "no sage": "没有 sage",
  "no xformers": "没有 xformers",
  "no comfy_kitchen_int8": "没有 comfy_kitchen_int8",
  "{}, attention by {}":
    "{0}，注意力由 {1} 计算",
  "{}; {}x one GPU, measured here on {}":
    "{0}；速度为单个 GPU 的 {1} 倍，于 {2} 在本机测得",
  "{}; {}x one GPU, measured here on {} (estimate: {} s a step)":
    "{0}；速度为单个 GPU 的 {1} 倍，于 {2} 在本机测得（估计：每步 {3} 秒）",
  "{}; {}x one device, measured here on {}":
    "{0}；速度为单个设备的 {1} 倍，于 {2} 在本机测得",
  "{}; {}x one device, measured here on {} (estimate: {} s a step)":
    "{0}；速度为单个设备的 {1} 倍，于 {2} 在本机测得（估计：每步 {3} 秒）",
  "{}, compiled blocks (estimated to save {} in {} steps; compiling takes {})":
    "{0}，编译的块（估计在 {2} 步中节省 {1}；编译需要 {3}）",
  "{}, compiled blocks (estimated to save {} in {} steps)":
    "{0}，编译的块（估计在 {2} 步中节省 {1}）",
  "{} (estimate: {} s a step)":
    "{0}（估计：每步 {1} 秒）",
  "ending the check of the devices, which uses their memory":
    "正在结束对设备的检查，它占用设备的内存",
  "Wait for the report, or cancel it: it is still running.":
    "请等待报告完成，或取消它：它仍在运行。",
  "reading the machine":
    "正在读取本机信息",
  "starting the workers":
    "正在启动工作进程",
  "check {} of {}: {}":
    "检查 {0} / {1}：{2}",
  "timing the links: {}":
    "正在测量连接：{0}",
  "{}: loading for {}":
    "{0}：正在为 {1} 加载",
  "{}: {}, round {} of {}":
    "{0}：{1}，第 {2} 轮，共 {3} 轮",
  "Nothing was checked.":
    "未做检查。",
  "All {} checks passed: every method gives one device's result on this machine.":
    "全部 {0} 项检查通过：在本机上，每种方法都得到与单个设备相同的结果。",
  "{} of {} checks failed: {}.":
    "{1} 项检查中有 {0} 项失败：{2}。",
  "No method was timed on several devices.":
    "没有在多个设备上对任何方法计时。",
  "No method is faster than one device here.":
    "在本机上没有方法比单个设备快。",
  "The fastest method is {}.":
    "最快的方法：{0}。",
  "{} for {}, {} times as fast as one device; {}":
    "{1} 用 {0}，速度为单个设备的 {2} 倍；{3}",
  "{} for {}, {} times as fast as one device":
    "{1} 用 {0}，速度为单个设备的 {2} 倍",
  "Nothing was estimated.":
    "没有估计。",
  "{} of {} estimates are within {} (median error {}), and auto mode would choose the fastest of the timed layouts for {} of {} models.":
    "{1} 个估计中有 {0} 个误差在 {2} 以内（误差中位数 {3}）；对 {5} 个模型中的 {4} 个，auto 模式会选择所测布局中最快的。",
  "cancelled after {} of {} steps":
    "在 {1} 步中的第 {0} 步后取消",
  "failed after {} of {} steps":
    "在 {1} 步中的第 {0} 步后失败",
  "cancelled":
    "已取消",
  "failed":
    "失败",
  "cancelled, {}":
    "已取消，{0}",
  "failed, {}":
    "失败，{0}",
  "decoded in {} s on {}":
    "解码用时 {0} 秒，使用 {1}",
  "encoded in {} s on {}":
    "编码用时 {0} 秒，使用 {1}",
  "{} of {} devices, estimated to be as fast as all":
    "{1} 个设备中的 {0} 个，估计与全部同样快",
  "{}, VAE weights streamed from system RAM":
    "{0}，VAE 的权重从内存流式传输",
  "1 device":
    "1 个设备",
  "{} devices":
    "{0} 个设备",
  "starting workers {} of {}":
    "正在启动工作进程 {0} / {1}",
  "starting workers":
    "正在启动工作进程",
  "loading weights {} of {}":
    "正在加载权重 {0} / {1}",
  "loading weights":
    "正在加载权重",
  "loading parked weights {} of {}":
    "正在取回权重 {0} / {1}",
  "changing weights {} of {}":
    "正在更改权重 {0} / {1}",
  "comparing model files{} {} of {}":
    "正在比较模型文件{0} {1} / {2}",
  "upscaling {} of {}":
    "正在放大 {0} / {1}",
  "upscaled in {} s on {}":
    "在 {1} 上放大，用时 {0} 秒",
  "upscaled in {} s on {}, tiles of {} pixels":
    "在 {1} 上放大，用时 {0} 秒，分块为 {2} 像素",
  "decoding {} of {}":
    "正在解码 {0} / {1}",
  "encoding {} of {}":
    "正在编码 {0} / {1}",
  "measuring the devices {} of {}":
    "正在测量设备 {0} / {1}",
  "measuring the links {} of {}":
    "正在测量连接 {0} / {1}",
  "trying the links between the devices":
    "正在试用设备之间的连接",
  "joining the devices":
    "正在连接各设备",
  "using {}: {}":
    "使用 {0}：{1}",
  "this machine lacks {}":
    "本机没有 {0}",
  "running on {} ({}): {}":
    "在 {0} 上运行（{1}）：{2}",
  "See docs/guide/troubleshooting.md in the folder of the xDiT nodes.":
    "请参阅 xDiT 节点文件夹中的 docs/guide/troubleshooting.md。",
  "Use {}. Worker rank {} ({}) failed with {}: out of memory: {}":
    "请使用{0}。工作进程 rank {1}（{2}）因 {3} 失败：内存不足：{4}",
  "{} more were requested, and {} of {} are free: {} are missing{}":
    "又请求了 {0}，{2} 中有 {1} 空闲：还缺 {3}{4}",
  "{} more were requested, and {} of {} are free{}":
    "又请求了 {0}，{2} 中有 {1} 空闲{3}",
  "{} more were requested, and {} are free: {} are missing{}":
    "又请求了 {0}，有 {1} 空闲：还缺 {2}{3}",
  "{} more were requested, and {} are free{}":
    "又请求了 {0}，有 {1} 空闲{2}",
  "more memory was requested, and {} of {} are free{}":
    "又请求了内存，{1} 中有 {0} 空闲{2}",
  "more memory was requested, and {} are free{}":
    "又请求了内存，有 {0} 空闲{1}",
  "{}. In use: {}. {}":
    "{0}。占用情况：{1}。{2}",
  "{} GB; {}":
    "{0} GB，以及 {1}",
  "{} MB; {}":
    "{0} MB，以及 {1}",
  "weights {}":
    "权重 {0}",
  "a second copy of weights for the run {}":
    "此次运行的权重副本 {0}",
  "keys and values {}":
    "键和值 {0}",
  "other devices' activations {}":
    "其他设备的激活值 {0}",
  "conditioning {}":
    "条件 {0}",
  "activations {}":
    "激活值 {0}",
  "other programs and libraries {}":
    "其他程序和库 {0}",
  "The workers keep running, with their models loaded.":
    "工作进程继续运行，模型保持加载。",
  "The other ranks waited for it, so the workers were ended: the next prompt starts new ones and loads the model again.":
    "其他 rank 在等待它，因此工作进程已被结束：下一次排队会启动新的工作进程并重新加载模型。",
  "All output of the workers is in {}.":
    "工作进程的全部输出在 {0} 中。",
  "{}; or {}":
    "{0}；或{1}",
  "a smaller upscale model":
    "更小的放大模型",
  "the device without loaded models, which take {} (ComfyUI's Unload Models)":
    "没有已加载模型的设备，这些模型占用 {0}（ComfyUI 的“卸载模型”）",
  "a smaller latent":
    "更小的 latent",
  "a smaller image":
    "更小的图像",
  "more devices":
    "更多设备",
  "larger devices":
    "更大的设备",
  "{} or batch: at most {} of these pixels (each side times {}), frames or images fit next to the weights":
    "{0}或更小的批次：除权重外最多可容纳这些像素（边长乘以 {2}）、帧或图像的 {1}",
  "at least {} devices with ulysses_degree or ring_degree":
    "至少 {0} 个设备，并设置 ulysses_degree 或 ring_degree",
  "at least {} devices for Distributed VAE Decode or Encode":
    "至少 {0} 个设备用于分布式 VAE 解码或编码",
  "weights_memory \"auto\", or fewer GB than now, with which weights are streamed from system RAM":
    "weights_memory \"auto\"，或比现在更小的 GB 数，使权重从系统内存流式传输",
  "weights_memory \"{}\", with which the other weights are streamed from system RAM":
    "weights_memory \"{0}\"，使其余权重从系统内存流式传输",
  "instead of 16-bit weights, weight_dtype {}":
    "代替 16 位权重的 weight_dtype {0}",
  "pipefusion_degree or tensor_degree, which shard the weights over the devices":
    "pipefusion_degree 或 tensor_degree，把权重分片到各设备",
  "the device without other programs, which take {} (nvidia-smi shows them)":
    "没有其他程序的设备，它们占用 {0}（nvidia-smi 会列出它们）",
  "{} on the same devices (about {} GB of {} GB each)":
    "{0}，使用相同的设备（每个约占 {2} GB 中的 {1} GB）",
  "{} ({}) died{}":
    "{0}（{1}）已终止{2}",
  "loading parked weights":
    "正在取回权重",
  "changing weights":
    "正在更改权重",
  "upscaling":
    "正在放大",
  "decoding":
    "正在解码",
  "encoding":
    "正在编码",
  "measuring the devices":
    "正在测量设备",
  "measuring the links":
    "正在测量连接",
  "Remove Flux KV Cache: it is for Flux models, and this is {}.":
    "请移除 Flux KV Cache：它用于 Flux 模型，而这是 {0}。",
  "Use Flux KV Cache once, without changing its patches: this MODEL has patches of several such nodes, or only some patches of one.":
    "Flux KV Cache 只用一次，且不改动它的补丁：此 MODEL 上有多个此节点的补丁，或只有一个节点的部分补丁。",
  "Use a sampler node, or remove Flux KV Cache: a node calls this MODEL outside a run, and Flux KV Cache caches for the length of a run.":
    "请使用采样器节点，或移除 Flux KV Cache：有节点在运行之外调用此 MODEL，而 Flux KV Cache 的缓存只在一次运行之内。",
  "Use reference images of the same sizes and texts of the same length for both prompts, or remove Flux KV Cache: it caches the references of a run's first call for all calls, and those of this call are at other positions.":
    "请让两个提示词的参考图像尺寸相同、文本长度相同，或移除 Flux KV Cache：它为所有调用缓存一次运行中首次调用的参考图像，而这次调用的参考图像位置不同。",
  "Set displaced_degree to 1, with ulysses_degree, ring_degree, tensor_degree, cfg_degree or data_degree instead, or remove Flux KV Cache: displaced patches cache keys and values themselves.":
    "请把 displaced_degree 设为 1，改用 ulysses_degree、ring_degree、tensor_degree、cfg_degree 或 data_degree，或移除 Flux KV Cache：错位补丁自己缓存键和值。",
  "Set cfg_degree and data_degree to 1, or remove Flux KV Cache: the calls of this run have different numbers of images, and some need keys and values that other devices cache.":
    "请把 cfg_degree 和 data_degree 设为 1，或移除 Flux KV Cache：这次运行的各次调用图像数量不同，其中一些需要其他设备缓存的键和值。",
  "Use an image whose sides are multiples of {} pixels, the scale of this VAE: the image has {} x {}.":
    "请使用边长为 {0} 像素整数倍的图像，这是此 VAE 的缩放倍数：该图像为 {1} x {2}。",
  "Encode the reference audio with LTX-2's audio VAE: its tokens have the shape {}, and this model needs (batch, length, {}).":
    "请用 LTX-2 的音频 VAE 编码参考音频：它的 token 形状为 {0}，而此模型的为 (batch, length, {1})。",
  "Remove USO Style Reference: it is for Flux.1, and this is {}.":
    "请移除 USO Style Reference：它用于 Flux.1，而这是 {0}。",
  "Use batch_size 1, cfg 1 and a USO model patch that was made for this model: this one makes tokens of {} channels for one image, and this {} model needs {} channels and is called for {} images at once.":
    "请使用 batch_size 1、cfg 1，以及为此模型制作的 USO 模型补丁：此补丁为一张图像生成 {0} 通道的 token，而此 {1} 模型需要 {2} 通道，且一次为 {3} 张图像调用。",
  "Encode the prompt with the CLIP of Stable Cascade: the conditioning has no pooled text, which the model needs.":
    "请用属于 Stable Cascade 的 CLIP 编码提示词：conditioning 中没有池化文本，而其模型要读取它。",
  "Connect the latent that stage C generated to StableCascade_StageB_Conditioning: the latent there has the shape {}, and stage B needs (images, {}, rows, columns).":
    "请把 C 阶段生成的 latent 接到 StableCascade_StageB_Conditioning：那里的 latent 形状为 {0}，而 B 阶段需要 (图像, {1}, 行, 列)。",
  "Use a width and a height that are multiples of 8 pixels, and {} or more: Stable Cascade B takes latents with even sides of {} or more, and this one has {} x {}.":
    "请使用 8 像素整数倍且不小于 {0} 的宽度和高度：Stable Cascade B 接受边长为偶数且不小于 {1} 的 latent，而这个为 {2} x {3}。",
  "the store operation \"{}\" came with {} keys instead of one":
    "存储操作 \"{0}\" 带有 {1} 个键，而应为一个",
  "it wrote more than {} MB into the store of the group":
    "它向该组的存储写入了超过 {0} MB",
};
