"""Megatron's training loop under one of our schedules."""
