"""Progress with gradients one step old, as measured: ``plan --sample-efficiency auto``."""

from __future__ import annotations

AUTO = "auto"
MEASURED = 0.8
"""Share of the batches after which the same optimizer has the same loss without a delay.

Of Muon with the lead that the README recommends, on a GPT of 0.36M parameters: ``worth`` in
``scripts/bench/results/time_to_loss.txt``, rounded down to a multiple of 0.05.
"""
RECOMMENDED = (
    "--optimizer muon --muon-momentum 0.9 --muon-extra-scale-factor 0.2 --adam-beta1 0.93 --delay-correction lead "
    "--delay-lead 2"
)
"""Flags to train like that."""
ASSUMPTION = (
    f"A sample efficiency of {MEASURED:g} is that of a small GPT with {RECOMMENDED}, beside Muon without a delay; with "
    "AdamW it is lower, and about 1 with --synchronous-warmup-iters for a fifth of the run, which this plan does not "
    "price. Say yours with --sample-efficiency."
)
