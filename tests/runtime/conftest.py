"""For the tests of this folder."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """As the stages have it: with more, some sums of the loop are taken in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
