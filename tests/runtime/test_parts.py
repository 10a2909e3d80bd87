"""The executor's parts by themselves."""

import itertools
import threading
import time
import weakref
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from megatron_2bw.runtime.background import Background
from megatron_2bw.runtime.errors import PeerLostError, needs_peers, place_of
from megatron_2bw.runtime.gradients import CapturedGradients, Region
from megatron_2bw.runtime.links import LANES, Boundary, Links
from megatron_2bw.runtime.update import PendingUpdate
from megatron_2bw.runtime.weights import WeightVersions
from megatron_2bw.schedule.action import Action, Reduction
from megatron_2bw.schedule.program import GradientCopy

CPU = torch.device("cpu")


def _parameter(*values):
    parameter = torch.nn.Parameter(torch.tensor(values))
    parameter.main_grad = torch.zeros_like(parameter)
    return parameter


def _increase(parameter):
    with torch.no_grad():
        parameter += 1


def test_versions_live_for_two_updates_and_no_longer():
    weight = _parameter(0.0)
    versions = WeightVersions([weight])
    for newest in (1, 2, 3):
        with versions.update():
            _increase(weight)
        for version in (newest - 1, newest):
            versions.use(version)
            assert weight.item() == version
        for gone in (newest - 2, newest + 1):
            if gone < 0:  # Before the first batch there are only the initial weights.
                continue
            with pytest.raises(RuntimeError, match=rf"W\({gone}\) is not alive"):
                versions.use(gone)


def test_negative_versions_are_the_initial_weights():
    weight = _parameter(3.0)
    versions = WeightVersions([weight])
    versions.use(-1)
    assert weight.item() == 3.0


def test_the_delay_begins_anew():
    weight = _parameter(0.0)
    versions = WeightVersions([weight])
    for _ in range(2):
        with versions.update():
            _increase(weight)
    versions.forget_older()
    versions.use(1)
    assert (weight.item(), versions.alive) == (2.0, 1)
    with versions.update():
        _increase(weight)
    versions.use(2)
    assert (weight.item(), versions.alive) == (2.0, 2)


def test_an_update_that_changes_nothing_repeats_the_newest_version():
    weight = _parameter(0.0)
    versions = WeightVersions([weight])
    with versions.update():
        _increase(weight)
    with versions.update():
        pass
    versions.use(2)
    assert weight.item() == 1.0


def test_backward_after_an_update_uses_the_version_of_its_forward():
    weight = _parameter(2.0)
    versions = WeightVersions([weight])
    value = torch.tensor([5.0], requires_grad=True)
    output = value * weight
    with versions.update():  # In place: autograd must not see a change of what it saved.
        _increase(weight)
    versions.use(0)
    output.backward()
    assert value.grad.item() == 2.0


def test_captured_gradients_mirror_shape_and_place():
    buffer = torch.ones(6)
    first, second = buffer[:2], buffer[2:].view(2, 2)
    captured = CapturedGradients([Region(buffer, buffer)])
    assert buffer.tolist() == [0.0] * 6, "of a batch before"
    buffer.copy_(torch.arange(6.0))
    captured.capture()
    assert buffer.tolist() == [0.0] * 6
    assert captured.view_of(first).tolist() == [0.0, 1.0]
    assert captured.view_of(second).tolist() == [[2.0, 3.0], [4.0, 5.0]]


def test_of_a_shard_only_what_lies_in_it_is_kept():
    buffer = torch.zeros(8)
    captured = CapturedGradients([Region(buffer, buffer[4:])])
    buffer[4:] = torch.arange(4.0)
    captured.capture()
    assert buffer.any()
    captured.capture_shards()
    assert not buffer.any()
    assert captured.within(buffer[:4]) is None
    assert captured.within(buffer[2:6].view(2, 2)).tolist() == [0.0, 1.0]
    assert captured.view_of(buffer[5:7]).tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="not captured as a whole"):
        captured.view_of(buffer[2:6])


def test_without_a_second_buffer_gradients_stay_in_place_until_released():
    buffer = torch.arange(3.0)
    captured = CapturedGradients([Region(buffer, buffer)], second_buffer=False)
    captured.capture()
    assert captured.view_of(buffer).data_ptr() == buffer.data_ptr()
    captured.release()
    assert buffer.tolist() == [0.0, 0.0, 0.0]


def test_without_a_second_buffer_all_of_a_sharded_buffer_is_released():
    buffer = torch.ones(4)
    captured = CapturedGradients([Region(buffer, buffer[2:])], second_buffer=False)
    captured.capture()
    captured.release()
    assert buffer.tolist() == [0.0] * 4


def test_one_sharded_region_among_whole_ones_has_to_be_waited_for():
    """Experts spread over all replicas have no shards; the other weights do."""
    dense, experts = torch.zeros(4), torch.zeros(4)
    captured = CapturedGradients([Region(dense, dense[:2]), Region(experts, experts)])
    assert captured.copy is GradientCopy.SHARD


def test_versions_of_a_flat_buffer_take_its_views_along():
    buffer = torch.zeros(4)
    weight = torch.nn.Parameter(buffer[1:3].view(2, 1))
    shard = buffer[2:4]
    versions = WeightVersions([weight], buffers=[buffer], views=[shard])
    with versions.update(), torch.no_grad():
        shard += 1.0
        buffer[1] = 5.0
    assert weight.tolist() == [[5.0], [1.0]]
    versions.use(0)
    assert weight.tolist() == [[0.0], [0.0]]
    assert buffer.tolist() == shard.tolist() * 2 == [0.0] * 4


def test_background_runs_in_order_and_does_not_block_the_caller():
    background = Background(CPU, "test")
    gate, order = threading.Event(), []

    def first():
        gate.wait(10)
        order.append(1)

    waiting = background.submit(first)
    following = background.submit(lambda: order.append(2))
    assert not waiting.done()
    assert not following.done()
    gate.set()
    background.result(following)
    assert order == [1, 2]


def test_background_raises_where_the_result_is_wanted():
    background = Background(CPU, "test")

    def fail():
        raise ValueError("peer lost")

    with pytest.raises(ValueError, match="peer lost"):
        background.result(background.submit(fail))
    assert background.result(background.submit(lambda: 3)) == 3


def test_background_holds_on_to_nothing():
    background = Background(CPU, "test that ends")
    value = torch.zeros(1)
    alive = weakref.ref(value)
    background.result(background.submit(value.clone))
    del value
    end_s = time.monotonic() + 10
    while alive() is not None and time.monotonic() < end_s:  # Its thread may not have gone on yet.
        time.sleep(0.01)
    assert alive() is None
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "test that ends")
    background.close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_this_ranks_own_device_stays_what_it_is(error: type[RuntimeError]):
    with pytest.raises(error, match="mine"), needs_peers("a transfer"):
        raise error("mine")
    with pytest.raises(PeerLostError, match="a transfer failed"), needs_peers("a transfer"):
        raise RuntimeError("Connection closed by peer")


def _pending(weight):
    captured = CapturedGradients([Region(weight.main_grad, weight.main_grad)])
    return PendingUpdate(WeightVersions([weight]), captured, {Reduction.GRADIENTS: lambda: None})


def test_a_pending_update_keeps_its_gradients_while_the_next_batch_accumulates():
    weight = _parameter(1.0)
    pending = _pending(weight)
    weight.main_grad += 4
    pending.reduce_start(Action.parse("0REDUCE_START:grads"))
    weight.main_grad += 100
    with pending.apply(), torch.no_grad():
        weight -= pending.captured.view_of(weight.main_grad)
    assert (weight.item(), weight.main_grad.item(), pending.batch) == (-3.0, 100.0, None)


def test_capturing_over_a_pending_batch_is_refused():
    pending = _pending(_parameter(1.0))
    pending.reduce_start(Action.parse("0REDUCE_START:grads"))
    with pytest.raises(RuntimeError, match="batch 1 cannot be captured: the update of batch 0 is pending"):
        pending.reduce_start(Action.parse("0REDUCE_START:grads@1"))


def test_the_oldest_receive_that_the_device_waits_for(monkeypatch):
    """Over NCCL, where no wait of the host shows it."""
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:nccl")
    monkeypatch.setattr(dist, "irecv", lambda tensor, peer, group: MagicMock())
    done, numbers = set(), itertools.count()

    def record_event():
        number = next(numbers)
        return SimpleNamespace(query=lambda: number in done)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(record_event=record_event))
    links = Links(groups={lane: str(lane) for lane in LANES}, ranks=[0, 1], device=CPU)
    assert links.waiting(str(LANES[0])) is None
    receives = [Action.parse(f"0RECV_B{microbatch}") for microbatch in range(3)]
    for receive in receives:
        links.post_receive(receive, 1, Boundary(shape=(1,), dtype=torch.float32, device=CPU))
    assert links.waiting(str(LANES[0])) is None
    for receive in receives:
        links.take(receive)
    assert links.waiting(str(LANES[0])).startswith("stage 0: 0RECV_B0 ")
    assert links.waiting("another") is None
    done.add(0)
    assert links.waiting(str(LANES[0])).startswith("stage 0: 0RECV_B1 ")
    done.update((1, 2))
    assert links.waiting(str(LANES[0])) is None


def test_sends_are_let_go_where_torch_chose_the_backend(monkeypatch):
    """As by ``init_process_group()``, after which a group's backend is "undefined"."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        links = Links(groups=dict.fromkeys(LANES, dist.group.WORLD), ranks=[0, 1], device=CPU)
        sent = [MagicMock(**{"is_completed.return_value": False}) for _ in range(5)]
        works = iter(sent)
        monkeypatch.setattr(dist, "isend", lambda tensor, peer, group: next(works))
        for microbatch in range(5):
            links.send(Action.parse(f"0SEND_F{microbatch}"), 1, torch.zeros(1))
        assert [work.wait.called for work in sent] == [True, True, True, False, False]
        links.flush()
    finally:
        dist.destroy_process_group()
    assert all(work.wait.called for work in sent)


@pytest.mark.parametrize(("action", "named"), [("1F2v-1", "1F2v0"), ("1F2@3v2", "1F2@3v2"), ("1UPDATE", "1UPDATE")])
def test_a_place_names_weights_that_there_are(action, named):
    assert place_of(Action.parse(action)).startswith(f"stage 1: {named} (")
