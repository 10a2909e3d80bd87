"""Throughput against memory as a standalone SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from megatron_2bw.planner.cost.costs import PRICED
from megatron_2bw.planner.naming import name
from megatron_2bw.planner.search.finder import Choice
from megatron_2bw.planner.search.search import Plan
from megatron_2bw.planner.table import GIB, gib
from megatron_2bw.schedule.pictures.svg import FAINT_INK, FONTS, INK, text_at

_COLOURS = dict(
    zip(
        PRICED,
        ("#2563b5", "#bf5f0b", "#2a7d43", "#7140ab", "#6b7280", "#b3261e", "#0e7c86", "#c2187a", "#8a6d00"),
        strict=True,
    )
)
_GRID, _LIMIT = "#e9ebf0", "#d1242f"
_WIDTH, _HEIGHT = 900, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 28, 72, 60
_MARKS = 6


def plot(plan: Plan) -> str:
    """Every layout of ``plan`` as a dot: memory of its fullest stage across, tokens per second upwards.

    The picture stands on a white card, so it can be read on light and on dark pages.
    """
    gpu_gib = plan.cluster.gpu.memory_gb
    fastest = max(choice.iteration.tokens_per_s for choice in plan.choices)
    title = f"{plan.model.name or plan.model.kind.upper()} on {plan.cluster.gpus:,} x {plan.cluster.gpu.name}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'font-family="{FONTS}">',
            f"<title>{escape(title)}: throughput against memory</title>",
            f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="12" fill="#fff" stroke="#d5d9e2"/>',
            text_at(_LEFT, 34, title, size=18, weight=600),
            *_axes(gpu_gib, fastest),
            *(_dot(choice, gpu_gib, fastest) for choice in reversed(plan.choices)),
            *_winner(plan.best, gpu_gib, fastest),
            *_legend(plan),
            "</svg>",
            "",
        ]
    )


def _axes(gpu_gib: float, fastest: float) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for mark in marks(gpu_gib):
        x = _across(mark, gpu_gib)
        yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="{_GRID}"/>'
        yield text_at(x, bottom + 20, f"{mark:g}", anchor="middle", fill=FAINT_INK)
    for mark in marks(fastest):
        y = _upwards(mark, fastest)
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{_GRID}"/>'
        yield text_at(_LEFT - 8, y + 4, f"{mark:,.0f}", anchor="end", fill=FAINT_INK)
    x = _across(gpu_gib, gpu_gib)
    yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="{_LIMIT}" stroke-dasharray="5 4"/>'
    yield text_at((_LEFT + right) / 2, _HEIGHT - 18, "memory of the fullest stage, GiB", anchor="middle")
    yield text_at(_LEFT - 8, _TOP - 12, "tokens/s", anchor="end")


def marks(most: float) -> list[float]:
    """Round numbers from 0 to ``most``.

    >>> marks(80), marks(1234)
    ([0, 20, 40, 60, 80], [0, 250, 500, 750, 1000])
    """
    power = 10.0 ** math.floor(math.log10(most / (_MARKS - 1)))
    step = next(step for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if most / step < _MARKS)
    step = int(step) if step >= 1 and step == int(step) else step
    return [step * index for index in range(int(most / step) + 1)]


def _dot(choice: Choice, gpu_gib: float, fastest: float) -> str:
    x = _across(choice.memory.total_bytes / GIB, gpu_gib)
    y = _upwards(choice.iteration.tokens_per_s, fastest)
    tip = f"{name(choice.layout)}: {choice.iteration.tokens_per_s:,.0f} tokens/s, {gib(choice.memory.total_bytes)} GiB"
    colour = _COLOURS[choice.layout.schedule]
    circle = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}" fill-opacity="0.7">'
    return f"{circle}<title>{escape(tip)}</title></circle>"


def _winner(best: Choice, gpu_gib: float, fastest: float) -> Iterator[str]:
    x = _across(best.memory.total_bytes / GIB, gpu_gib)
    y = _upwards(best.iteration.tokens_per_s, fastest)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="{INK}" stroke-width="1.5"/>'
    on_the_right = x > (_LEFT + _WIDTH) / 2
    yield text_at(
        x + (-14 if on_the_right else 14), y - 10, name(best.layout), anchor="end" if on_the_right else "start"
    )


def _legend(plan: Plan) -> Iterator[str]:
    x = _LEFT
    present = {choice.layout.schedule for choice in plan.choices}
    for schedule in (schedule for schedule in PRICED if schedule in present):
        yield f'<circle cx="{x + 5}" cy="51" r="5" fill="{_COLOURS[schedule]}"/>'
        yield text_at(x + 15, 55, schedule, fill=FAINT_INK)
        x += 40 + 8 * len(schedule)
    yield f'<path d="M{x} 51h18" stroke="{_LIMIT}" stroke-dasharray="5 4"/>'
    yield text_at(x + 24, 55, f"{plan.cluster.gpu.memory_gb:g} GiB of the GPU", fill=FAINT_INK)


def _across(size_gib: float, gpu_gib: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * size_gib / (1.04 * gpu_gib)


def _upwards(rate: float, fastest: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * rate / (1.06 * fastest)
