"""Facts about a script, collected after its first steps. Free of torch."""

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
    """Facts about a script's model and optimizer, and about the settings that it chose itself."""

    device: str
    model: str = ""
    """Name of the first model's class; empty if no module was called with gradients."""
    parameters: int = 0
    """Number of trained parameters."""
    optimizer: str = ""
    form: str = ""
    """The form that the script chose for its optimizer; empty if it leaves the choice to torch."""
    compiled: bool = False
    """Whether the script calls torch.compile."""
    mixed: str = ""
    """Reason why precision is left to the script; empty if it computes in fp32."""
    eager: bool = False
    """Whether a transformers model computes attention itself instead of calling torch's."""
    padding: float = 0.0
    """Share of the first batch's tokens that its attention mask hides."""
    blocks: int = 0
    no_blocks: str = ""
    """Reason why no repeated blocks were found."""
    switches: dict[str, list[str]] = field(default_factory=dict)
    """Values that the model supports, by field of the Plan."""
    fused: Mapping[FusedName, int] = field(default_factory=dict)
    """For each fused operator, the number of places in the model where it fits."""
    forms: Mapping[OptimizerForm, str] = field(default_factory=dict)
    """By optimizer form, the reason why the script's optimizer does not have it; empty if it does."""
    products: Mapping[Products, str] = field(default_factory=dict)
    """By form of products, the reason why the device does not support it; empty if it does."""
