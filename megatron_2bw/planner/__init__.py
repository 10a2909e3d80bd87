"""The planner: which layout trains a model fastest on a cluster, and the Megatron flags for it; no torch."""
