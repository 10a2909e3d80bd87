"""Pictures of Timelines as standalone SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from xml.sax.saxutils import escape, quoteattr

from megatron_2bw.schedule.action import COMPUTE, WORK, ActionType
from megatron_2bw.schedule.durations import Seconds
from megatron_2bw.schedule.timeline import Event, Timeline, percent

_HUES = (("#a9cdf8", "#2563b5"), ("#fcd19c", "#bf5f0b"), ("#b4dfb7", "#2a7d43"), ("#dbc6f0", "#7140ab"))
"""(forward, backward) of batches 0, 1, ..., over and over."""
INK, FAINT_INK, _IDLE, _CARD, _EDGE, _UPDATE = "#1f2430", "#5b6474", "#e9ebf0", "#ffffff", "#d5d9e2", "#d1242f"

_WIDTH, _MARGIN = 1200, 28
_LABELS = 58
_ROW, _CELL = 28, 22
_TITLE, _HEADING, _PANEL_GAP, _LEGEND = 40, 34, 22, 34
FONTS = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Noto Sans', 'DejaVu Sans', 'Liberation Sans', sans-serif"
_LETTER, _BOLD_LETTER = 0.56, 0.64
"""Mean width of a letter relative to the font size; only spacing depends on it."""


def svg(*timelines: Timeline, title: str = "", notes: Sequence[str] = ()) -> str:
    """Draw Timelines beneath each other on one time axis.

    One hue per batch, light for forwards and dark for backwards, with microbatch numbers; gray is
    idle, a red mark is an update. The heading of a panel gives its bubble and the weights that each batch
    used. The picture stands on a white card, so it can be read on light and on dark pages.

    Args:
        timelines: at least one.
        title: above all panels.
        notes: one per timeline, written behind its bubble.

    Raises:
        ValueError: no timeline, or one in which nothing takes time.
    """
    if not timelines or not all(timeline.makespan_s > 0 for timeline in timelines):
        raise ValueError(f"got {len(timelines)} timelines; svg draws one or more, each with events that take time")
    slowest_s = max(timeline.makespan_s for timeline in timelines)
    scale = (_WIDTH - 2 * _MARGIN - _LABELS) / float(slowest_s)
    top = _MARGIN + (_TITLE if title else 0)
    body: list[str] = []
    for timeline, note in zip_longest(timelines, notes, fillvalue=""):
        panel = _Panel(timeline=timeline, note=note, top=top, scale=scale)
        body.extend(panel.draw(float(slowest_s / timeline.makespan_s)))
        top = panel.bottom + _PANEL_GAP
    height = top + _LEGEND
    summary = "; ".join(f"{timeline.name}: bubble {percent(timeline.bubble_ratio)}" for timeline in timelines)
    heading = [text_at(_MARGIN, _MARGIN + 16, title, size=20, weight=600)] if title else []
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
            f"aria-label={quoteattr(summary)} "
            f'font-family="{FONTS}">',
            f"<title>{escape(title or summary)}</title>",
            f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="12" fill="{_CARD}" stroke="{_EDGE}"/>',
            *heading,
            *body,
            *_legend(height - _LEGEND + 12),
            "</svg>",
            "",
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One Timeline."""

    timeline: Timeline
    note: str
    top: float
    scale: float
    """Pixels per second."""

    @property
    def bottom(self) -> float:
        return self.top + _HEADING + _ROW * len(self.timeline.events)

    def draw(self, speedup: float) -> Iterator[str]:
        """``speedup`` is over the slowest timeline of the picture."""
        yield from self._heading()
        end = self._x(self.timeline.end_s)
        for rank, events in enumerate(self.timeline.events):
            y = self.top + _HEADING + rank * _ROW
            yield text_at(_MARGIN, y + 16, f"rank {rank}", fill=FAINT_INK)
            yield _box(_MARGIN + _LABELS, y, end - _MARGIN - _LABELS, _CELL, _IDLE)
            for event in events:
                if event.action.type in WORK:  # A rank that waits is idle.
                    yield from self._event(event, y)
        room = _WIDTH - _MARGIN - end
        if room > 110:
            middle = self.top + _HEADING + (_ROW * len(self.timeline.events) - _ROW + _CELL) / 2
            yield text_at(end + room / 2, middle + 2, f"{speedup:.2f}\u00d7", size=26, weight=600, anchor="middle")
            yield text_at(end + room / 2, middle + 22, "as fast", fill=FAINT_INK, anchor="middle")

    def _heading(self) -> Iterator[str]:
        name = self.timeline.name
        x, y = _MARGIN + _LABELS, self.top + 19
        yield text_at(x, y, name, size=17, weight=600)
        x += 17 * _BOLD_LETTER * len(name) + 22
        bubble = f"bubble {percent(self.timeline.bubble_ratio)}{self.note}"
        yield text_at(x, y, bubble, size=14, fill=FAINT_INK)
        x += 14 * _LETTER * len(bubble) + 26
        for batch, weights in _weights(self.timeline):
            label = f"batch {batch} with {weights}"
            forward, backward = _HUES[batch % len(_HUES)]
            width = 24 + 13 * _LETTER * len(label) + 16
            if x + width > _WIDTH - _MARGIN:
                yield text_at(x, y, "\u2026", fill=FAINT_INK)
                return
            yield _box(x, y - 10, 9, 11, forward, radius=0)
            yield _box(x + 9, y - 10, 9, 11, backward, radius=0)
            yield text_at(x + 24, y, label, fill=FAINT_INK)
            x += width

    def _event(self, event: Event, y: float) -> Iterator[str]:
        action, x, end = event.action, self._x(event.start_s), self._x(event.end_s)
        if action.type not in COMPUTE:
            if end - x > 2:
                yield _box(x, y, end - x, _CELL, _UPDATE, tip=str(action))
            else:
                yield f'<path d="M{end:.1f} {y + 5:.1f}l-4.5 -8h9z" fill="{_UPDATE}"/>'
            return
        forward = action.type is ActionType.FORWARD
        width = 0.9 * (end - x) if end - x < 10 else end - x - 1
        yield _box(x, y, width, _CELL, _HUES[action.batch % len(_HUES)][0 if forward else 1], tip=str(action))
        label = str(action.microbatch)
        if width > 12 * _LETTER * len(label):
            ink = INK if forward else _CARD
            yield text_at(x + width / 2, y + 15.5, label, size=12, anchor="middle", fill=ink)

    def _x(self, time_s: Seconds) -> float:
        return _MARGIN + _LABELS + float(time_s - self.timeline.start_s) * self.scale


def _weights(timeline: Timeline) -> list[tuple[int, str]]:
    """For each batch the weights it was computed with, such as ``W0``, or ``W0-W2`` where stages differ."""
    versions: dict[int, set[int]] = {}
    for events in timeline.events:
        for event in events:
            if event.action.type in COMPUTE:
                versions.setdefault(event.action.batch, set()).add(max(event.action.version, 0))
    spans = {batch: sorted({min(used), max(used)}) for batch, used in sorted(versions.items())}
    return [(batch, "\u2013".join(f"W{version}" for version in ends)) for batch, ends in spans.items()]


def _legend(y: float) -> Iterator[str]:
    x = _MARGIN + _LABELS
    forward, backward = _HUES[0]
    for fill, text in ((forward, "forward"), (backward, "backward"), (_IDLE, "idle"), (None, "update")):
        if fill is None:
            yield f'<path d="M{x + 9} {y + 8}l-4.5 -8h9z" fill="{_UPDATE}"/>'
        else:
            yield _box(x, y - 3, 18, 13, fill)
        yield text_at(x + 25, y + 8, text, fill=FAINT_INK)
        x += 25 + 13 * _LETTER * len(text) + 24
    yield text_at(x, y + 8, "numbers are microbatches", fill=FAINT_INK)
    yield text_at(_WIDTH - _MARGIN, y + 8, "time \u2192", fill=FAINT_INK, anchor="end")


def _box(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 3, tip: str = "") -> str:
    rounding = f"{min(radius, width / 4):.1f}"
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="{rounding}" fill="{fill}"'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def text_at(
    x: float, y: float, text: str, *, size: int = 13, weight: int = 400, fill: str = INK, anchor: str = "start"
) -> str:
    """A line of text; ``anchor`` says which end of it is at x: start, middle or end."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}">{escape(text)}</text>'
    )
