"""Print the tables behind figures of the papers: speed-ups from the default cost model, others from closed forms.

    python scripts/bench/paper_figures.py [NAME ...]

NAME is one of decisions, speedups (also figures 6 and 10), figure-7 (with 11), figure-8, figure-9, figure-12
(PipeDream-2BW) and mixpipe; all of them by default. Each table states its configuration.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_2bw.planner.paper_figures import TABLES


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the tables behind figures of the papers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of {', '.join(TABLES)} (default: all)")
    names = parser.parse_args(argv).names or list(TABLES)
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}; choose from {', '.join(TABLES)}")
    print("\n\n".join(str(TABLES[name]()) for name in names))


if __name__ == "__main__":
    main()
