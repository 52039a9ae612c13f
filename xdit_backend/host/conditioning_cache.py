"""Host-side index of the conditioning that a worker group caches for one run."""

import torch

MAX_NAMES = 64                             # cached per run; the least recently used one is dropped first
# bytes of an element -> integer dtype to compare its bits
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Conditionings:
    """The conditioning that a worker group has cached for one run."""

    def __init__(self, group):
        # name -> copies of its tensors as they were sent, least recently used first
        self.group, self._cached = group, {}
        self._with_run = []                                    # further names to drop at the end of the run

    def find(self, tensors):
        """Name of these tensors; None if they are not cached."""
        for name, known in self._cached.items():
            if known.keys() == tensors.keys() and all(_same_bits(known[key], tensors[key]) for key in tensors):
                self._cached[name] = self._cached.pop(name)
                return name
        return None

    def keep(self, name, tensors):
        self._cached[name] = {key: tensor.clone() for key, tensor in tensors.items()}

    def keep_alongside(self, names):
        """Record names under which the workers cache other tensors until the run ends."""
        self._with_run += names

    def drop_all(self):
        """Drop everything; returns the names."""
        return self._drop(len(self._cached)) + self._with_run

    def drop_surplus(self):
        """Drop entries above MAX_NAMES; returns their names."""
        return self._drop(len(self._cached) - MAX_NAMES)

    def _drop(self, count):
        names = list(self._cached)[:max(0, count)]
        for name in names:
            del self._cached[name]
        return names


def _same_bits(tensor, other):
    """Whether two tensors have the same bits, so that NaN equals itself.

    Contents are compared because ComfyUI creates new tensors for every step and nodes may modify them in place.
    """
    if (tensor.shape, tensor.dtype, tensor.device) != (other.shape, other.dtype, other.device):
        return False
    bits = BITS[tensor.element_size()]
    return torch.equal(tensor.view(bits), other.view(bits))
