"""Calls of a stage that are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch


@pytest.mark.parametrize("name", ["seq_length", "micro_batch_size", "decoder_seq_length"])
def test_a_call_of_another_shape_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_2bw.mcore.stages import stage as module

    config = SimpleNamespace(variable_seq_lengths=False, pipeline_dtype=torch.float32)
    monkeypatch.setattr(module, "parallel_state", MagicMock())
    monkeypatch.setattr(module, "get_model_config", lambda model: config)
    monkeypatch.setattr(module.schedules, "get_tensor_shapes", lambda **_: [(8, 1, 4)])
    call = module.Call(
        forward_step_func=None,
        data_iterator=None,
        model=torch.nn.Linear(4, 4),
        num_microbatches=2,
        seq_length=8,
        micro_batch_size=1,
        decoder_seq_length=8,
    )
    stage = module.MegatronStage(call, "2bw")
    stage.begin(replace(call, num_microbatches=3))
    stage.end()
    with pytest.raises(RuntimeError, match=f"{name} was .* transfers keep the shape of the first batch"):
        stage.begin(replace(call, **{name: 16}))


def test_sequences_of_variable_length_are_refused(monkeypatch) -> None:
    from megatron_2bw.mcore.stages import stage

    monkeypatch.setattr(stage, "parallel_state", MagicMock())
    monkeypatch.setattr(stage, "get_model_config", lambda model: SimpleNamespace(variable_seq_lengths=True))
    monkeypatch.setattr(stage.schedules, "get_tensor_shapes", lambda **_: [()])
    with pytest.raises(RuntimeError, match="pad all sequences to one length"):
        stage.MegatronStage(MagicMock(), "2bw")
