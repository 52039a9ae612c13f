"""The rooms of this repository and which imports which, read from the source; `python -m tests.support.architecture`
draws them.

Used by the test that holds the arrows, and by the one that finds docs/architecture.svg current.
"""

import ast
import html
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "architecture.svg"
SIDES = {"ComfyUI's process": "#dceaf7", "both": "#eee8d5", "the workers": "#e2f0d9"}
BOX_WIDTH, GAP, LINE, MARGIN, ROW_GAP = 232, 26, 15, 24, 58


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def imports(path):
    """Absolute names of what a file imports, inside functions too, relative imports resolved from the repository's
    root."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def find_rooms():
    """{room: its files}: each package of nodes/ and xdit_backend/,
    and each file that lies beside the backend's packages."""
    rooms = {}
    for path in sources("nodes") + sources("xdit_backend"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_deep = parts[1] == "tools" or parts[1:3] == ("models", "common")
        room = ".".join(parts[:3 if is_deep else 2] if parts[0] == "xdit_backend" else parts[:-1])
        # an introduction alone
        if room not in ("xdit_backend.__init__", "xdit_backend.tools.__init__", "nodes.bridge"):
            rooms.setdefault(room, []).append(path)
    return rooms


def find_arrows(rooms):
    """{room: the other rooms that it imports}."""
    def room_of(module):
        return max((room for room in rooms if f"{module}.".startswith(f"{room}.")), key=len, default=None)
    return {room: {room_of(name) for path in files for name in imports(path)} - {room, None}
            for room, files in rooms.items()}


def reach(arrows, start):
    """Every room that `start` imports, itself included, by whatever way."""
    seen, waiting = set(), [start]
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting += arrows[room]
    return seen


def side_of(room, arrows):
    """In which processes a room's code runs: a key of SIDES; None for tools, which neither of them imports."""
    in_host, in_worker = (room in reach(arrows, start) for start in ("nodes", "xdit_backend.worker"))
    return {(True, False): "ComfyUI's process", (True, True): "both",
            (False, True): "the workers"}.get((in_host, in_worker))


def essential(arrows):
    """The arrows that do not follow from others. Raises ValueError where rooms import each other in a circle."""
    below = {room: set().union(*(reach(arrows, target) for target in targets)) for room, targets in arrows.items()}
    circles = sorted(room for room in arrows if room in below[room])
    if circles:
        raise ValueError(f"these rooms import each other in a circle: {', '.join(circles)}")
    return {room: {target for target in targets if not any(target in below[other] for other in targets)}
            for room, targets in arrows.items()}


def draw():
    """The picture, as SVG: who imports stands above whom it imports. Without tools."""
    rooms = find_rooms()
    arrows = find_arrows(rooms)
    arrows = {room: targets for room, targets in arrows.items() if side_of(room, arrows)}
    lines = essential(arrows)
    depth = {}

    def depth_of(room):
        if room not in depth:
            depth[room] = 1 + max((depth_of(other) for other, targets in arrows.items() if room in targets), default=-1)
        return depth[room]

    layers = {}
    for room in arrows:
        layers.setdefault(depth_of(room), []).append(room)
    width = 2 * MARGIN + max(len(layer) for layer in layers.values()) * (BOX_WIDTH + GAP) - GAP
    place, boxes, y = {}, [], 66
    for _, layer in sorted(layers.items()):
        def above(room):
            centres = [place[other][0] for other in place if room in lines[other]]
            return sum(centres) / len(centres) if centres else width / 2
        layer.sort(key=lambda room: (above(room), room))
        texts = {room: files_text(rooms[room]) for room in layer}
        left = (width - len(layer) * (BOX_WIDTH + GAP) + GAP) / 2
        height = max(len(text) for text in texts.values()) * LINE + 36
        for index, room in enumerate(layer):
            x = left + index * (BOX_WIDTH + GAP)
            own_height = len(texts[room]) * LINE + 36
            place[room] = x + BOX_WIDTH / 2, y, y + own_height
            boxes.append(box(room, texts[room], x, y, own_height, SIDES[side_of(room, arrows)]))
        y += height + ROW_GAP
    legend = "".join(f'<rect x="{MARGIN + 190 * index}" y="18" width="16" height="16" fill="{colour}" stroke="#888"/>'
                     f'<text x="{MARGIN + 190 * index + 22}" y="31">{html.escape(side)}</text>'
                     for index, (side, colour) in enumerate(SIDES.items()))
    curves = [curve(place[room], place[target], depth[target] - depth[room] > 1)
              for room in sorted(lines) for target in sorted(lines[room])]
    size = f"{width:g} {y - ROW_GAP + MARGIN:g}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#666"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>', legend, *curves, *boxes, "</svg>", ""])


def files_text(files):
    names = [path.stem for path in files if path.stem not in ("__init__", "__main__")]
    return textwrap.wrap(", ".join(names), 34) if len(files) > 1 else []


def box(room, text, x, y, height, colour):
    rows = "".join(f'<text x="{x + 10:g}" y="{y + 40 + index * LINE:g}" font-size="12" '
                   f'fill="#444">{html.escape(row)}</text>'
                   for index, row in enumerate(text))
    return (f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{height:g}" rx="5" fill="{colour}" stroke="#888"/>'
            f'<text x="{x + 10:g}" y="{y + 21:g}" font-weight="bold">{room.replace(".", "/")}</text>{rows}')


def curve(start, end, passes_others):
    """An arrow; one that passes layers of boxes bends to the side, so as not to hide behind one that stands between."""
    (x, _, bottom), (to_x, top, _) = start, end
    bend = 0.8 * BOX_WIDTH if passes_others and abs(x - to_x) < BOX_WIDTH / 4 else 0
    middle = (bottom + top) / 2
    return (f'<path d="M{x:g} {bottom:g}C{x + bend:g} {middle:g} {to_x + bend:g} {middle:g} {to_x:g} {top:g}" '
            f'fill="none" stroke="#666" marker-end="url(#head)"/>')


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"wrote {PICTURE}")
