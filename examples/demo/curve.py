"""A reward curve from a run's metrics.jsonl: as text for the terminal, and as a PNG.

Use: python examples/demo/curve.py METRICS.jsonl CURVE.png [METRIC]     (default: reward; docs/metrics.md has all)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

BLOCKS = " ▁▂▃▄▅▆▇█"
SMOOTHING = 5
"""Steps of the moving mean that is drawn over the single steps."""


def read_metric(metrics_file: str | Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric of the steps, or else of the evaluations; lines without it are passed over."""
    rows = [json.loads(line) for line in Path(metrics_file).read_text(encoding="utf-8").splitlines()]
    having = [row for row in rows if row.get(name) is not None]
    points = [row for row in having if row["kind"] == "train"] or having
    if not points:
        near = get_close_matches(name, {key for row in rows for key in row}, n=5)
        raise ValueError(f"{metrics_file} has no values of {name!r}; it has {', '.join(near) or 'nothing like it'}")
    return [row["step"] for row in points], [row[name] for row in points]


def moving_mean(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """Mean of each value and those before it, at most `width` in all."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means


def text_curve(values: Sequence[float], width: int = 60, height: int = 8) -> str:
    """The values as a bar chart of `height` lines, from the smallest to the largest value."""
    columns = min(width, len(values))
    bounds = [round(column * len(values) / columns) for column in range(columns + 1)]
    heights = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, high = min(heights), max(heights)
    scale = (height * 8 - 1) / (high - low) if high > low else 0.0
    filled = [1 + round((value - low) * scale) for value in heights]
    lines = []
    for row in reversed(range(height)):
        label = f"{high:.2f}" if row == height - 1 else f"{low:.2f}" if row == 0 else ""
        bars = "".join(BLOCKS[max(0, min(8, eighths - 8 * row))] for eighths in filled)
        lines.append(f"{label:>6} |{bars}")
    return "\n".join([*lines, " " * 7 + "+" + "-" * columns])


def save_png(steps: Sequence[int], values: Sequence[float], path: str | Path, label: str) -> None:
    """Draw single steps and their moving mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    axes.plot(steps, values, color="0.75", linewidth=1, label="each step")
    axes.plot(steps, moving_mean(values), color="tab:blue", linewidth=2, label=f"mean of {SMOOTHING} steps")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    metric = sys.argv[3] if len(sys.argv) == 4 else "reward"
    try:
        at, seen = read_metric(sys.argv[1], metric)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(text_curve(seen))
    save_png(at, seen, sys.argv[2], metric)
