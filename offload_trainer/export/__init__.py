"""Weights out: a checkpoint, a dead run's page files or a live engine become what other programs load.

sources ──weights in the model's names──> directory (safetensors, as on the hub), card, or gguf
"""
