"""Run every command of the README and of the pages beside it, block by block, and say which ones failed.

    python scripts/readme_commands.py [--but TEXT ...]

Leaves its results in quickstart/ and runs/, which git ignores. With --but, lines that contain the text are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "examples/README.md", "megatron_2bw/README.md", "megatron_2bw/planner/README.md")


def blocks(text: str) -> list[str]:
    """What stands in the fences that are marked as shell commands."""
    return re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--but", action="append", default=[], metavar="TEXT")
    args = parser.parse_args()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    failed = 0
    for block in (block for page in PAGES for block in blocks((ROOT / page).read_text(encoding="utf-8"))):
        lines = [line for line in block.splitlines(keepends=True) if not any(text in line for text in args.but)]
        if not lines:
            continue
        block = "".join(lines)
        start_s = time.monotonic()
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        failed += done.returncode != 0
        print(f"{'failed' if done.returncode else 'ran'} in {time.monotonic() - start_s:.0f} s:\n{block}", flush=True)
        if done.returncode:
            print(done.stdout[-4000:], flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
