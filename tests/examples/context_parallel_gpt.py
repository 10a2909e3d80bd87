"""examples/pretrain_gpt.py, with a stand-in for Transformer Engine's context-parallel attention."""

from __future__ import annotations

import runpy
from pathlib import Path

import megatron_2bw

if __name__ == "__main__":  # Pytest imports it, too.
    megatron_2bw.install()  # Before Megatron is imported.

    from tests.mcore.stand_ins import attend_across_ranks

    attend_across_ranks()
    runpy.run_path(str(Path(__file__).parents[2] / "examples/pretrain_gpt.py"), run_name="__main__")
