"""Precision: what is computed in which type, and what keeps small gradients alive in fp16."""

from __future__ import annotations

from penstock.matmul import matmul_precision as matmul_precision
from penstock.precision.accelerate import accelerate as accelerate
from penstock.precision.accelerate import clip_grad_norm_ as clip_grad_norm_
from penstock.precision.accelerate import master_parameters as master_parameters
from penstock.precision.accelerate import restore as restore
from penstock.precision.accelerate import scale_loss as scale_loss
from penstock.precision.accelerate import scalers_of as scalers_of
from penstock.precision.accelerate import unscale_ as unscale_
from penstock.precision.copies import plain as plain
from penstock.precision.forward import apply_precision as apply_precision
from penstock.precision.histogram import GradientHistogram as GradientHistogram
from penstock.precision.histogram import Histogram as Histogram
from penstock.precision.histogram import Recommendation as Recommendation
from penstock.precision.histogram import recommend as recommend
from penstock.precision.inspect import PrecisionReport as PrecisionReport
from penstock.precision.inspect import gradient_histogram as gradient_histogram
from penstock.precision.inspect import report as report
from penstock.precision.master import MasterWeights as MasterWeights
from penstock.precision.overflow import Overflow as Overflow
from penstock.precision.overflow import OverflowTrace as OverflowTrace
from penstock.precision.scaler import Agree as Agree
from penstock.precision.scaler import LossScaler as LossScaler
from penstock.precision.scaler import agree_over as agree_over
from penstock.precision.settings import Precision as Precision
from penstock.precision.settings import precision_of as precision_of
from penstock.precision.settings import properties_of as properties_of
