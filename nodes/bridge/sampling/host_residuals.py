"""Residuals that a node's network adds to the image tokens after blocks and that depend on the blocks' inputs alone.
They are computed for each call on the device where ComfyUI samples, like a ControlNet's.

ComfyUI's own forward calls the network: that of a second instance of the model's class, with the weights of its
embedders and with blocks that return zeros. Any nonzero value after a block was added by the network.
"""

import torch

import comfy.ops

from ....xdit_backend.protocol.errors import UnsupportedError
from ..compatibility.block_patches import residual_networks_in
from ..compatibility.weight_creation import weights_at_construction

BLOCKS = "double_block"                    # ComfyUI's name for the blocks that process all streams
# modules of ComfyUI's models whose output reaches no such network
UNREAD = ("context_refiner",)


class Additions:
    """Residuals for the calls of one MODEL. make(): a new instance of its diffusion model's class on the meta device,
    created for the first call and cached until `end`, with the weights as nodes have patched them."""

    def __init__(self, make):
        self._make, self._changes, self._model = make, None, None

    def end(self):
        """End the run and free the memory."""
        self._changes = self._model = None

    def residuals(self, remote, call, transformer_options, extra):
        """Return {name: (B, T, C)} for a call of a RemoteModel; a name is BlockList.added and the block's number. call:
        (latent, timestep, text), and extra: as ComfyUI passes them to its model.

        Raises UnsupportedError if ComfyUI's model supports no such network.
        """
        family, networks = remote.family, residual_networks_in(transformer_options)
        if not networks:
            return {}
        lists = {list_.added: list_ for list_ in family.blocks if list_.added}
        if not networks.keys() <= lists.keys():
            raise UnsupportedError(f"Remove the node that adds model patches ({', '.join(networks)}): ComfyUI's "
                                   f"{family.name} does not support all of them and would silently ignore them.")
        if self._model is None or self._changes is not remote.changes:
            self._model, self._changes = self._with_weights(remote, lists, call[0].device), remote.changes
        number = remote.setup.transformer_config[lists[BLOCKS].count]
        recorder = _Recorder(networks, family.inputs.latent.num_tokens(call[0].shape), number - 1)
        patches = {kind: [recorder] for kind in networks} | {BLOCKS: [recorder]}
        try:
            self._model(*call, **extra, transformer_options={**transformer_options, "patches": patches, "wrappers": {}})
        except _Recorded:
            return recorder.added
        raise AssertionError(f"ComfyUI's {family.name} has not reached block {number - 1}")

    def _with_weights(self, remote, lists, device):
        with weights_at_construction():
            model, parameters = self._make(), dict(remote.modules[""][0].named_parameters())
        for name in UNREAD:
            if hasattr(model, name):
                setattr(model, name, torch.nn.ModuleList())
        name = lists[BLOCKS].file_prefix.rstrip(".")
        setattr(model, name, torch.nn.ModuleList(_Zeros() for _ in getattr(model, name)))
        weights = {name: parameters[name].read().to(device) for name in model.state_dict()}
        model.load_state_dict(weights, assign=True)
        return model


def maker_of(base_model):
    """Return `make` of Additions for a proxy model's BaseModel."""
    module_class, config = type(base_model.diffusion_model), base_model.model_config.unet_config
    return lambda: module_class(**{key: value for key, value in config.items() if key != "disable_unet_model_creation"},
                                device="meta", operations=comfy.ops.manual_cast)


class _Zeros(torch.nn.Module):
    """Replacement of a block whose image tokens come first or alone."""

    def forward(self, tokens, *args, **kwargs):
        return torch.zeros_like(tokens)


class _Recorded(Exception):
    """Raised after the last block."""


class _Recorder:
    """Replacement of a node's networks that calls them and records what they add."""

    def __init__(self, patches, num_tokens, last):
        """patches: {kind: networks}. num_tokens: of the image. last: number of the last of the BLOCKS."""
        self._patches, self._num_tokens, self._last, self.added = patches, num_tokens, last, {}

    def __call__(self, arguments):
        kind, number = arguments.get("block_type", BLOCKS), arguments["block_index"]
        image = arguments["img"]
        for patch in self._patches.get(kind, ()):
            inputs = {**arguments, "img": torch.zeros_like(image)}
            added = inputs["img"]
            added = patch(inputs).get("img", added)[:, :self._num_tokens]
            if added.any():
                name = f"{kind}.{number}"
                self.added[name] = self.added[name] + added if name in self.added else added
                if kind != BLOCKS:                             # its next block is a real one
                    image[:, :self._num_tokens] += added
        if kind == BLOCKS and number == self._last:
            raise _Recorded
        return {**arguments, "img": image}
