"""Launch scripts in bash, read as far as Megatron's flags depend on them, and never executed."""
