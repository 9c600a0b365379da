"""Draw the results of benchmarks/peers.py as bars, as shares of the machine's floor.

    python tools/plot_peers.py benchmarks/results/peers_HARDWARE_YYYYMM.json docs/images/peers.svg

There is a group of bars per case and a bar per engine. A bar's length is tokens per second over the
most that the machine allowed at that moment. So cases of very different speeds fit into one
picture, and other users of the machine do not matter. The number beside a bar is tokens per second.
The SVG follows the reader's light or dark theme.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

# Sizes in pixels; bars lie between LEFT and WIDTH - RIGHT.
WIDTH = 760
LEFT = 132
RIGHT = 150
TOP = 64
BAR = 16
GAP = 18
FOOT = 62
TITLES = {
    "decode-1": ("decode", "batch 1"),
    "decode-8": ("decode", "batch 8"),
    "decode-32": ("decode", "batch 32"),
    "prefill-1x1024": ("prefill", "1 x 1,024 tokens"),
    "prefill-8x512": ("prefill", "8 x 512 tokens"),
}
LABELS = {"moeserve-gguf": "moeserve", "llamacpp": "llama.cpp", "vllm": "vLLM"}
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .small { font-size: 11px; fill: #59636e }
  .ours { font-weight: 600 }
  .axis { stroke: #d1d9e0; stroke-width: 1 }
  .floor { stroke: #59636e; stroke-width: 1.5; stroke-dasharray: 4 3 }
  .e0 { fill: #0b6bcb } .e1 { fill: #b35900 } .e2 { fill: #6f7b87 }
  .e3 { fill: #a9b2bb } .e4 { fill: #8250df }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #9198a1 }
    .axis { stroke: #3d444d } .floor { stroke: #9198a1 }
    .e0 { fill: #4493f8 } .e1 { fill: #e3873a } .e2 { fill: #8b949e }
    .e3 { fill: #59636e } .e4 { fill: #ab7df8 }
  }
"""


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("record", type=Path)
    flags.add_argument("picture", type=Path)
    args = flags.parse_args()
    args.picture.write_text(picture(json.loads(args.record.read_text("utf-8"))), "utf-8")


def picture(record: dict[str, Any]) -> str:
    """Return a record of benchmarks/peers.py as SVG.

    Raises SystemExit for a record of another kind.
    """
    results = record["results"]
    if not isinstance(results, dict) or "cases" not in results:
        raise SystemExit(
            f"a record of {record.get('what')!r} without cases: benchmarks/peers.py writes such"
        )
    names = list(results["engines"])
    rows = results["cases"]
    group = BAR * len(names) + GAP
    height = TOP + group * len(rows) + FOOT
    bars = [line for i, row in enumerate(rows) for line in _group(row, names, TOP + group * i)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="Tokens per second of {escape(", ".join(map(_label, names)))}">',
        f"<style>{STYLE}</style>",
        _text(12, 24, "Tokens per second, and the share of what the machine allows", "title"),
        *_legend(names, results["engines"]),
        *_axis(height),
        *bars,
        *[
            _text(12, height - 26 + 15 * i, line, "small")
            for i, line in enumerate(_caption(record, _label(names[0])))
        ],
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _group(row: dict[str, Any], names: Sequence[str], top: int) -> list[str]:
    """Return the lines of a case: its name and a bar per engine."""
    first, second = TITLES.get(row["case"], (row["case"], ""))
    middle = top + BAR * len(names) // 2
    lines = [_text(12, middle, first), _text(12, middle + 14, second, "small")]
    for i, name in enumerate(names):
        y = top + BAR * i
        end = _x(row["share_of_floor"][name])
        speed = row["tokens_per_s"][name]
        shown = f"{speed:,.{1 if speed < 100 else 0}f}"
        shown += "" if i == 0 else f"  ({row['ratio'][name]:.2f} x)"
        lines.append(
            f'<rect class="e{i % 5}" x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" '
            f'height="{BAR - 3}" rx="2"/>'
        )
        lines.append(_text(end + 6, y + BAR - 6, shown, "ours" if i == 0 else "small"))
    return lines


def _legend(names: Sequence[str], versions: dict[str, str]) -> list[str]:
    lines = []
    x = 12.0
    for i, name in enumerate(names):
        label = f"{_label(name)} {versions[name]}"
        lines.append(f'<rect class="e{i % 5}" x="{x:.1f}" y="36" width="11" height="11" rx="2"/>')
        lines.append(_text(x + 16, 46, label))
        x += 16 + 7.2 * len(label) + 18
    return lines


def _axis(height: int) -> list[str]:
    """Return lines at quarters of the floor; the floor itself is dashed."""
    lines = []
    bottom = height - FOOT
    for percent in (0, 25, 50, 75, 100):
        x = _x(percent / 100)
        kind = "floor" if percent == 100 else "axis"
        lines.append(
            f'<line class="{kind}" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}"/>'
        )
        lines.append(_text(x - 10, bottom + 14, f"{percent} %", "small"))
    return lines


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(share, 1.0)


def _caption(record: dict[str, Any], first: str) -> tuple[str, str]:
    cpu = record["environment"]["cpu"]
    return (
        "100 %: every weight read once a step at the memory's rate (decode), "
        "every unit busy (prefill).",
        f"n x: how many times as fast {first} is. "
        f"{cpu['allowed_cores']} cores, {cpu['model']}; medians.",
    )


def _label(name: str) -> str:
    return LABELS.get(name, name)


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
