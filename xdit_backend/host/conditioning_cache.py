"""The conditioning that a worker group keeps for one run, by name.
The client has one Conditionings a run, and sends what is new."""

import torch

MAX_NAMES = 64                             # that a run has the workers hold; the one not used for longest goes first
# bytes of a number -> the type to compare it as
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Conditionings:
    def __init__(self, group):
        # name -> its tensors, as they were sent; the last one is the last one used
        self.group, self._held = group, {}
        self._with_run = []                                    # names of what else goes when the run ends

    def find(self, tensors):
        """The name of these tensors, None where they are new."""
        for name, known in self._held.items():
            if known.keys() == tensors.keys() and all(_same_bits(known[key], tensors[key]) for key in tensors):
                self._held[name] = self._held.pop(name)
                return name
        return None

    def keep(self, name, tensors):
        self._held[name] = {key: tensor.clone() for key, tensor in tensors.items()}

    def keep_alongside(self, names):
        """The workers keep something else under these names until the run ends."""
        self._with_run += names

    def drop_all(self):
        """No more is held; returns the names of what was."""
        return self._drop(len(self._held)) + self._with_run

    def drop_surplus(self):
        """As drop_all, of what is too much."""
        return self._drop(len(self._held) - MAX_NAMES)

    def _drop(self, count):
        names = list(self._held)[:max(0, count)]
        for name in names:
            del self._held[name]
        return names


def _same_bits(tensor, other):
    """Are two tensors the same, NaN equal to itself? ComfyUI makes them anew for every step,
    and nodes may change them in place."""
    if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
        return False
    bits = BITS[tensor.element_size()]
    return torch.equal(tensor.view(bits), other.view(bits))
