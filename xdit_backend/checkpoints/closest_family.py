"""For a file that no family recognises: to which family it is closest, and what differs. Used by detection.py."""

import bisect

from ..models import FAMILIES

MAX_COMPARED = 2 ** 13                     # tensors, more than twice as many as the largest published model has
MAX_MISSING, MIN_FOUND = 2, 3              # of a family's tensors: what a near file may lack, and what it has to have
# of a tensor that is not there, so that what else a family asks for can be seen
A_SHAPE = (64, 64)
# of rules that are asked about a file of another kind
NOT_THERE = KeyError, IndexError, ValueError, TypeError, ArithmeticError


class _Name(str):
    """A tensor's name that remembers what it was compared with."""

    prefixes: set

    def startswith(self, prefix, *place):
        self.prefixes.add(prefix)
        return super().startswith(prefix, *place)


class _RecordedShapes(dict):
    """Shapes that remember, in order, which tensors were asked for:
    those that were there, those that were not, and prefixes."""

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
    """(the Family that a file with such tensors is nearest to, what differs, in words),
    or None where it is near to none."""
    if len(shapes) > MAX_COMPARED:
        return None
    names = sorted(shapes)
    near = [found for family in FAMILIES.values() if not family.takes_unet_patches
            for found in [_compared(family, shapes, names)] if found]
    return min(near, key=lambda each: each[0])[1:] if near else None


def _compared(family, shapes, names):
    """(how far, the family, what differs), or None: with the tensors added that its rules ask for,
    a near file is of the family. names: of the shapes, sorted."""
    prefixes = {list_.file_prefix for list_ in family.blocks}
    missing = [prefix for prefix in prefixes if not _is_there(prefix, names)]
    if len(missing) > MAX_MISSING:
        return None
    while len(missing) <= MAX_MISSING:
        recorded, known = _RecordedShapes(shapes | dict.fromkeys(missing, A_SHAPE)), False
        try:
            known = family.recognise(recorded)
            if known:
                family.config(recorded)
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
    parts = {name.split(".")[0] for name in (*found, *recorded.prefixes)}
    unknown = {name.split(".")[0] for name in shapes} - parts
    return (max(1, len(missing)), not missing, len(unknown), -len(found)), family, difference


def _is_there(prefix, names):
    """Does one of these sorted names begin so?"""
    place = bisect.bisect_left(names, prefix)
    return place < len(names) and names[place].startswith(prefix)


def _shape_that_differs(family, shapes, found):
    """In words, the tensor with which a file would be of the family if it had another number of dims;
    None where there is none."""
    for name in dict.fromkeys(reversed(found)):
        for num_dims in range(1, 6):
            try:
                if family.recognise({**shapes, name: A_SHAPE[:1] * num_dims}):
                    return f"its {name} has the shape {list(shapes[name][:8])}, where {num_dims} dims are needed"
            except NOT_THERE:
                continue
    return None
