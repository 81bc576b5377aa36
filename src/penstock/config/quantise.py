"""How a trained model is quantised: the settings of `penstock.compress.quantise`. No torch is needed to make or check
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from penstock.config.convert import Checked, Count, Natural, NotNegative, Positive, Range

StoredFormat = Literal["int8", "int8_weights", "int4"]
Rounding = Literal["absmax", "mse", "gptq"]
Limit = Literal["absmax", "percentile", "mse", "entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantiseOptions(Checked, where="quantise"):
    """How the linear layers of a trained model's blocks are stored, and how inputs are rounded before they multiply."""

    SHORT_FIELD: ClassVar[str] = "format"
    """The field that `--quantise TEXT` sets."""

    format: StoredFormat | None = None
    """`int8` multiplies in int8; `int8_weights` and `int4` keep weights smaller and multiply as before. None: all stays
    as it is."""
    weights: Rounding = "absmax"
    """How weights are rounded: to the nearest number, with the largest magnitude at the end of the scale (`absmax`) or
    the end where the squared error is least (`mse`); or so that outputs change least (`gptq`)."""
    inputs: Literal["token", "static"] = "token"
    """How inputs of `int8` are scaled: by the largest of each token as it comes, or by one scale that calibration
    chose."""
    limit: Limit = "mse"
    """How calibration chooses the scale of `static` inputs: the largest magnitude, its 99.99th percentile, the least
    squared error, or the least relative entropy."""
    smooth: Annotated[float, Range(0, 1)] = 0.0
    """Share of the range of inputs that moves into weights where a norm feeds linears (Xiao et al., ICML 2023, eq. 4:
    α); 0 leaves all as it is, 0.5 suits most."""
    drop: NotNegative | None = None
    """Most points of accuracy that may be lost: the layers that cost most stay as they are. None: any."""
    learn: Natural = 0
    """Optimizer steps in which the ends of `static` scales learn afterwards, and the weights with them, by rounding as
    the model will be deployed, with the original as teacher; 0: none."""
    learn_lr: Positive = 1e-4
    """Peak learning rate of these steps."""
    speed: bool = False
    """Whether layers that the format does not make faster here stay as they are, for as many samples in a pass as
    `penstock compress --batch`."""
    samples: Count = 256
    """Samples of the data that calibration sees."""

    def _problems(self) -> Iterator[str]:
        if self.format not in (None, "int8") and self.inputs == "static":
            yield f"quantise.inputs is static, but {self.format} leaves inputs as they are; leave quantise.inputs out."

        if self.learn and self.inputs != "static":
            yield (
                "quantise.learn learns where inputs are clipped, which static scales alone do; set quantise.inputs to "
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
