"""Run unmodified Megatron on a machine without a GPU: CPU tensors, gloo groups.

Names in torch are replaced, not call sites in Megatron, because call sites move between versions.
``torch.cuda.is_available()`` stays False. Functions are replaced one by one: a TorchFunctionMode
would be thread-local, cost time in every operation and not cover ``torch.cuda``.

Not replaced: CUDA graphs, ``record_stream`` and Transformer Engine, which have no CPU path.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megatron_2bw.mcore.checkpoints import asynchronous, steps_of_adam
from megatron_2bw.mcore.cpu import uneven_parts
from megatron_2bw.mcore.cpu.memory import keep_freed_memory
from megatron_2bw.mcore.cpu.streams import CpuEvent, CpuStream
from megatron_2bw.mcore.symbols import unsupported

_CPU = torch.device("cpu")
_MISSING = object()
_NO_COMPILER = "TORCHDYNAMO_DISABLE"


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """A value of a Megatron argument that cannot work without a GPU."""

    attribute: str
    unusable: Any
    """Replaced; any other value stays."""
    value: Any
    flag: str
    """What says so on the command line, for the notice."""
    reason: str


ARGUMENT_RULES: tuple[ArgumentRule, ...] = (
    ArgumentRule("distributed_backend", "nccl", "gloo", "--distributed-backend gloo", "NCCL needs GPUs"),
    ArgumentRule("transformer_impl", "transformer_engine", "local", "--transformer-impl local", "CPU has no TE"),
    ArgumentRule("no_persist_layer_norm", False, True, "--no-persist-layer-norm", "an Apex kernel"),
    ArgumentRule("gradient_accumulation_fusion", True, False, "--no-gradient-accumulation-fusion", "an Apex kernel"),
    ArgumentRule("masked_softmax_fusion", True, False, "--no-masked-softmax-fusion", "a CUDA kernel"),
    ArgumentRule("apply_rope_fusion", True, False, "--no-rope-fusion", "a Transformer Engine kernel"),
    ArgumentRule("log_memory_to_tensorboard", True, False, "--log-memory-to-tensorboard off", "it logs a GPU's memory"),
)


@dataclass(frozen=True, slots=True)
class Replacement:
    """One name that is bound to something else while the backend is installed."""

    owner: Any
    """The module, class or object that holds the name."""
    attribute: str
    value: Any
    reason: str
    """Who needs it, as module or symbol of Megatron."""


def needed() -> bool:
    """Whether no CUDA device is available, so that Megatron can only run on this backend."""
    return not torch.cuda.is_available()


def adapt_arguments(args: argparse.Namespace) -> list[str]:
    """Replace defaults that need a GPU; to be called between Megatron's ``parse_args`` and ``validate_args``.

    Returns:
        One line per argument that was changed.
    """
    notices = []
    for rule in ARGUMENT_RULES:
        if getattr(args, rule.attribute, _MISSING) == rule.unusable:
            setattr(args, rule.attribute, rule.value)
            notices.append(f"no GPU: set {rule.flag} ({rule.reason})")
    return notices


def prepare_environment() -> None:
    """Switch torch.compile off, which would cost 15 s at the start and change the random draws.

    torch reads the variable where a function is decorated, so it must be set before Megatron is imported.
    """
    os.environ.setdefault(_NO_COMPILER, "1")
    # Megatron insists on it with tensor parallelism; without a GPU nobody else reads it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def install() -> None:
    """Replace all names; a second call does nothing. Call it before Megatron is imported.

    Raises:
        RuntimeError: Megatron was imported first and has compiled its functions already.
    """
    if "megatron.core.jit" in sys.modules and os.environ.get(_NO_COMPILER) != "1":
        raise RuntimeError(
            "the CPU backend was installed after megatron.core was imported; "
            f"import it after megatron_2bw.install(), or set {_NO_COMPILER}=1 before starting Python"
        )
    prepare_environment()
    keep_freed_memory()
    importlib.import_module("torch._dynamo")  # It sorts torch's functions by identity, so it must see the originals.
    for group in (_devices, _streams, _tensors, *_IN_MEGATRON):
        _apply(group)
    install_with_gpu()


def install_as_needed() -> None:
    """All of it without a GPU, else what is needed with one, too."""
    if needed():
        install()
    else:
        install_with_gpu()


def install_with_gpu() -> None:
    """Replace what is needed with a GPU, too: for dataset helpers, the steps of torch's Adam and asynchronous saves."""
    for group in _WITH_GPU:
        _apply(group)


def uninstall() -> None:
    """Bind all names to what they were; functions that Megatron has defined since then stay uncompiled."""
    for group in reversed(tuple(_saved)):
        for owner, attribute, original in reversed(_saved.pop(group)):
            if original is _MISSING:  # It was inherited.
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)


_Group = Callable[[], tuple[Replacement, ...]]
_saved: dict[_Group, list[tuple[Any, str, Any]]] = {}
"""Per installed group, what each name was bound to."""


def _apply(group: _Group) -> None:
    if group in _saved:
        return
    try:
        rows = group()
        for row in rows:
            getattr(row.owner, row.attribute)
    except (ImportError, AttributeError) as error:
        raise unsupported("what runs without a GPU", f"is missing ({error})") from error
    _saved[group] = [(row.owner, row.attribute, vars(row.owner).get(row.attribute, _MISSING)) for row in rows]
    for row in rows:
        setattr(row.owner, row.attribute, row.value)


def _devices() -> tuple[Replacement, ...]:
    properties = SimpleNamespace(name="cpu", major=0, minor=0)
    return (
        Replacement(torch.cuda, "device_count", lambda: 1, "initialize: distributed start and random seeds"),
        Replacement(torch.cuda, "set_device", _nothing, "initialize._initialize_distributed"),
        Replacement(torch.cuda, "synchronize", _nothing, "timers, p2p_communication"),
        Replacement(torch.cuda, "current_device", lambda: _CPU, "timers, p2p_communication, param_and_grad_buffer"),
        Replacement(torch.cuda, "get_device_properties", lambda device=None: properties, "arguments with TP > 1"),
    )


def _streams() -> tuple[Replacement, ...]:
    current = CpuStream()
    return (
        Replacement(torch.cuda, "Stream", CpuStream, "training.get_model, MoE token dispatcher"),
        Replacement(torch.cuda, "Event", CpuEvent, "param_and_grad_buffer, MoE token dispatcher"),
        Replacement(torch.cuda, "current_stream", lambda device=None: current, "param_and_grad_buffer"),
        Replacement(torch.cuda, "stream", contextlib.nullcontext, "training.get_model, param_and_grad_buffer"),
    )


def _tensors() -> tuple[Replacement, ...]:
    on_cuda = {
        "tensor": "training, optimizer, grad_scaler",
        "zeros": "schedules, clip_grads",
        "ones": "causal mask in transformer.utils",
        "rand": "initialize.set_jit_fusion_options",
        "empty": "dist_checkpointing.exchange_utils",
        "empty_like": "dist_checkpointing.exchange_utils",
    }
    cuda_type = _cuda_type_for_optimizers(torch.Tensor.type)
    return (
        *(Replacement(torch, name, _created_on_cpu(getattr(torch, name)), reason) for name, reason in on_cuda.items()),
        Replacement(torch.Tensor, "cuda", _itself, "language_module, dist_utils, pretrain scripts"),
        Replacement(torch.nn.Module, "cuda", _itself, "training.get_model"),
        Replacement(torch.Tensor, "type", cuda_type, "optimizer, clip_grads, distrib_optimizer test for torch.cuda.*"),
    )


def _random_state() -> tuple[Replacement, ...]:
    """The CPU generator stands in for the CUDA generator."""
    tracker = importlib.import_module("megatron.core.tensor_parallel.random")
    log = logging.getLogger(tracker.__name__)
    filters = [*log.filters, lambda record: not record.getMessage().startswith("CPU RNG state changed")]
    return (
        Replacement(torch.cuda, "get_rng_state", _get_state, "tensor_parallel.random, checkpointing"),
        Replacement(torch.cuda, "set_rng_state", _set_state, "checkpointing, rerun_state_machine"),
        Replacement(torch.cuda.random, "get_rng_state", _get_state, "tensor_parallel.random"),
        # Without a GPU, torch queues these two calls until CUDA starts. It never does: no error, wrong dropout.
        Replacement(tracker, "_set_cuda_rng_state", _set_state, "tensor_parallel.random"),
        Replacement(torch.cuda, "manual_seed", _seed, "tensor_parallel.random"),
        Replacement(log, "filters", filters, "CudaRNGStatesTracker.fork warns where the CPU generator moves"),
    )


def _training_loop() -> tuple[Replacement, ...]:
    training = importlib.import_module("megatron.training.training")
    initialize = training.initialize_megatron
    without_cuda = functools.wraps(initialize)(functools.partial(initialize, allow_no_cuda=True))
    build = _keep_random_state(training.build_train_valid_test_data_iterators)
    loader = torch.utils.data.DataLoader
    return (
        Replacement(training, "initialize_megatron", without_cuda, "it asserts that CUDA is available"),
        Replacement(training, "build_train_valid_test_data_iterators", build, "it draws from the restored generator"),
        Replacement(loader, "__iter__", _keep_random_state(loader.__iter__), "cyclic_iter calls it later"),
    )


def _steps_of_adam() -> tuple[Replacement, ...]:
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if distributed.HAVE_APEX_OR_TE:
        return ()
    chain = importlib.import_module("megatron.core.optimizer.optimizer").ChainedOptimizer
    optimizer = distributed.DistributedOptimizer
    reason = "torch's AdamW keeps a step per parameter"
    wrappers = [
        (chain, "state_dict", steps_of_adam.with_step_of_others),
        (chain, "sharded_state_dict", steps_of_adam.with_step_of_others),
        (optimizer, "state_dict", steps_of_adam.with_a_step),
        (optimizer, "get_parameter_state_dp_zero", steps_of_adam.with_moments),
        (optimizer, "load_state_dict", steps_of_adam.with_own_steps),
        (optimizer, "_set_main_param_and_optimizer_states", steps_of_adam.without_step),
    ]
    return tuple(Replacement(owner, name, wrap(getattr(owner, name)), reason) for owner, name, wrap in wrappers)


def _checkpoints() -> tuple[Replacement, ...]:
    strategies = "megatron.core.dist_checkpointing.strategies"
    worker = importlib.import_module(f"{strategies}.async_utils").PersistentAsyncCaller
    start = _forked(worker._get_process)
    return (Replacement(worker, "_get_process", start, "the worker of asynchronous saves looks for a GPU"),)


def _experts() -> tuple[Replacement, ...]:
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    reason = "alltoall wants its splits as numpy arrays, and gets them only from a GPU"
    uneven = "alltoall gathers other numbers of tokens from each rank, and gloo as many from all"
    return (
        Replacement(dispatcher, "maybe_move_tensor_to_cpu", _as_numpy_if_asked, reason),
        Replacement(mappings, "_gather_along_first_dim", uneven_parts.gathered(gather), uneven),
        Replacement(mappings, "_reduce_scatter_along_first_dim", uneven_parts.scattered(scatter), uneven),
    )


_IN_MEGATRON = (_random_state, _training_loop, _checkpoints, _experts)
"""Groups that import Megatron."""


def _dataset_helpers() -> tuple[Replacement, ...]:
    utils = importlib.import_module("megatron.core.datasets.utils")
    reason = "the wheel ships no Makefile, and a failing make ends the process"
    return (Replacement(utils, "compile_helpers", _unless_shipped(utils.compile_helpers), reason),)


def _asynchronous_saves() -> tuple[Replacement, ...]:
    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    writer = module.FileSystemWriterAsync
    write = asynchronous.copied(writer.prepare_write_data)
    reason = "a worker would see tensors on the host that training changes"
    return (Replacement(writer, "prepare_write_data", write, reason),)


_WITH_GPU = (_steps_of_adam, _dataset_helpers, _asynchronous_saves)


def _as_numpy_if_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _nothing(*args: object, **kwargs: object) -> None: ...


def _itself(value: Any, *args: object, **kwargs: object) -> Any:
    return value


def _get_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(new_state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _created_on_cpu(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def wrapper(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is not None and torch.device(device).type == "cuda":
            device = _CPU
        kwargs.pop("pin_memory", None)  # For transfers to a GPU.
        return create(*args, device=device, **kwargs)

    return wrapper


def _cuda_type_for_optimizers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        asks_for_name = isinstance(result, str) and not result.startswith("torch.cuda.")
        if asks_for_name and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core.optimizer."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return wrapper


def _forked(get_process: Callable[..., Any]) -> Any:
    """A forked process has the CPU backend; a new one would look for a GPU."""

    def wrapper(cls: Any, rank: int, mp_mode: str = "fork", *args: Any, **keywords: Any) -> Any:
        return get_process(rank, "fork", *args, **keywords)

    return classmethod(wrapper)


def _keep_random_state(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return build(*args, **kwargs)
        finally:
            torch.set_rng_state(state)

    return wrapper


def _unless_shipped(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(compile_helpers)
    def wrapper() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            compile_helpers()

    return wrapper
