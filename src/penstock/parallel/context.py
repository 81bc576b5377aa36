"""Context parallelism: each rank computes some tokens of every sample, and ranks exchange keys and values.

Ranks of one group get the same samples. `penstock.kernels.token_cut` defines how tokens are split, `context` next to it
how attention is combined, and the model's family how its parts work on a share of the tokens.
"""

from __future__ import annotations

from torch import nn

from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.kernels.token_cut import Cut
from penstock.models.anatomy import switch_for
from penstock.models.experts import mixtures_of
from penstock.parallel.dims import ParallelDims
from penstock.parallel.experts import Neighbours


def split_tokens(model: nn.Module, plan: Plan, dims: ParallelDims) -> None:
    """Make a model compute only this rank's tokens, in place; its outputs stay the same. Gradients of weights must be
    averaged over the ranks. Raises ConfigError for a model that does not support this.
    """
    if plan.cp == 1:
        return
    causal = any(getattr(module, "causal", False) for module in model.modules())
    cut = Cut(dims.group("cp"), dims.place()["cp"], dims.cp, causal=causal, exchange=plan.cp_exchange)
    share = switch_for(model, "cp")
    if share is None:
        raise ConfigError(
            f"{type(model).__name__} cannot split its tokens over plan.cp={plan.cp} ranks; use plan.cp=1, or one of "
            "Penstock's own decoders, encoders or Vision Transformers."
        )
    share(cut)
    for mixture in mixtures_of(model):
        line = mixture.neighbours.line if isinstance(mixture.neighbours, Neighbours) else None
        mixture.neighbours = Neighbours(line, cut.group)
