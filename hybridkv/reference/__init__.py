"""Pure PyTorch twins of the kernels: the oracle, and what runs on a CPU."""
