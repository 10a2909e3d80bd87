"""Running what a plan says: what is made of the times. `tests/mcore/test_profile.py` runs a layout for real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_2bw.planner.errors import PlanError
from megatron_2bw.planner.measure import verify
from megatron_2bw.planner.measure.profile import Profile, Setting
from megatron_2bw.planner.measure.verify import LOG_INTERVAL, LOGS
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.report.advice import advice
from megatron_2bw.planner.search.search import Plan, search
from megatron_2bw.planner.specs.cluster import CLUSTERS
from megatron_2bw.planner.specs.layout import Precision
from megatron_2bw.planner.specs.model import Model
from megatron_2bw.planner.specs.space import Space

MODEL = Model(num_layers=8, hidden_size=1024, num_attention_heads=16, seq_length=512, vocab_size=1024)
SCHEDULES = "2bw", "1f1b-flush", "gpipe"


@pytest.fixture
def plan() -> Plan:
    """The best layout of each schedule, one after the other."""
    found = search(MODEL, CLUSTERS["dgx-a100"], 16, Space(pipelines=(4,), tensors=(1,), widths=(2,), microbatches=(2,)))
    choices = [next(choice for choice in found.choices if choice.layout.schedule == name) for name in SCHEDULES]
    times_s = [choice.iteration.time_s for choice in choices]
    assert times_s == sorted(times_s)
    return verify.replace(found, choices=tuple(choices))


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of this machine."""
    here = ["NVIDIA A100-SXM4-80GB"] * 8
    monkeypatch.setattr(verify, "gpus_here", lambda: here)
    return here


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, list[list[int]]]], list[str]]:
    """Let layouts log these milliseconds, a list for each run; returns the schedules in the order they ran."""

    def use(runs: dict[str, list[list[int]]]) -> list[str]:
        order: list[str] = []

        def lines(words: list[str], **_: object) -> list[str]:
            schedule = words[words.index("--pipeline-schedule") + 1]
            order.append(schedule)
            # As Megatron 0.19.2 logs: the first iteration by itself, too.
            numbers = (1, *range(LOG_INTERVAL, LOG_INTERVAL * LOGS + 1, LOG_INTERVAL))
            logged = zip(numbers, [9999.0, *runs[schedule].pop(0)], strict=False)
            return [f" iteration {n}/ 16 | elapsed time per iteration (ms): {ms:.1f} |" for n, ms in logged]

        monkeypatch.setattr(verify, "lines_of", lines)
        return order

    return use


def verdict(plan: Plan) -> str:
    return next(iter(advice(plan)))


def test_runs_in_turn_and_forgets_the_first_line(plan, log):
    start = 9000
    order = log(
        {
            "2bw": [[start, 100, 110, 120], [start, 130, 140, 150]],
            "1f1b-flush": [[start, 200, 200, 200], [start, 210, 210, 210]],
            "gpipe": [[start, 300, 300, 300], [start, 310, 310, 310]],
        }
    )
    ran = verify.measured(plan, list(plan.choices), rounds=2)
    assert order == ["2bw", "1f1b-flush", "gpipe", "gpipe", "1f1b-flush", "2bw"]
    assert ran.best.measured_s == pytest.approx(0.125)
    assert ran.best.measured_range_s == pytest.approx((0.1, 0.15))
    assert "ranks them as predicted: " in verdict(ran)


def test_times_that_overlap_have_no_order(plan, log):
    log({"2bw": [[1, 90, 110, 120]], "1f1b-flush": [[1, 90, 100, 120]], "gpipe": [[1, 200, 200, 200]]})
    ran = verify.measured(plan, list(plan.choices))
    assert ran.best.layout.schedule == "1f1b-flush"
    assert "as predicted, but for times that overlap: " in verdict(ran)


def test_another_order_is_named(plan, log):
    log({"2bw": [[1, 130, 130, 140]], "1f1b-flush": [[1, 90, 100, 120]], "gpipe": [[1, 200, 200, 200]]})
    ran = verify.measured(plan, list(plan.choices))
    two_bw, flush, _ = map(name, (choice.layout for choice in plan.choices))
    assert f"not as predicted ({flush} before {two_bw}): " in verdict(ran)


def test_what_fails_comes_last_and_is_not_run_again(plan, log, capsys):
    order = log({"2bw": [[1, 2]], "1f1b-flush": [[1, 2, 2, 2]] * 2, "gpipe": [[1, 3, 3, 3]] * 2})
    ran = verify.measured(plan, list(plan.choices), rounds=2)
    assert [choice.layout.schedule for choice in ran.choices] == ["1f1b-flush", "gpipe", "2bw"]
    assert order.count("2bw") == 1
    assert "it logged 1 of 3 times" in capsys.readouterr().err


def test_nothing_ran(plan, log):
    log({schedule: [[1]] for schedule in SCHEDULES})
    with pytest.raises(PlanError, match="none of the layouts ran; it logged 0 of 3 times"):
        verify.measured(plan, list(plan.choices))


def test_a_plan_for_gpus_that_are_not_here_is_not_run(plan, log, gpus):
    order = log({})
    for left, said in (7, "has 7 of the 8 GPUs"), (0, "has none of the 8 GPUs"):
        del gpus[left:]
        with pytest.raises(PlanError, match=said):
            verify.measured(plan, list(plan.choices))
    assert not order


@pytest.mark.parametrize("processors", [0, 2])
def test_what_was_profiled_elsewhere_is_not_run_here(plan, log, gpus, processors: int):
    """Neither a profile of other GPUs, nor one of processors where a run would use GPUs."""
    log({name: [[1, 100, 100, 100]] for name in SCHEDULES})
    machine = Profile(
        model=MODEL,
        setting=Setting(ranks=8, precision=Precision.BF16, fused_attention=True, sequence_parallel=False),
        date="2026-11-30",
        device="NVIDIA H200",
        processors=processors,
    )
    there = verify.replace(plan, cluster=verify.replace(plan.cluster, profile=machine))
    with pytest.raises(PlanError, match="runs on NVIDIA A100-SXM4-80GB here, and the profile is of NVIDIA H200"):
        verify.measured(there, list(there.choices))
    here = verify.replace(machine, device=gpus[0], processors=0)
    verify.measured(verify.replace(plan, cluster=verify.replace(plan.cluster, profile=here)), list(plan.choices))


def test_there_must_be_a_script(plan, tmp_path: Path):
    with pytest.raises(PlanError, match="give your training script"):
        verify.measured(plan, list(plan.choices), tmp_path / "none.py")
