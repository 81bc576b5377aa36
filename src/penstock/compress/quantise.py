"""Quantisation after training: writes the linears of a model's blocks in 8 or 4 bits, to a folder that opens like any
other.

Embeddings, norms, routers, heads and residual sums are not rounded. Experts of mixtures are rounded with a scale for
each output of each expert.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.boundary.hub import local_weights
from penstock.compress.calibrate import InputRecord, record, watch
from penstock.compress.control import NOISE, keep_within, seconds_of
from penstock.compress.data import QuantiseData
from penstock.compress.gptq import norm_readers, round_by_blocks, smooth
from penstock.config.formats import PRODUCTS, STORED_FORMATS, StoredFormat
from penstock.config.load import to_dict
from penstock.config.quantise import QuantiseOptions
from penstock.errors import ConfigError
from penstock.models.anatomy import anatomy_of
from penstock.models.convert import from_pretrained
from penstock.models.convert.pretrained import rounded_weights, save_rounded, save_values
from penstock.models.rounded import MOST, RoundedWeight, round_groups, round_rows
from penstock.models.wrap import exchanged
from penstock.products.convert import STORED, AnyLinear, absorbed, left_out, suited
from penstock.products.rounded import stored_form

_log = logging.getLogger(__name__)
_CLIPS = tuple(share / 100 for share in range(100, 58, -2))
"""Ends of scales that `mse` tries, as shares of the largest magnitude."""
_HARM_BATCHES = 4
"""Number of batches on which the harm of rounding one layer is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """The result of quantising a model."""

    formats: Mapping[str, StoredFormat]
    """The format of each rounded linear layer, by name; empty if the model was left unchanged."""
    kept: Mapping[str, str]
    """By name, the reason why each other linear layer was not rounded."""
    before: float | None = None
    """Score of the original model, in points; None if nothing scores it."""
    after: float | None = None
    bytes_before: int = 0
    """Bytes of all weights in fp32."""
    bytes_after: int = 0
    smoothed: Mapping[str, float] = field(default_factory=dict)
    """By norm, the factor by which smoothing brought its largest feature closer to its median feature."""

    @property
    def lost(self) -> float | None:
        """Points of accuracy that were lost; None if nothing scores the model."""
        return None if self.before is None or self.after is None else self.before - self.after


def quantise_folder(
    source: str | Path, target: str | Path, options: QuantiseOptions, data: QuantiseData | None = None
) -> Quantised:
    """Quantise the model in the folder `source` into the folder `target`, which `generate`, `serve`, `classify`,
    `embed` and `from_pretrained` open; the last returns the values of rounded weights.

    With `options.drop`, a model that would lose more with any choice of layers is written unchanged; `kept` says why.

    Raises ConfigError for options that need missing data or a missing score; for a model that has nothing to round or
    was rounded before; and whatever opening the folder raises.
    """
    folder = local_weights(source)
    if options.format is None:
        raise ConfigError(
            f"quantise.format says that nothing is quantised; set it to one of {', '.join(STORED_FORMATS)}."
        )
    if options.learn:
        raise ConfigError(
            "quantise.learn trains, as penstock compress does; set it to 0 and train the folder yourself."
        )
    if rounded_weights(folder):
        raise ConfigError(f"The model in {folder} was quantised before; use the model that it was made from.")
    if options.calibrates and data is None:
        raise ConfigError("quantise.smooth, inputs=static and weights=gptq run the model on data; name some.")
    if options.drop is not None and (data is None or data.score is None):
        raise ConfigError("quantise.drop needs a score; give data with a validation split, or leave it out.")
    model = from_pretrained(folder).eval()
    work = _Work(model, options, data)
    result = work.run()
    if not result.formats:
        save_values(from_pretrained(folder), target, source=folder)
        return result
    account = {
        "options": to_dict(options), "kept": dict(result.kept), "before": result.before, "after": result.after,
    }  # fmt: skip
    chosen = {name: (form, work.rounded[name]) for name, form in result.formats.items()}
    save_rounded(work.model, target, chosen, source=folder, extra=account)
    return result


def candidates(model: nn.Module, form: StoredFormat) -> tuple[dict[str, AnyLinear], dict[str, str]]:
    """The linears that a format can store, by name, including experts; and by name why it cannot store the rest."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, AnyLinear)}
    anatomy = anatomy_of(model)
    kept = dict(left_out(linears, anatomy, PRODUCTS[form]))
    kept |= dict.fromkeys(absorbed(anatomy), "generation multiplies with it from both sides")
    return {name: module for name, module in linears.items() if name not in kept}, kept


class _Work:
    """One model during its quantisation."""

    def __init__(self, model: nn.Module, options: QuantiseOptions, data: QuantiseData | None) -> None:
        self.model, self.options = model, options
        self.data = data or QuantiseData(batches=tuple)
        assert options.format is not None
        self.form: StoredFormat = options.format
        self.linears, self.kept = candidates(model, self.form)
        if not self.linears:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(self.kept.items())[:5])
            raise ConfigError(f"No linear layer of the model can be stored in {self.form} ({reasons}).")
        self.rounded: dict[str, RoundedWeight] = {}
        self.forms: dict[str, nn.Module] = {}

    def run(self) -> Quantised:
        options, model = self.options, self.model
        before = None if self.data.score is None else self.data.score(model)
        whole = sum(tensor.numel() for tensor in model.parameters()) * 4
        records = self._record()
        gains = smooth(model, records, options.smooth) if options.smooth else {}
        if options.inputs == "static" and gains:  # smoothing changes the histograms
            records = self._record()
        self._round(records)
        for name, module in self.linears.items():
            self.forms[name] = stored_form(module, self.form, self.rounded[name])
        chosen = self._worth()
        after = before
        if options.drop is not None and chosen:
            rounded, after = self._control(chosen, before)
            reason = f"rounding it, the model would lose more than {options.drop:g} points"
            self.kept |= {name: reason for name in chosen if name not in rounded}
            chosen = [name for name in chosen if name in rounded]
        elif before is not None:
            after = self._score(chosen)
        saved = sum(_saved(self.linears[name], self.rounded[name]) for name in chosen)
        for name, reason in self.kept.items():
            _log.info("%s stays as it is: %s.", name, reason)
        return Quantised(
            formats={name: self.form for name in self.linears if name in chosen}, kept=self.kept, before=before,
            after=after, bytes_before=whole, bytes_after=whole - saved, smoothed=gains,
        )  # fmt: skip

    def _record(self) -> dict[str, InputRecord]:
        if not self.options.smooth and self.options.inputs == "token":
            return {}
        norms = norm_readers(self.model) if self.options.smooth else {}
        read = [name for names in norms.values() for name in names]
        # Experts that no token visits do not show what their norm returns, but the router sees all of it.
        records = record(self.model, self.data.batches(), dict.fromkeys([*self.linears, *read]))
        if self.options.inputs == "static":
            unseen = [name for name in self.linears if not records[name].rows]
            self.kept |= dict.fromkeys(
                unseen, "no calibration sample reaches it, so its inputs have no scale"
            )
            self.linears = {name: one for name, one in self.linears.items() if name not in unseen}
        return records

    def _round(self, records: Mapping[str, InputRecord]) -> None:
        options = self.options
        by_gptq = {name: layer for name, layer in self.linears.items() if isinstance(layer, nn.Linear)}
        if options.weights == "gptq":
            # Layers stay unrounded only for accuracy or speed; otherwise no copy, as large as the model, is needed.
            keep = by_gptq if options.drop is not None or options.speed else {}
            before = {name: layer.weight.detach().clone() for name, layer in keep.items()}
            self.rounded |= round_by_blocks(self.model, self.data.batches, dict.fromkeys(by_gptq, self.form))
            with torch.no_grad():
                for name, layer in keep.items():
                    layer.weight.copy_(before.pop(name))
        for name, module in self.linears.items():
            if name not in self.rounded:
                least = options.weights != "absmax"
                self.rounded[name] = round_weight(module.weight, self.form, least=least)
            if options.inputs == "static":
                scale = torch.tensor(records[name].limit(options.limit) / MOST)
                self.rounded[name] = replace(self.rounded[name], input_scale=scale)

    # -- choosing

    def _worth(self) -> list[str]:
        """The layers that are faster here in their format, or all if speed is not requested."""
        if not self.options.speed:
            return list(self.linears)
        rows: dict[str, int] = {}

        def count(name: str, x: Tensor) -> None:
            rows.setdefault(name, len(x))

        timed = (
            tuple(part[: self.data.timed] if isinstance(part, Tensor) else part for part in batch)
            for batch in islice(self.data.batches(), 1)
        )
        watch(self.model, timed, self.linears, count)
        slower: dict[tuple[Any, ...], str] = {}
        for name, module in self.linears.items():
            if not isinstance(module, nn.Linear):
                continue
            shape = (rows.get(name, 1), module.in_features, module.out_features)
            if shape not in slower:
                opened = suited(module, "auto", own=True)  # how its folder would multiply for inference
                plain = module if opened == "plain" else STORED[opened](module)
                slower[shape] = _slower(plain, self.forms[name], shape, self.form)
            if slower[shape]:
                self.kept[name] = slower[shape]
        return [name for name in self.linears if name not in self.kept]

    def _control(self, chosen: list[str], before: float | None) -> tuple[Collection[str], float]:
        assert self.options.drop is not None
        assert before is not None
        batches = list(islice(self.data.batches(), _HARM_BATCHES))
        plain = self._features(batches)

        def harm(name: str) -> float:
            with self.swapped([name]):
                features = self._features(batches)
            return sum(
                float((new - old).square().sum() / old.square().sum()) for new, old in zip(features, plain)
            )

        return keep_within(chosen, self._score, self.options.drop, harm, before=before)

    def _features(self, batches: list[tuple[Any, ...]]) -> list[Tensor]:
        """The outputs of the last block for batches."""
        features: list[Tensor] = []
        block = anatomy_of(self.model).block_modules(self.model)[-1]
        with block.register_forward_hook(lambda _, __, output: features.append(output.detach().clone())):
            watch(self.model, batches, (), lambda *_: None, last=block)
        return features

    def _score(self, chosen: Collection[str]) -> float:
        assert self.data.score is not None
        with self.swapped(chosen), torch.no_grad():
            return self.data.score(self.model)

    def swapped(self, chosen: Collection[str]) -> AbstractContextManager[None]:
        """Multiply in their formats in the named layers, inside the context."""
        return exchanged(self.model, {name: self.forms[name] for name in chosen})


def round_weight(weight: Tensor, form: StoredFormat, *, least: bool = False) -> RoundedWeight:
    """Round a weight to a format. Scales end at the largest magnitude, or with `least` at the least squared error."""
    if group := PRODUCTS[form].group:
        groups, sides = round_groups, (*weight.shape[:-1], weight.shape[-1] // group)
    else:
        groups, sides = round_rows, weight.shape[:-1]
    if not least:
        return groups(weight)
    plain, best, lowest = weight.detach().float(), torch.ones(sides), torch.full(sides, torch.inf)
    for clip in _CLIPS:
        errors = (groups(weight, clip).values() - plain).square().view(*sides, -1).sum(-1)
        best, lowest = torch.where(errors < lowest, clip, best), torch.minimum(errors, lowest)
    return groups(weight, best)


def _slower(own: nn.Module, form: nn.Module, shape: tuple[int, int, int], name: str) -> str:
    rows, inputs, _ = shape
    plain, rounded = seconds_of((own, form), rows, inputs)
    if rounded <= plain * (1 + NOISE):
        return ""
    return f"{name} takes {rounded / plain:.2f} times as long here for {rows} rows"


def _saved(module: AnyLinear, weight: RoundedWeight) -> int:
    """Bytes that a weight saves compared with fp32."""
    return module.weight.numel() * 4 - sum(part.nbytes for part in weight.stored("").values())
