"""What is asked for: a model, a cluster, and a layout of the one on the other."""
