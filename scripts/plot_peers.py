"""Draws peers.svg from peers.json: python scripts/plot_peers.py"""

import json
import math
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent / "docs" / "results"
COLOURS = ("#3f51b5", "#8d99ae", "#a5a58d", "#b08968", "#9a8c98")
LEFT, TOP, ROW, GAP, WIDTH = 170, 46, 17, 14, 720
LOWEST, HIGHEST = 1e-6, 1e-1


def time(seconds: float) -> str:
    """A time as people say it."""
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def main() -> None:
    data = json.loads((HERE / "peers.json").read_text())
    systems = data["seconds"]
    scale = (WIDTH - LEFT - 70) / math.log10(HIGHEST / LOWEST)
    parts: list[str] = []
    y = TOP
    for group, floats in enumerate(data["floats"]):
        parts.append(f'<text x="8" y="{y + 12}" font-weight="bold">{floats:,} floats</text>')
        for colour, (name, times) in zip(COLOURS, systems.items(), strict=True):
            seconds = times[group]
            if seconds is None:
                continue
            y += ROW
            width = scale * math.log10(seconds / LOWEST)
            parts.append(f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end">{name}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 4}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + 11}">{time(seconds)}</text>')
        y += ROW + GAP
    title = "Add an array to the shared parameters and read them back, one worker (logarithmic)"
    style = 'font-family="sans-serif" font-size="12" fill="#111"'
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" {style} role="img">',
        f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>',
        f'<text x="8" y="22" font-size="14" font-weight="bold">{title}</text>',
        *parts,
        "</svg>",
    ]
    (HERE / "peers.svg").write_text("\n".join(svg) + "\n")


if __name__ == "__main__":
    main()
