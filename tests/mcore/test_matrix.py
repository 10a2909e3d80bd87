"""2BW equals the oracle to the last bit in every precision and layout; `scripts/oracle_matrix.py` runs all cells."""

from __future__ import annotations

import itertools

import pytest

from .compare import differing
from .conftest import SLOW
from .harness import run
from .matrix import ALL, COVERING, LAYOUTS, PRECISIONS, Cell, compared
from .oracle import oracle


@pytest.mark.parametrize("cell", COVERING, ids=str)
def test_equal_to_the_oracle(cell: Cell) -> None:
    """Losses, loss scales, the gradient of every weight in every update, and final weights; clipping active."""
    comparison = compared(cell.case())
    assert comparison.problems() == []
    assert 0.2 <= comparison.clipped <= 0.8


def test_cells_cover_every_value() -> None:
    assert {(cell.layout, cell.precision) for cell in COVERING} == set(itertools.product(LAYOUTS, PRECISIONS))
    for values in zip(*COVERING, strict=True):
        assert all(values.count(value) >= 2 for value in values)
    every = {value for cell in ALL for value in cell}
    slow = SLOW[test_equal_to_the_oracle.__name__]
    quick = [cell for cell in COVERING if not str(cell).startswith(slow)]
    assert every == {value for cell in COVERING for value in cell} == {value for cell in quick for value in cell}


def test_what_a_cell_must_notice_is_in_all_of_it() -> None:
    """Ordinary training differs from delayed training in every gradient of a later update, and in every weight."""
    case = Cell("PP2", "bf16", "no", tied=True).case()
    found = run(case)
    assert found.gradients.keys() == found.main.keys() == found.final.keys()
    different = differing(found, oracle(case, delay=0, clipped_as=found), norms=False)
    assert {"losses", *(f"gradients {name}" for name in found.gradients)} <= set(different)
    assert {f"main {name}" for name in found.main} <= set(different)
