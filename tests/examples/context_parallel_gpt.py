"""examples/pretrain_gpt.py, with a stand-in for Transformer Engine's context-parallel attention."""

from __future__ import annotations

import runpy
from pathlib import Path

import megatron_2bw
from tests.mcore.stand_ins import attend_across_ranks

megatron_2bw.install()
attend_across_ranks()
runpy.run_path(str(Path(__file__).parents[2] / "examples/pretrain_gpt.py"), run_name="__main__")
