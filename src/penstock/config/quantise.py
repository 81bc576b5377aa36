"""How a trained model is quantised: the settings of `penstock.compress.quantise`. No torch is needed to make or check
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.config.convert import Checked, Count, Natural, NotNegative, Positive, Share
from penstock.config.formats import StoredFormat

Rounding = Literal["absmax", "mse", "gptq"]
Limit = Literal["absmax", "percentile", "mse", "entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseOptions(Checked, where="quantise"):
    """How the linear layers of a trained model's blocks are stored, and how inputs are rounded before they multiply."""

    SHORT_FIELD: ClassVar[str] = "format"
    """The field that `--quantise TEXT` sets."""

    format: StoredFormat | None = None
    """`int8` multiplies in int8; the others store smaller weights and multiply as before. None: nothing changes."""
    weights: Rounding = "absmax"
    """How weights are rounded: to the nearest number, with the largest number at the largest magnitude (`absmax`) or
    where the squared error is least (`mse`); or so that outputs change least (`gptq`)."""
    inputs: Literal["token", "static"] = "token"
    """How inputs of `int8` are scaled: dynamically by each token's largest magnitude, or by one scale from
    calibration."""
    limit: Limit = "mse"
    """How calibration chooses the scale of `static` inputs: the largest magnitude, the 99.99th percentile, the least
    squared error, or the least relative entropy."""
    smooth: Share = 0.0
    """Share of the inputs' range that is moved into the weights of linears after a norm (Xiao et al., ICML 2023, eq. 4:
    α); 0 changes nothing, 0.5 suits most models."""
    drop: NotNegative | None = None
    """Largest acceptable loss of accuracy, in points: the layers that lose most are not quantised. None: any."""
    learn: Natural = 0
    """Optimizer steps of quantisation-aware training afterwards, which trains the limits of `static` scales and the
    weights, with the original as teacher; 0: none."""
    learn_lr: Positive = 1e-4
    """Peak learning rate of these steps."""
    speed: bool = False
    """Whether layers that are not faster in this format on this machine stay as they are, measured with `penstock
    compress --batch` samples per pass."""
    samples: Count = 256
    """Samples of the data for calibration."""

    def _problems(self) -> Iterator[str]:
        if self.format not in (None, "int8") and self.inputs == "static":
            yield f"quantise.inputs is static, but {self.format} leaves inputs as they are; leave quantise.inputs out."
        if self.learn and self.inputs != "static":
            yield (
                "quantise.learn trains the limits of inputs, which only static scales have; set quantise.inputs to "
                "static, or quantise.learn to 0."
            )

    @property
    def enabled(self) -> bool:
        """Whether anything is quantised."""
        return self.format is not None

    @property
    def calibrates(self) -> bool:
        """Whether the model must run on data before it is quantised."""
        return bool(self.smooth) or self.weights == "gptq" or self.inputs == "static"
