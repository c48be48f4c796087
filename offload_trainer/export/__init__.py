"""Export of weights from a checkpoint, a dead run's page files or a live engine for other programs.

sources ──weights by the model's names──> directory (safetensors in the hub's layout), model card
"""
