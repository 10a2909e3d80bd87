"""Only test files are collected: the others import Megatron, which belongs into the ranks."""

collect_ignore_glob = ["[!t]*.py"]
