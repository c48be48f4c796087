"""run_with_nan_loss.py STEP WORDS...: run the command with NaN as the loss, thus in every gradient, of one forward.

In fp16 the loss scale begins at 1, and no overflow can halve it.
"""

import sys

from offload_trainer.cli import main
from offload_trainer.model.loss import CausalLoss
from offload_trainer.optim import loss_scale

plain_forward = CausalLoss.forward
forwards = 0


def forward(self, *given):
    global forwards
    loss = plain_forward(self, *given)
    if self.training:
        forwards += 1
        if forwards == int(sys.argv[1]):
            return loss * float("nan")
    return loss


CausalLoss.forward = forward
loss_scale.INITIAL_SCALE = 1.0
raise SystemExit(main(sys.argv[2:]))
