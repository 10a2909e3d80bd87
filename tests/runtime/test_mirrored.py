"""GEMS, Chimera and MixPipe on a toy model equal synchronous training in one process, to the last bit."""

from itertools import starmap

import pytest
import torch

from tests.runtime.mirrored import Size, Trained, expected, train

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [
    Size("gems", 2, 4),
    Size("chimera", 2, 2),
    Size("gems", 4, 4),
    Size("chimera", 4, 4),
    Size("chimera", 4, 8),
    Size("mixpipe", 4, 4),
    Size("mixpipe", 4, 4, (("k", 2),)),
    Size("mixpipe", 4, 8),
    Size("mixpipe", 4, 4, (("k", 2), ("gamma", 1)), batches=60, jitter_s=0.002),
]


@pytest.fixture(scope="module")
def trained() -> dict[Size, Trained]:
    """All sizes of a depth in the same processes, most of whose time is their start."""
    depths = ([size for size in SIZES if size.stages == stages] for stages in (2, 4))
    return {size: found for sizes in depths for size, found in zip(sizes, train(sizes), strict=True)}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_loop(size: Size, trained: dict[Size, Trained]):
    found, wanted = trained[size], expected(size)
    assert found.losses == wanted.losses
    assert found.weights.keys() == wanted.weights.keys()
    for stage, weights in wanted.weights.items():
        assert len(weights) > 0
        assert all(starmap(torch.equal, zip(found.weights[stage], weights, strict=True))), f"stage {stage}"
    assert tuple(found.in_flight) == size.schedule().in_flight
