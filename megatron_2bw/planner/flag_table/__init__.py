"""What training does with Megatron's flags under each schedule; read by the checks, the planner and the README."""
