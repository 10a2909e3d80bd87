"""Tests of this folder need a CUDA device; without one they are skipped."""

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
