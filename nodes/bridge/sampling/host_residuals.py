"""What a node's network adds to the image tokens after blocks, where it depends on what goes into the blocks alone: for
each call it is computed where ComfyUI samples, as a ControlNet is. Used by remote_model.py.

ComfyUI's own forward calls the network: that of a second object of the model's class, with the weights of its
embedders, and in the place of each block one that gives zeros. What is no zero after it, the network has added.
"""

import torch

import comfy.ops

from ....xdit_backend.protocol.errors import UnsupportedError
from ..compatibility.block_patches import adds_to

BLOCKS = "double_block"                    # what ComfyUI's models call those that pass all streams
# modules of ComfyUI's models whose output no such network is given
UNREAD = ("context_refiner",)


class Additions:
    """What is added in the calls of one MODEL. make(): a new object of its diffusion model's class, on the meta device;
    it is made for the first call, and kept until `end`, with the weights as nodes have changed them."""

    def __init__(self, make):
        self._make, self._changes, self._net = make, None, None

    def end(self):
        """The run ends: give the memory back."""
        self._changes = self._net = None

    def places(self, remote, call, transformer_options, extra):
        """{place: (B, T, C)} for a call of a RemoteModel: BlockList.added and the number of the block there. call:
        (latent, timestep, text), and extra: as ComfyUI hands them to its model.

        Raises UnsupportedError where ComfyUI's model takes no such network.
        """
        family, given = remote.family, adds_to(transformer_options)
        if not given:
            return {}
        lists = {list_.added: list_ for list_ in family.blocks if list_.added}
        if not given.keys() <= lists.keys():
            raise UnsupportedError(f"Remove the node that adds model patches ({', '.join(given)}): ComfyUI's "
                                   f"{family.name} does not heed them all, and they would be dropped without notice.")
        if self._net is None or self._changes is not remote.changes:
            self._net, self._changes = self._with_weights(remote, lists, call[0].device), remote.changes
        number = remote.setup.transformer_config[lists[BLOCKS].count]
        recorder = _Recorder(given, family.latent.num_tokens(call[0].shape), number - 1)
        patches = {kind: [recorder] for kind in given} | {BLOCKS: [recorder]}
        try:
            self._net(*call, **extra, transformer_options={**transformer_options, "patches": patches, "wrappers": {}})
        except _Recorded:
            return recorder.added
        raise AssertionError(f"ComfyUI's {family.name} has not come to block {number - 1}")

    def _with_weights(self, remote, lists, device):
        net, held = self._make(), dict(remote.modules[""][0].named_parameters())
        for name in UNREAD:
            if hasattr(net, name):
                setattr(net, name, torch.nn.ModuleList())
        name = lists[BLOCKS].file_prefix.rstrip(".")
        setattr(net, name, torch.nn.ModuleList(_Zeros() for _ in getattr(net, name)))
        weights = {name: held[name].read().to(device) for name in net.state_dict()}
        net.load_state_dict(weights, assign=True)
        return net


def maker_of(base_model):
    """`make` of Additions, for a shell's BaseModel."""
    module_class, config = type(base_model.diffusion_model), base_model.model_config.unet_config
    return lambda: module_class(**{key: value for key, value in config.items() if key != "disable_unet_model_creation"},
                                device="meta", operations=comfy.ops.manual_cast)


class _Zeros(torch.nn.Module):
    """In the place of a block of transformers whose image tokens come first or alone."""

    def forward(self, tokens, *args, **kwargs):
        return torch.zeros_like(tokens)


class _Recorded(Exception):
    """All blocks have been passed."""


class _Recorder:
    """In the place of a node's networks: calls them, and keeps what they add."""

    def __init__(self, patches, num_tokens, last):
        """patches: {kind: the networks}. num_tokens: of the image. last: number of the last of the BLOCKS."""
        self._patches, self._num_tokens, self._last, self.added = patches, num_tokens, last, {}

    def __call__(self, arguments):
        kind, number = arguments.get("block_type", BLOCKS), arguments["block_index"]
        image = arguments["img"]
        for patch in self._patches.get(kind, ()):
            given = {**arguments, "img": torch.zeros_like(image)}
            added = given["img"]
            added = patch(given).get("img", added)[:, :self._num_tokens]
            if added.any():
                place = f"{kind}.{number}"
                self.added[place] = self.added[place] + added if place in self.added else added
                if kind != BLOCKS:                             # whose next block is a real one
                    image[:, :self._num_tokens] += added
        if kind == BLOCKS and number == self._last:
            raise _Recorded
        return {**arguments, "img": image}
