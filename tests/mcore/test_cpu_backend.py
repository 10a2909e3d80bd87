"""The CPU backend: what it replaces, and that nothing of it stays behind."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import textwrap

import pytest

from megatron_2bw.mcore.cpu import backend as cpu_backend
from megatron_2bw.mcore.loop.checks import ArgumentError, refuse_to_miss_gpus

RUNNER = """
import json, sys, traceback
import torch
import torch._dynamo  # It replaces names of its own.
from megatron_2bw.mcore.cpu import backend as cpu_backend

owners = (torch, torch.cuda, torch.cuda.random, torch.Tensor, torch.nn.Module)
before = [dict(vars(owner)) for owner in owners]
failures = {}
for name, check in json.load(sys.stdin).items():
    cpu_backend.install()
    assert not torch.cuda.is_available()
    try:
        exec(check, globals() | {"__name__": name})
    except Exception:
        failures[name] = traceback.format_exc()
    cpu_backend.uninstall()
print(json.dumps(failures))
"""

CHECKS = {
    "a second install changes nothing": """
        installed = torch.zeros
        cpu_backend.install()
        assert torch.zeros is installed
    """,
    "uninstall restores every name": """
        import megatron.core.datasets.utils, megatron.training.training as training
        from megatron.core.tensor_parallel import random
        ours = training.initialize_megatron, random._set_cuda_rng_state
        cpu_backend.uninstall()
        for owner, names in zip(owners, before, strict=True):
            for name, value in names.items():
                assert vars(owner)[name] is value, name
        for owner, names in zip(owners[3:], before[3:], strict=True):
            assert vars(owner).keys() == names.keys()
        assert training.initialize_megatron is ours[0].__wrapped__
        assert random._set_cuda_rng_state is not ours[1]
        cpu_backend.install()
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    """,
    "tensors stay on the CPU": """
        assert torch.tensor([1.0], device="cuda").device.type == "cpu"
        assert torch.ones(2, 2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.rand(2, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.empty(1, device="meta").device.type == "meta"
        assert not torch.tensor([1.0], device="cpu", pin_memory=True).is_pinned()
        tensor, module = torch.zeros(1), torch.nn.Linear(1, 1)
        assert tensor.cuda(non_blocking=True) is tensor
        assert module.cuda(torch.cuda.current_device()) is module
    """,
    "only Megatron's optimizers see CUDA types": """
        ask = "def ask(tensor, *args): return tensor.type(*args)"
        for module, expected in (("megatron.core.optimizer.optimizer", "torch.cuda.HalfTensor"),
                                 ("megatron.core.transformer.module", "torch.HalfTensor")):
            scope = {"__name__": module}
            exec(ask, scope)
            assert scope["ask"](torch.zeros(1).half()) == expected, module
            assert scope["ask"](torch.zeros(1), torch.float64).dtype == torch.float64
    """,
    "streams and events do nothing, events measure": """
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        event.record()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            later = stream.record_event()
        stream.wait_event(later)
        assert later.query() and 0 <= event.elapsed_time(later) < 1e4
        torch.cuda.synchronize()
    """,
    "a forked random state replays, and leaves the outer one alone": """
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
        tracker = get_cuda_rng_tracker()
        tracker.add("dropout", 1)
        seeded = tracker.get_states()["dropout"].clone()
        states, outer = tracker.get_states(), torch.get_rng_state()
        with tracker.fork("dropout"):
            first = torch.rand(4)
        assert torch.equal(torch.get_rng_state(), outer)
        with tracker.fork("dropout"):
            second = torch.rand(4)
        tracker.set_states(states)
        with tracker.fork("dropout"):
            again = torch.rand(4)
        assert torch.equal(first, again) and not torch.equal(first, second)
        tracker.reset()
        torch.manual_seed(7)
        tracker.add("dropout", 1)
        assert torch.equal(tracker.get_states()["dropout"], seeded), "depends on more than its seed"
        torch.cuda.set_rng_state(outer)
        assert torch.equal(torch.cuda.get_rng_state(), outer)
    """,
    "building data iterators draws nothing": """
        import megatron.training.training as training
        cpu_backend.uninstall()
        original = training.build_train_valid_test_data_iterators
        training.build_train_valid_test_data_iterators = torch.rand
        cpu_backend.install()
        state = torch.get_rng_state()
        assert training.build_train_valid_test_data_iterators(3).shape == (3,)
        assert torch.equal(torch.get_rng_state(), state)
        cpu_backend.uninstall()
        training.build_train_valid_test_data_iterators = original
    """,
    "the shipped dataset helpers are used, and built where none are shipped": """
        import sys
        from megatron.core.datasets import utils
        utils.compile_helpers()
        cpu_backend.uninstall()
        utils.compile_helpers = lambda: built.append(1)
        built = []
        cpu_backend.install_with_gpu()
        utils.compile_helpers()
        assert built == []
        sys.modules["megatron.core.datasets.helpers_cpp"] = None
        utils.compile_helpers()
        assert built == [1]
    """,
    "nothing is compiled": """
        from megatron.core.fusions.fused_bias_gelu import bias_gelu
        assert not hasattr(bias_gelu, "_torchdynamo_orig_callable")
    """,
    "freed memory is kept": """
        import ctypes
        FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # malloc.h
        class Mallinfo2(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]
        mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if mallinfo2 is not None:
            mallinfo2.restype = Mallinfo2
            mapped = mallinfo2().hblkhd
            activations = [torch.ones(2**26)]
            held = mallinfo2()
            activations.clear()
            freed = mallinfo2()
            assert held.hblkhd == mapped, "memory is mapped for a tensor alone"
            assert freed.arena == held.arena and freed.fordblks - held.fordblks >= 2**28, "memory is given back"
    """,
}


def run(code: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own: Megatron must not have been imported before."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Tracebacks by check, from one process for all, which saves imports of Megatron."""
    result = run(RUNNER, json.dumps({name: textwrap.dedent(check) for name, check in CHECKS.items()}))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.skipif(not cpu_backend.needed(), reason="replaces names that a GPU needs")
@pytest.mark.parametrize("name", CHECKS)
def test_installed(name, failures):
    assert name not in failures, failures[name]


@pytest.mark.skipif(not cpu_backend.needed(), reason="replaces names that a GPU needs")
def test_installing_after_megatron_says_so():
    result = run("import megatron.core\nfrom megatron_2bw.mcore.cpu import backend\nbackend.install()")
    assert result.returncode != 0
    assert "after megatron.core was imported" in result.stderr


def test_importing_replaces_nothing():
    result = run(
        "import torch; zeros = torch.zeros; import megatron_2bw.mcore.cpu.backend; assert torch.zeros is zeros"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("flags", "nodes", "refused"),
    [
        ([], {}, None),
        ([], {"GROUP_WORLD_SIZE": "1", "SLURM_STEP_NUM_NODES": "2"}, None),
        ([], {"GROUP_WORLD_SIZE": "2"}, "a job of 2 nodes needs GPUs, and"),
        ([], {"SLURM_STEP_NUM_NODES": "2"}, "a job of 2 nodes needs GPUs, and"),
        (["--distributed-backend=nccl"], {}, "--distributed-backend nccl needs GPUs, and"),
        (["--distributed-backend", "gloo"], {"GROUP_WORLD_SIZE": "2"}, None),
    ],
)
def test_a_node_whose_gpus_are_missing_is_named(flags, nodes, refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *flags])
    for name in ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, count in nodes.items():
        monkeypatch.setenv(name, count)
    args = argparse.Namespace(distributed_backend="gloo" if "gloo" in flags else "nccl")
    with pytest.raises(ArgumentError, match=refused) if refused else contextlib.nullcontext():
        refuse_to_miss_gpus(args)


def test_only_defaults_are_adapted():
    args = argparse.Namespace(
        distributed_backend="nccl",
        transformer_impl="inference_optimized",
        no_persist_layer_norm=True,
        gradient_accumulation_fusion=True,
        masked_softmax_fusion=False,
        log_memory_to_tensorboard=True,
    )
    notices = cpu_backend.adapt_arguments(args)
    assert vars(args) == {
        "distributed_backend": "gloo",
        "transformer_impl": "inference_optimized",
        "no_persist_layer_norm": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "log_memory_to_tensorboard": False,
    }
    assert [notice.split(" (")[0] for notice in notices] == [
        "no GPU: set --distributed-backend gloo",
        "no GPU: set --no-gradient-accumulation-fusion",
        "no GPU: set --log-memory-to-tensorboard off",
    ]
    assert cpu_backend.adapt_arguments(args) == []
