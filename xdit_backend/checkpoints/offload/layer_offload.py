"""Layer offloading: layers whose weights are in system RAM and streamed to the device as each of them runs, through the
buffers of block_offload.py. For autoencoders whose activations leave too little free memory for their weights."""

from collections import Counter
from contextlib import contextmanager

from torch import nn

from .block_offload import OffloadedBlocks


class StreamedLayers:
    """The offloaded layers of a model whose weights are in system RAM. Everything except matrices and convolutions
    moves to the device: it is small, and some models compute with a norm's weights directly.

    device: a torch.device. copies: as in OffloadedBlocks. The model runs within `running`.
    """

    def __init__(self, model, device, copies):
        self._device, self._copies = device, copies
        times = Counter(id(tensor) for module in model.modules() for tensor in _own(module))
        self._layers = [module for module in model.modules() if _is_layer(module)
                        and all(times[id(tensor)] == 1 for tensor in _own(module))]
        streamed = {id(tensor) for layer in self._layers for tensor in _own(layer)}
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in streamed:
                tensor.data = tensor.data.to(device)
        self.offloaded, self._num_expected = None, len(self._layers)
        self._rebuild()

    @contextmanager
    def running(self):
        """Context in which the model runs once. Layers are streamed in the order in which they ran the last time."""
        entered: dict[int, bool] = {}
        hooks = [hook for index, layer in enumerate(self._layers) for hook in (
            layer.register_forward_pre_hook(lambda *_, index=index: self._enter(index, entered)),
            layer.register_forward_hook(lambda *_, index=index: self.offloaded.leave(index)))]
        self.offloaded.begin(range(self._num_expected))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if [*entered] != [*range(self._num_expected)]:
            others = [index for index in range(len(self._layers)) if index not in entered]
            self._layers, self._num_expected = [self._layers[index] for index in (*entered, *others)], len(entered)
            self._rebuild()

    def _enter(self, index, entered):
        if index >= self._num_expected:                        # it did not run the last time
            self._num_expected = len(self._layers)
            self.offloaded.begin(range(self._num_expected))
        entered[index] = True
        self.offloaded.enter(index)

    def _rebuild(self):
        """Rebuild the offloaded blocks in this order."""
        if self.offloaded is not None:
            self.offloaded.drop()
        self.offloaded = OffloadedBlocks(self._device, self._copies)
        for index, layer in enumerate(self._layers):
            self.offloaded.add(index, _own(layer))
        self.offloaded.restore()


def _own(module):
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _is_layer(module):
    """Whether it is a matrix or a convolution. A list of weights has no forward."""
    return (not [*module.children()] and type(module).forward is not nn.Module.forward
            and any(tensor.ndim > 1 for tensor in _own(module)))
