"""The adapter: the only folder that imports Megatron."""
