"""Runs the demo for several seeds and prints the lift of each; fails if one is under 25 points.

Use: python examples/demo/three_seeds.py [SEED ...]     (default: 0 1 2)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from run import run_demo

LEAST_LIFT = 0.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=[0, 1, 2], metavar="SEED", help="default: 0 1 2")
    seeds = parser.parse_args().seeds
    results = {seed: run_demo(Path(f"runs/demo_seed{seed}"), seed) for seed in seeds}
    print("\nseed   before SFT   after SFT   after RL     lift")
    lifts = []
    for seed, accuracies in results.items():
        before, supervised, reinforced = accuracies.values()
        lifts.append(reinforced - supervised)
        print(f"{seed:>4}{before:>13.1%}{supervised:>12.1%}{reinforced:>11.1%}{100 * lifts[-1]:>+9.1f}")
    if min(lifts) < LEAST_LIFT:
        print(f"the smallest lift is under {100 * LEAST_LIFT:.0f} points", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
