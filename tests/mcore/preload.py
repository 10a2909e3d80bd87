"""What every rank imports, done once: ranks are forked from a process that imported this."""

from megatron_2bw.mcore import cpu_backend

cpu_backend.install()

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402
import megatron.training.checkpointing  # noqa: E402
import megatron.training.training  # noqa: E402, F401
