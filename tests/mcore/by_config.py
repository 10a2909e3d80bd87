"""One rank of a run whose model Megatron builds from a ModelConfig, as its own ``pretrain_gpt.py`` does since 0.19."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from .case import Case
from .worker import forward_step, install, set_environment


def main(case: Case, rank: int, port: int, folder: Path) -> None:
    """Run ``case`` as ``rank``; the output is all that is left of it."""
    set_environment(rank, case.ranks, port)
    install(case)
    from megatron import training
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from .model import datasets
    from .record import RankRecord

    sys.argv = ["pretrain_gpt.py", *case.arguments()]
    args = parse_and_validate_args()
    training.pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets(case.kind),
        ModelType.encoder_or_decoder,
        partial(forward_step, case.kind, RankRecord()),
    )
