"""Executes schedules with torch: transfers, weight versions and delayed updates; knows no Megatron."""
