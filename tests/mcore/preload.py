"""What every rank needs, done once: ranks are forked from a process that imported this.

Megatron's modules and ours are imported, which changes nothing before ``install``; and the descriptions of arguments
are kept, which Megatron reads off its source text for every parser.
"""

import argparse
from collections.abc import Callable
from typing import Any

from megatron_2bw.mcore import cpu_backend

if cpu_backend.needed():
    cpu_backend.install()
else:
    cpu_backend.install_with_gpu()

import megatron.core.models.bert.bert_model
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.models.mimo
import megatron.core.tokenizers.text
import megatron.training.checkpointing
import megatron.training.training  # noqa: F401
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

import megatron_2bw.mcore.session
import megatron_2bw.mcore.wrappers  # noqa: F401


def _remembered(read: Callable[[Any, type], dict[str, str]]) -> Callable[[Any, type], dict[str, str]]:
    known: dict[type, dict[str, str]] = {}

    def wrapper(self: Any, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(self, config)
        return known[config]

    return wrapper


ArgumentGroupFactory._get_field_docstrings = _remembered(ArgumentGroupFactory._get_field_docstrings)
add_megatron_arguments(argparse.ArgumentParser())
