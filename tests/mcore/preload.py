"""What every rank needs, done once: ranks are forked from a process that imported this.

Megatron's modules and ours are imported, which changes nothing before ``install``; and the descriptions of arguments
are kept, which Megatron reads off its source text for every parser.
"""

import argparse
from collections.abc import Callable
from typing import Any

from megatron_2bw.mcore.cpu import backend as cpu_backend

cpu_backend.install_as_needed()

import megatron.core.models.bert.bert_model  # noqa: E402
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.core.models.mimo  # noqa: E402
import megatron.core.tokenizers.text  # noqa: E402
import megatron.training.checkpointing  # noqa: E402
import megatron.training.training  # noqa: E402, F401
from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

import megatron_2bw.mcore.loop.session  # noqa: E402
import megatron_2bw.mcore.loop.wrappers  # noqa: E402, F401


def _remembered(read: Callable[[Any, type], dict[str, str]]) -> Callable[[Any, type], dict[str, str]]:
    known: dict[type, dict[str, str]] = {}

    def wrapper(self: Any, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(self, config)
        return known[config]

    return wrapper


ArgumentGroupFactory._get_field_docstrings = _remembered(ArgumentGroupFactory._get_field_docstrings)
add_megatron_arguments(argparse.ArgumentParser())
