"""All layouts of a model on a cluster: the best ones, and why each of the others is out."""
