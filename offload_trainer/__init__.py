"""Train every parameter of a transformer far larger than the GPU, and larger than host memory, on one GPU."""

__version__ = "0.1.0"
