"""Context parallelism: each rank computes some of the tokens of every sample, and keys and values travel between them.

Ranks of one group get the same samples. `penstock.kernels.token_cut` says how tokens are cut, `context` beside it
how attention is put together, and the model's family how its parts take a share of the tokens.
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
    """Let a model compute this rank's tokens alone, in place; its outputs stay what they are. Gradients of weights are
    to be averaged over the ranks. Raises ConfigError for a model that does not know how.
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
