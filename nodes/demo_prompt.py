"""Demo Prompt: text encoder node for the bundled demo model."""

from comfy_api.latest import io

from ..xdit_backend.demo_model.text import MAX_WORDS, load_text_encoder
from .bridge.compatibility.input_checks import check_links


class XDiTDemoPrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTDemoPrompt",
            display_name="Demo Prompt",
            category="xDiT",
            description="Encodes a prompt for xdit_demo.safetensors, the small model bundled with this pack. It "
                        "generates emoji: an object or a face on a plain background.",
            search_aliases=["demo", "prompt", "text encode", "emoji"],
            inputs=[
                io.String.Input("text", multiline=True, default="cat face on a blue background",
                                tooltip=f"At most {MAX_WORDS} English words, such as: woman astronaut on a purple "
                                        f"background. Leave empty for the negative prompt."),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, text) -> io.NodeOutput:
        check_links(text=text)
        context, pooled = load_text_encoder().encode([text])
        return io.NodeOutput([[context, {"pooled_output": pooled}]])
