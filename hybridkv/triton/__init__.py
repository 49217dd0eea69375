"""Triton twins of the references: the same module names, function names and signatures."""
