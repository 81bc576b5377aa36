"""Facts about a script once it has made some steps. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config.formats import Products
from penstock.config.fused import FusedName
from penstock.config.plan import OptimizerForm

FORMS: tuple[OptimizerForm, ...] = ("foreach", "fused")
PRODUCTS: tuple[Products, ...] = ("fp8_tensorwise", "int8_all")
SWITCHED: dict[str, tuple[str, ...]] = {
    "attention": ("plain", "flash", "efficient", "cudnn"),
    "loss": ("chunked",),
    "padding": ("remove",),
    "experts": ("loop",),
}
"""Values of the Plan's switches that are tried on a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A script's model and optimizer, and what it does by itself."""

    device: str
    model: str = ""
    """Name of the first model's class; empty where no module was called with gradients."""
    parameters: int = 0
    """Trained parameters."""
    optimizer: str = ""
    form: str = ""
    """The form that the script chose for its optimizer; empty where it leaves that to torch."""
    compiled: bool = False
    """Whether the script calls torch.compile."""
    mixed: str = ""
    """Why its precision is its own business; empty where it computes in fp32."""
    eager: bool = False
    """Whether a model of transformers computes attention by itself, in place of torch's."""
    padding: float = 0.0
    """Share of the tokens of the first batch that its attention mask hides."""
    blocks: int = 0
    no_blocks: str = ""
    """Why no repeated blocks were found."""
    switches: dict[str, list[str]] = field(default_factory=dict)
    """Values that the model takes, by setting of the Plan."""
    fused: Mapping[FusedName, int] = field(default_factory=dict)
    """How many places of the model each fused operator fits in."""
    forms: Mapping[OptimizerForm, str] = field(default_factory=dict)
    """Why the optimizer has no such form, by form; empty where it has."""
    products: Mapping[Products, str] = field(default_factory=dict)
    """Why the device does not multiply so, by form of products; empty where it does."""
