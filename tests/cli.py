"""The command line, run in this process."""

from __future__ import annotations

import pytest

from megatron_2bw.cli import main


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code = main(command.split())
    except SystemExit as stopped:  # argparse
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err
