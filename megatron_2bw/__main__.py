"""``torchrun ... -m megatron_2bw SCRIPT ARGS``: run a Megatron script with our schedules on offer."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

USAGE = "usage: torchrun --nproc-per-node N -m megatron_2bw SCRIPT [ARGS of SCRIPT ...]"


def main() -> None:
    """Install the hooks, then run the script as ``python SCRIPT`` would."""
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        given = f"there is no script {sys.argv[1]!r}; " if len(sys.argv) > 1 else ""
        print(f"megatron_2bw: error: {given}{USAGE}", file=sys.stderr)
        raise SystemExit(2)
    script = sys.argv[1]
    if not sys.flags.safe_path:
        working_directory = sys.path[0]
        # A Megatron beside the script comes before it, as without us.
        sys.path.insert(0, str(Path(script).resolve().parent))
    from megatron_2bw import install
    from megatron_2bw.mcore.symbols import UnsupportedMegatronError

    try:
        install()
    except UnsupportedMegatronError as error:
        print(f"megatron_2bw: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error

    from torch.distributed.elastic.multiprocessing.errors import record

    sys.argv = sys.argv[1:]
    if not sys.flags.safe_path:
        sys.path.remove(working_directory)
    # `record` lets torchrun name the rank that failed first, not those that lost their peer.
    record(runpy.run_path)(script, run_name="__main__")


if __name__ == "__main__":
    main()
