"""What a rank computes: Megatron's forward and backward steps of one stage or two."""
