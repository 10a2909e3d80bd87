"""Text pictures kept in ``tests/golden``; ``python -m tests.schedule.goldens`` writes them again."""

from __future__ import annotations

from pathlib import Path

from megatron_2bw.schedule.action import Reduction
from megatron_2bw.schedule.calls import WHOLE
from megatron_2bw.schedule.lowering import lower
from megatron_2bw.schedule.pictures.draw import grid
from megatron_2bw.schedule.registry import SCHEDULES, build
from megatron_2bw.schedule.validation.feasible import works
from megatron_2bw.schedule.validation.listing import listing

from .others import ONE_WAY

FOLDER = Path(__file__).parents[1] / "golden"
SIZES = ((2, 2), (4, 1), (4, 3), (4, 4), (4, 8))


def goldens() -> dict[str, str]:
    """Contents by file name."""
    files = {}
    for name in SCHEDULES:
        for stages, microbatches in SIZES:
            if works(name, stages=stages, microbatches=microbatches):
                schedule = build(name, stages=stages, microbatches=microbatches)
                files[f"grid-{name}-d{stages}-m{microbatches}.txt"] = grid(schedule, batches=3)
        stages = 3 if name in ONE_WAY else 4
        microbatches = 1 if name == "pipedream" else stages
        schedule = lower(build(name, stages=stages, microbatches=microbatches), tuple(Reduction))
        files[f"programs-{name}-d{stages}-m{microbatches}.txt"] = "\n\n".join(
            listing(schedule, part) for part in WHOLE.values()
        )
    return {file: f"{text}\n" for file, text in files.items()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for file, text in goldens().items():
        (FOLDER / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
