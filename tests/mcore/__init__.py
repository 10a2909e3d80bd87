"""The Megatron adapter, tested by running the real ``megatron.training.pretrain`` on a small GPT."""
