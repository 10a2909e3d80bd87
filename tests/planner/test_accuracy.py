"""The report on the planner's accuracy: its arithmetic, and that the committed one is current."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from accuracy import Accuracy, by_group, features, linear, naive, spearman
from planner_accuracy import is_as_stated, predicted_s, report

from megatron_2bw.planner.cost.error_bars import error_bar
from megatron_2bw.planner.specs.model import Kind

from . import measured, measured_dgxc, measured_experts, measured_libai, measured_vocabularies

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def test_accuracy():
    base = measured.vtrain("multi_node")[0]
    times = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 3.0}
    predicted = {"a": 2.2, "b": 2.0, "c": 3.0, "d": 3.3}
    rows = [replace(base, name=name, group="ab" if name in "ab" else "cd", measured=times[name]) for name in times]
    found = Accuracy.of(lambda row: predicted[row.name], rows)
    assert found.mean_error == pytest.approx((1.2 + 0 + 0.25 + 0.1) / 4)
    assert found.median_error == pytest.approx((0.25 + 0.1) / 2)
    assert found.bias == pytest.approx((1.2 - 0.25 + 0.1) / 4)
    assert found.most == pytest.approx(1.2)
    assert found.spearman == pytest.approx(1 - 6 * (1 + 1 + 1 + 1) / (4 * 15))
    assert found.regret == pytest.approx(1.0)


def test_ranks_of_equal_values():
    assert spearman([1, 1, 2, 3], [1, 1, 2, 3]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)


def test_the_linear_model_finds_its_own_constants():
    rows = measured.vtrain("multi_node")
    weights = (1.5, 0.2, 3.0, 0.4, 0.3, 0.05, 0.7)
    made_up = [replace(row, measured=sum(a * b for a, b in zip(weights, features(row), strict=True))) for row in rows]
    predict = linear(made_up)
    assert all(math.isclose(predict(row), row.measured, rel_tol=1e-4) for row in made_up)
    one = naive(rows[:1])
    assert one(rows[0]) == pytest.approx(rows[0].measured)


@pytest.mark.parametrize(
    "published",
    [
        measured.dlperf,
        measured_libai.times,
        measured.aleph_alpha,
        measured_vocabularies.times,
        measured_dgxc.steps,
        measured_experts.many_experts,
    ],
    ids=["v100s", "libai", "llama", "vocabularies", "dgxc", "experts"],
)
def test_nine_of_ten_runs_are_within_what_is_stated(published: Callable[[], Iterable[measured.Row]]):
    rows = list(published())
    assert sum(map(is_as_stated, rows)) >= 0.9 * len(rows)


def test_layouts_of_a_node_without_a_switch_rank_as_measured():
    rows = [row for row in measured.dlperf() if row.group == "16 layers, h=1536, 8 GPUs, B=16"]
    order = sorted(rows, key=predicted_s)
    assert [row.layout.tensor for row in order] == [1, 1, 4, 2, 8, 8]
    assert spearman([predicted_s(row) for row in rows], [row.measured for row in rows]) > 0.95


def test_layouts_of_llama_rank_as_measured():
    """Whatever their trainer costs beside: the one predicted to be the fastest of its group nearly is."""
    found = Accuracy.of(predicted_s, list(measured.aleph_alpha()))
    assert found.spearman > 0.99
    assert found.regret < 0.06


def test_gpt_and_bert_on_v100s_rank_as_measured():
    """The bar of each kind holds for nine of ten of its rows."""
    rows = list(measured_libai.times())
    found = Accuracy.of(predicted_s, rows)
    assert found.rows == 42
    assert found.spearman > 0.98
    assert found.regret < 0.03
    for kind in Kind:
        alike = [row for row in rows if row.model.kind is kind]
        assert sum(map(is_as_stated, alike)) >= 0.9 * len(alike), kind


def test_pipelines_with_large_vocabularies():
    """Fewer layers beside the output layer are as much faster as measured, by a tenth."""
    rows = list(measured_vocabularies.times())
    found = Accuracy.of(predicted_s, rows)
    assert found.rows == 32
    assert found.spearman > 0.98
    assert found.regret == 0
    for alike in by_group(rows).values():
        uneven = [row for row in alike if row.layout.pipeline_layout]
        for row in uneven:
            equal = next(other for other in alike if not other.layout.pipeline_layout)
            faster = predicted_s(equal) / predicted_s(row)
            assert faster == pytest.approx(equal.measured / row.measured, rel=0.1), row.name


def test_the_bar_of_pipelines_alone():
    """Not of those that have data parallelism, too, which were not compared, nor of any that interleaves."""
    row = next(measured_vocabularies.times())
    layouts = [
        row.layout,
        replace(row.layout, data=2),
        replace(row.layout, tensor=2),
        replace(row.layout, chunks=2),
        replace(row.layout, pipeline=1),
    ]
    sources = [error_bar(row.cluster, row.model, layout).source for layout in layouts]
    assert ["pipelines" in source for source in sources] == [True, False, False, False, False]


def test_utilization_of_pipelines_is_a_share_of_320_tflops():
    """Of runs whose seconds are published, too."""
    rows = [row for row in measured.read("vocabularies_a100.csv") if row["iteration_time_ms"]]
    assert len(rows) == 16
    for row in rows:
        by_table_s = measured_vocabularies.by_utilization_s(row)
        assert by_table_s == pytest.approx(float(row["iteration_time_ms"]) / 1e3, rel=0.0005), row["source"]


def test_the_committed_report_is_current():
    """Made by ``python scripts/bench/planner_accuracy.py --output scripts/bench/results/planner_accuracy.txt``."""
    committed = (BENCH / "results" / "planner_accuracy.txt").read_text().splitlines()
    assert [*report(measured.DATA)][1:] == committed[1:]
