"""What the machine at hand says: profiles of its kernels, and layouts run on it."""
