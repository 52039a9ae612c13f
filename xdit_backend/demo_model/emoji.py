"""Training images of the demo model: Noto's colour emoji, captioned by their Unicode names and keywords.

Debian packages: fonts-noto-color-emoji (the glyphs), unicode-data (names), unicode-cldr-core (keywords).
"""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import torch

FONT = "fonts/truetype/noto/NotoColorEmoji.ttf"
NAMES = "unicode/emoji/emoji-test.txt"
KEYWORDS = ("unicode/cldr/common/annotations/en.xml", "unicode/cldr/common/annotationsDerived/en.xml")
PACKAGES = "fonts-noto-color-emoji unicode-data unicode-cldr-core"

STRIKE_PX = 109       # font size of the font's bitmaps, 136 x 128 pixels each
SIDE_PX = 128
SKIN_TONES = "\U0001F3FB\U0001F3FC\U0001F3FD\U0001F3FE\U0001F3FF"
VARIATION_SELECTOR = "\ufe0f"

# background names in captions ("... on a blue background") -> red, green, blue from 0 to 255
BACKGROUNDS = {
    "white": (255, 255, 255), "black": (16, 16, 16), "gray": (160, 160, 160), "red": (214, 48, 49),
    "orange": (240, 147, 43), "yellow": (249, 220, 92), "green": (64, 160, 80), "blue": (52, 110, 219),
    "purple": (130, 70, 180), "pink": (245, 160, 195), "brown": (120, 80, 50), "cyan": (90, 200, 220),
}


@dataclass(frozen=True)
class Entry:
    """One glyph: its text, name, keywords (strings of one or more words) and sampling weight."""

    text: str
    name: str
    keywords: tuple[str, ...]
    weight: float


def read_entries(share="/usr/share"):
    """Read every fully-qualified emoji of Unicode with its name and keywords, in Unicode's order.

    share: the usr/share folder of the Debian packages. Raises FileNotFoundError with the names of the packages.
    """
    share = Path(share)
    missing = [name for name in (FONT, NAMES, *KEYWORDS) if not (share / name).is_file()]
    if missing:
        raise FileNotFoundError(f"Install the Debian packages {PACKAGES}, or unpack them (dpkg -x) and set --share to "
                                f"their usr/share: {share} lacks {', '.join(missing)}.")
    keywords = {}
    for file in KEYWORDS:
        for node in ElementTree.parse(share / file).iter("annotation"):
            if node.get("type") != "tts":
                keywords[node.get("cp")] = tuple(word.strip() for word in node.text.split("|"))
    entries = []
    for line in (share / NAMES).read_text(encoding="utf-8").splitlines():
        match = re.match(r"[0-9A-F ]+; fully-qualified\s+# (\S+) E[\d.]+ (.+)", line)
        if match:
            text, name = match.groups()
            known = keywords.get(text.replace(VARIATION_SELECTOR, ""), ())
            toned = any(tone in text for tone in SKIN_TONES)
            entries.append(Entry(text, name, tuple(word for word in known if word != name), 0.1 if toned else 1.0))
    return entries


def render_glyphs(entries, share="/usr/share"):
    """Render the entries' glyphs: [N, 4, 128, 128] uint8, red, green, blue and opacity (colour not multiplied by
    opacity)."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont
    font = ImageFont.truetype(str(Path(share) / FONT), STRIKE_PX, layout_engine=ImageFont.Layout.RAQM)
    glyphs = np.zeros((len(entries), SIDE_PX, SIDE_PX, 4), dtype=np.uint8)
    for glyph, entry in zip(glyphs, entries):
        canvas = Image.new("RGBA", (136, 136))
        ImageDraw.Draw(canvas).text((68, 68), entry.text, font=font, embedded_color=True, anchor="mm")
        glyph[:] = np.asarray(canvas.resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS))
    return torch.from_numpy(glyphs).permute(0, 3, 1, 2).contiguous()


def compose(glyphs, colours):
    """Compose glyphs [B, 4, H, W] uint8 over plain colours [B, 3] in 0..255: images [B, 3, H, W] in -1..1."""
    glyphs = glyphs.float() / 127.5
    opacity = glyphs[:, 3:] / 2
    return (glyphs[:, :3] - 1) * opacity + (colours.float() / 127.5 - 1)[:, :, None, None] * (1 - opacity)


def caption(entry, background, random):
    """Choose one of an entry's captions: its name, name and keywords, or keywords alone, with the background unless it
    is white.

    random: a random.Random.
    """
    kind = random.random()
    keywords = random.sample(entry.keywords, k=random.randint(1, min(3, len(entry.keywords)))) if entry.keywords else []
    if kind < 0.5 or not keywords:
        phrases = [entry.name]
    else:
        phrases = [entry.name, *keywords] if kind < 0.8 else keywords
    text = ", ".join(phrases)
    named = background != "white" or random.random() < 0.2
    return on_background(text, background) if named else text


def on_background(text, background):
    return f"{text} on {'an' if background[0] in 'aeiou' else 'a'} {background} background"
