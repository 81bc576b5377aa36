"""Emoji as images with captions in many languages, for `penstock train multimodal-tiny --data captions:TARGET`.

python emoji_captions.py TARGET NAMES FONT...

TARGET is the folder to make. NAMES is a folder with `LANGUAGE/annotations.json` of Unicode CLDR (npm:
cldr-annotations-full), and each FONT a font of emoji (Debian: fonts-noto-color-emoji). Of several fonts, the emoji that
all of them draw are taken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

DRAWN, SIZE = 109, 32
"""Pixels at which a font of bitmaps, such as Noto's, draws, and of the images."""
LONGEST = 64
"""Bytes of a name; longer ones are left out."""
UNASSIGNED = "\U0010ffff"


def names_in(file: Path) -> dict[str, str]:
    """The short name of each single character in a file of CLDR's annotations."""
    by_code = json.loads(file.read_text(encoding="utf-8"))["annotations"].get("annotations", {})
    names = {code: " ".join(one["tts"]) for code, one in by_code.items() if len(code) == 1 and "tts" in one}
    return {code: name for code, name in names.items() if len(name.encode()) <= LONGEST}


def drawn(font: Path, codes: list[str]) -> dict[str, Image.Image]:
    """The characters that a font draws, other than as blanks or as it draws those that it lacks."""
    typeface = ImageFont.truetype(str(font), DRAWN)
    images: dict[str, Image.Image] = {}
    for code in (UNASSIGNED, *codes):
        left, top, right, bottom = typeface.getbbox(code)
        side = max(1, round(right - left), round(bottom - top))
        canvas = Image.new("RGB", (side, side), "white")
        corner = ((side - right - left) / 2, (side - bottom - top) / 2)
        ImageDraw.Draw(canvas).text(corner, code, font=typeface, fill="black", embedded_color=True)
        blank = canvas.getextrema() == ((255, 255),) * 3
        small = canvas.resize((SIZE, SIZE))
        if code == UNASSIGNED or not (blank or small.tobytes() == images[UNASSIGNED].tobytes()):
            images[code] = small
    del images[UNASSIGNED]
    return images


def main(target: str, names: str, *fonts: str) -> None:
    """Draw the emoji into TARGET, and write their names into its metadata.jsonl."""
    by_language = {
        file.parent.name: names_in(file) for file in sorted(Path(names).glob("*/annotations.json"))
    }
    codes = sorted({code for each in by_language.values() for code in each})
    images = {Path(font).stem: drawn(Path(font), codes) for font in fonts}
    common = [code for code in codes if all(code in each for each in images.values())]
    lines = []
    for font, by_code in images.items():
        folder = Path(target, font if len(images) > 1 else "")
        folder.mkdir(parents=True, exist_ok=True)
        for code in common:
            file = folder / f"{ord(code):X}.png"
            by_code[code].save(file)
            captions = {language: each[code] for language, each in by_language.items() if code in each}
            lines.append({"file_name": file.relative_to(target).as_posix(), "concept": code, **captions})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    Path(target, "metadata.jsonl").write_text(text, encoding="utf-8")
    print(
        f"{target}: {len(lines):,} images of {len(common):,} emoji, with names in {len(by_language)} languages"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
