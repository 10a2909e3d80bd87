"""What is found out only when training begins: a Megatron or a training loop that asks for something else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def test_only_an_attribute_that_megatron_has_is_replaced() -> None:
    from megatron_2bw.mcore.symbols import UnsupportedMegatronError, replace

    target = SimpleNamespace(there=1)
    with replace(target, "there", 2):
        assert target.there == 2
    assert target.there == 1
    with pytest.raises(UnsupportedMegatronError, match=r"SimpleNamespace\.renamed is missing"):
        replace(target, "renamed", 2)


@pytest.mark.parametrize("name", ["adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"])
def test_what_a_training_loop_passes_and_we_do_not_use(name: str) -> None:
    from megatron_2bw.mcore.stages.stage import Call

    keywords = dict.fromkeys(Call.__slots__) | {"num_microbatches": 2}
    assert Call.of({**keywords, name: None}, "2bw").num_microbatches == 2
    with pytest.raises(RuntimeError, match=f"passes {name} to its schedule, and --pipeline-schedule 2bw has no use"):
        Call.of({**keywords, name: object()}, "2bw")
