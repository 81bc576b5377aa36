"""The figures of a report: forecasts and measurements of every setting of a climb, all from the one joint estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from penstock.config.convert import plain
from penstock.config.stack import Stack
from penstock.ladder.arena import Arena
from penstock.ladder.contender import Contenders
from penstock.ladder.losses import Losses, tail_mean
from penstock.ladder.result import Chosen, Estimate, RungResult, Tried
from penstock.ladder.rung import Rung, Setting
from penstock.ladder.search import Search


class Account:
    """Forecasts and figures of the settings of one climb."""

    def __init__(self, contenders: Contenders, arena: Arena, losses: Losses) -> None:
        self.contenders, self.arena, self.losses = contenders, arena, losses
        self.forecast = contenders.forecast
        self._memory: dict[Setting, list[int]] = {}

    @property
    def first(self) -> Setting:
        """The baseline."""
        return self.arena.baseline

    def weigh(self, setting: Setting) -> None:
        """Measure the memory of a setting, unless it has been measured."""
        if setting not in self._memory:
            self._memory[setting] = self.arena.memory(setting)

    def ratio(self, setting: Setting, over: Setting, by: str = "samples") -> Estimate | None:
        """Speed of a setting relative to `over`, in samples or in model FLOPs per second."""
        speed = self.arena.ratio(setting, over)
        return speed and speed.times(self._work(setting, over, by))

    def _work(self, setting: Setting, over: Setting, by: str) -> float:
        """Work per sample of a setting relative to `over`: 1 by samples, else the ratio of the model's FLOPs."""
        if by == "samples":
            return 1.0
        flops, base_flops = self._flops(setting), self._flops(over)
        assert flops is not None
        assert base_flops is not None
        return flops / base_flops

    def _flops(self, setting: Setting) -> float | None:
        """Model FLOPs per sample; None if they are not known."""
        flops = self.contenders.model_flops(setting)
        return None if flops is None else flops / self.contenders.samples(setting)

    def processor_ratio(self, setting: Setting, over: Setting) -> Estimate | None:
        """`ratio` measured in processor time; None for contenders on a GPU."""
        if self.contenders.shares_gpu:
            return None
        step_speed = self.arena.processor.joint().ratio(setting, over, self.arena.floor)
        return step_speed and step_speed.times(self.arena.work(setting, over))

    def rate(self, setting: Setting) -> Estimate | None:
        """Samples per second: the baseline's rate at the machine's usual pace, times the ratio to it."""
        speed = self.ratio(setting, self.first)
        step = self.arena.wall.joint().seconds(self.first)
        if math.isnan(step):  # no round fitted into the time: use the warm-up step
            step = self.arena.step_seconds.get(self.first, math.nan)
        if speed is None or math.isnan(step):
            return None
        return speed.times(self.contenders.samples(self.first) / step)

    def with_figures(self, result: RungResult, setting: Setting, before: Setting) -> RungResult:
        """`result` completed with every measurement of a setting, compared with `before`."""
        by, rate = result.compared_by, self.rate(setting)
        flops = self._flops(setting)
        memory = self._memory.get(setting, [])
        curve, steps = self.losses.known(setting), self.losses.steps_to_loss(setting)
        step_seconds = self.contenders.samples(setting) / rate.value if rate else math.nan
        return replace(
            result, samples_per_second=rate, model_flops_per_second=rate.times(flops) if rate and flops else None,
            to_previous=self.ratio(setting, before, by), to_baseline=self.ratio(setting, self.first, by),
            processor_to_baseline=self.processor_ratio(setting, self.first),
            interleaved=setting not in self.arena.timed_alone, memory_bytes=max(memory, default=None),
            memory_by_rank=tuple(memory) if len(memory) > 1 else (),
            compile_seconds=self.arena.compile_seconds.get(setting), losses=curve,
            loss=tail_mean(curve) if curve else None, loss_difference=self.losses.difference(setting),
            allowed_difference=self.losses.allowed(setting), steps_to_loss=steps,
            seconds_to_loss=steps * step_seconds if steps and rate else None,
        )  # fmt: skip

    def result(self, rung: Rung, setting: Setting | None = None) -> RungResult:
        """A rung's result without figures yet; `setting` is the one it was applied in, if any."""
        return RungResult(
            name=rung.name, title=rung.title, why=rung.why, status="unsupported", plan=setting.words if setting else "",
            model=changes(self.first, setting) if setting else {}, results=rung.results, compared_by=rung.compared_by,
        )  # fmt: skip

    def chosen(self, setting: Setting, rungs: Sequence[str]) -> Chosen:
        """A Plan that the ladder recommends at its end."""
        speedup, rate = self.ratio(setting, self.first), self.rate(setting)
        assert speedup is not None
        memory, forecast = self._memory.get(setting), self.forecast(setting, self.first)
        return Chosen(
            plan=setting.words, model=changes(self.first, setting), rungs=tuple(rungs),
            train_command=self.contenders.train_command(setting), speedup=speedup, samples_per_second=rate,
            predicted=None if forecast is None else forecast.to_baseline, memory_bytes=max(memory) if memory else None,
            loss_difference=self.losses.difference(setting), within_noise=self.losses.within_noise(setting),
        )  # fmt: skip

    def tried(self, search: Search) -> tuple[Tried, ...]:
        """Every candidate that was measured, the fastest first."""
        rows = []
        for candidate in sorted(search.measured.values(), key=search.speed, reverse=True):
            setting = candidate.setting
            ratio = self.ratio(setting, self.first)
            if ratio is None:
                continue
            forecast = self.forecast(setting, self.first)
            assert forecast is not None  # the search cannot run without forecasts
            predicted = forecast.to_baseline
            row = Tried(
                plan=setting.words, model=changes(self.first, setting), predicted=predicted,
                corrected=search.before.get(setting, predicted), to_baseline=ratio,
                compile_seconds=self.arena.compile_seconds.get(setting),
                build_seconds=self.arena.build_seconds.get(setting, 0.0),
            )  # fmt: skip
            rows.append(row)
        return tuple(rows)


def _values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a model's fields; fields of its stacks get names with dots."""
    for field in fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        if isinstance(value, Stack):
            yield from _values(value, f"{name}.")
        else:
            yield name, plain(value)


def changes(first: Setting, setting: Setting) -> dict[str, Any]:
    """Fields of the model and of the data in which a setting differs from the first one."""
    changed: dict[str, Any] = {}
    if first.model is not None and setting.model is not None:
        before = dict(_values(first.model))
        changed = {name: value for name, value in _values(setting.model) if value != before.get(name)}
    if setting.by_length != first.by_length:
        changed["group_by_length"] = setting.by_length
    if setting.packed != first.packed:
        changed["packed"] = setting.packed
    return changed
