"""The family closest to an unrecognised file, and the difference between them."""

import bisect

from ..models import FAMILIES

MAX_COMPARED = 2 ** 13                     # tensors, more than twice those of the largest published model
MAX_MISSING, MIN_FOUND = 2, 3              # tensors of a family that a similar file may lack, and must have
# of a placeholder for a missing tensor, so that the family's further requirements are tested
A_SHAPE = (64, 64)
# errors of rules that are applied to a file of another kind
NOT_THERE = KeyError, IndexError, ValueError, TypeError, ArithmeticError


class _Name(str):
    """A tensor name that records the prefixes it was compared with."""

    prefixes: set

    def startswith(self, prefix, *args):
        self.prefixes.add(prefix)
        return super().startswith(prefix, *args)


class _RecordedShapes(dict):
    """Shapes that record, in order, which tensors were looked up: found ones, missing ones, and prefixes."""

    def __init__(self, shapes):
        super().__init__(shapes)
        self.found, self.missing, self.prefixes = [], [], set()

    def __contains__(self, name):
        there = super().__contains__(name)
        (self.found if there else self.missing).append(name)
        return there

    def get(self, name, default=None):
        return self[name] if name in self else default

    def __getitem__(self, name):
        if name not in self:
            raise KeyError(name)
        return super().__getitem__(name)

    def __iter__(self):
        for name in super().__iter__():
            name = _Name(name)
            name.prefixes = self.prefixes
            yield name

    def items(self):
        return [(name, self[name]) for name in self]


def nearest(shapes):
    """(Family that a file with these tensors is closest to, text about the difference), or None if it is close to
    none."""
    if len(shapes) > MAX_COMPARED:
        return None
    names = sorted(shapes)
    near = [found for family in FAMILIES.values()
            if not family.plan.takes_unet_patches and not family.detection.described
            for found in [_compared(family, shapes, names)] if found]
    return min(near, key=lambda each: each[0])[1:] if near else None


def _compared(family, shapes, names):
    """(distance, the family, text about the difference), or None. A file is close if it is recognised once the tensors
    that the rules look for are added. names: of the shapes, sorted."""
    prefixes = {list_.file_prefix for list_ in family.blocks}
    missing = [prefix for prefix in prefixes if not _is_there(prefix, names)]
    if len(missing) > MAX_MISSING:
        return None
    while len(missing) <= MAX_MISSING:
        recorded, known = _RecordedShapes(shapes | dict.fromkeys(missing, A_SHAPE)), False
        try:
            known = family.detection.recognise(recorded)
            if known:
                family.detection.config(recorded)
        except NOT_THERE as error:
            if isinstance(error, KeyError):
                missing.append(error.args[0])
                continue
        unmatched = next((name for name in recorded.missing
                          if not _is_there(name, names)), None)
        if known or unmatched is None:
            break
        missing.append(unmatched)
    difference = f"it lacks {' and '.join(missing)}" if missing else _shape_that_differs(family, shapes, recorded.found)
    found = {*recorded.found, *prefixes} - {*missing}
    if len(missing) > MAX_MISSING or len(found) < MIN_FOUND or difference is None or missing and not known:
        return None
    prefixes_used = {name.split(".")[0] for name in (*found, *recorded.prefixes)}
    unknown = {name.split(".")[0] for name in shapes} - prefixes_used
    return (max(1, len(missing)), not missing, len(unknown), -len(found)), family, difference


def _is_there(prefix, names):
    """Whether one of these sorted names starts with the prefix."""
    index = bisect.bisect_left(names, prefix)
    return index < len(names) and names[index].startswith(prefix)


def _shape_that_differs(family, shapes, found):
    """Text about the tensor with which a file would match the family if it had another number of dims; None if there is
    none."""
    for name in dict.fromkeys(reversed(found)):
        for num_dims in range(1, 6):
            try:
                if family.detection.recognise({**shapes, name: A_SHAPE[:1] * num_dims}):
                    return f"its {name} has the shape {list(shapes[name][:8])}, where {num_dims} dims are needed"
            except NOT_THERE:
                continue
    return None
