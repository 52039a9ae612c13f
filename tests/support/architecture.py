"""Packages of this repository and their imports, read from the source.

`python -m tests.support.architecture` draws docs/design/architecture.svg.
"""

import ast
import html
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "docs" / "design" / "architecture.svg"
SIDES = {"ComfyUI's process": "#dceaf7", "both": "#eee8d5", "the workers": "#e2f0d9"}
DEVICE_TYPE = re.compile(r"(cuda|xpu|hip|mps|npu|musa)(:\d*)?")
BOX_WIDTH, BOX_HEIGHT, GAP, MARGIN, ROW_GAP = 232, 34, 26, 24, 58


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


def find_device_types(text):
    """Device types of GPUs that a source text names: in strings of such a name alone, and as torch's modules and
    attributes of tensors. Not the versions in torch.version."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DEVICE_TYPE.fullmatch(node.value):
            found.append(node.value)
        elif isinstance(node, ast.Attribute) and DEVICE_TYPE.fullmatch(node.attr.removeprefix("is_")):
            if getattr(node.value, "attr", "") != "version":
                found.append(ast.unparse(node))
    return found


def find_packages():
    """{package: its files}: each package of nodes/ and xdit_backend/,
    and each file that lies beside the backend's packages."""
    packages = {}
    for path in sources("nodes") + sources("xdit_backend"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_deep = parts[1] == "tools" or parts[1:3] == ("models", "common")
        package = ".".join(parts[:3 if is_deep else 2] if parts[0] == "xdit_backend" else parts[:-1])
        # an introduction alone
        if package not in ("xdit_backend.__init__", "xdit_backend.tools.__init__", "nodes.bridge"):
            packages.setdefault(package, []).append(path)
    return packages


def find_arrows(packages):
    """{package: the other packages that it imports}."""
    def package_of(module):
        return max((package for package in packages if f"{module}.".startswith(f"{package}.")), key=len,
                   default=None)
    return {package: {package_of(name) for path in files for name in imports(path)} - {package, None}
            for package, files in packages.items()}


def reach(arrows, start):
    """Every package that `start` imports, itself included, by whatever way."""
    seen, waiting = set(), [start]
    while waiting:
        package = waiting.pop()
        if package not in seen:
            seen.add(package)
            waiting += arrows[package]
    return seen


def side_of(package, arrows):
    """In which processes a package's code runs: a key of SIDES; None for tools, which neither of them imports."""
    in_host = any(package in reach(arrows, start) for start in ("nodes", "nodes.bridge.server"))
    in_worker = package in reach(arrows, "xdit_backend.worker")
    return {(True, False): "ComfyUI's process", (True, True): "both",
            (False, True): "the workers"}.get((in_host, in_worker))


def essential(arrows):
    """The arrows that do not follow from others. Raises ValueError where packages import each other in a circle."""
    below = {package: set().union(*(reach(arrows, target) for target in targets)) for package,
             targets in arrows.items()}
    circles = sorted(package for package in arrows if package in below[package])
    if circles:
        raise ValueError(f"these packages import each other in a circle: {', '.join(circles)}")
    return {package: {target for target in targets if not any(target in below[other] for other in targets)}
            for package, targets in arrows.items()}


def draw():
    """The SVG: one box a package, level by level, an importing package above what it imports. Without tools."""
    packages = find_packages()
    arrows = find_arrows(packages)
    arrows = {package: targets for package, targets in arrows.items() if side_of(package, arrows)}
    lines = essential(arrows)
    levels = _levels(arrows)
    width = 2 * MARGIN + max(len(level) for level in levels) * (BOX_WIDTH + GAP) - GAP
    centers, boxes = {}, []
    for number, level in enumerate(levels):
        def importers_center(package):
            found = [centers[other][0] for other in centers if package in lines[other]]
            return sum(found) / len(found) if found else width / 2
        left = (width - len(level) * (BOX_WIDTH + GAP) + GAP) / 2
        y = 66 + number * (BOX_HEIGHT + ROW_GAP)
        for index, package in enumerate(sorted(level, key=lambda package: (importers_center(package), package))):
            x = left + index * (BOX_WIDTH + GAP)
            centers[package] = x + BOX_WIDTH / 2, y, number
            boxes.append(_box(package, x, y, SIDES[side_of(package, arrows)]))
    legend = "".join(f'<rect x="{MARGIN + 190 * index}" y="18" width="16" height="16" fill="{colour}" stroke="#888"/>'
                     f'<text x="{MARGIN + 190 * index + 22}" y="31">{html.escape(side)}</text>'
                     for index, (side, colour) in enumerate(SIDES.items()))
    curves = [_curve(centers[package], centers[target]) for package in sorted(lines)
              for target in sorted(lines[package])]
    size = f"{width:g} {66 + len(levels) * (BOX_HEIGHT + ROW_GAP) - ROW_GAP + MARGIN:g}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="13">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#666"/></marker></defs>',
        '<rect width="100%" height="100%" fill="white"/>', legend, *curves, *boxes, "</svg>", ""])


def _levels(arrows):
    """[packages of a level]: each package one level below the lowest of its importers."""
    depth = {}

    def depth_of(package):
        if package not in depth:
            depth[package] = 1 + max((depth_of(other) for other, targets in arrows.items() if package in targets),
                                     default=-1)
        return depth[package]

    levels = {}
    for package in arrows:
        levels.setdefault(depth_of(package), []).append(package)
    return [level for _, level in sorted(levels.items())]


def _box(package, x, y, colour):
    return (f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" fill="{colour}" '
            f'stroke="#888"/><text x="{x + 10:g}" y="{y + 22:g}">{package.replace(".", "/")}</text>')


def _curve(start, end):
    """An arrow. One that skips levels bends sideways, so that no box in between hides it."""
    (x, y, level), (to_x, to_y, to_level) = start, end
    bend = 0.8 * BOX_WIDTH if to_level - level > 1 and abs(x - to_x) < BOX_WIDTH / 4 else 0
    bottom = y + BOX_HEIGHT
    middle = (bottom + to_y) / 2
    return (f'<path d="M{x:g} {bottom:g}C{x + bend:g} {middle:g} {to_x + bend:g} {middle:g} {to_x:g} {to_y:g}" '
            f'fill="none" stroke="#666" marker-end="url(#head)"/>')


if __name__ == "__main__":
    IMAGE.write_text(draw(), encoding="utf-8")
    print(f"wrote {IMAGE}")
