"""Placement of a mixture's experts, so that no device has much more work than the others.

Experts have loads, and each has one or more replicas, which take even shares of its tokens. A device has room for some
replicas, and never two of one expert. With groups, all experts of a group are on one node, which suits routers that
choose a few groups first. The problem is that of DeepSeek's EPLB (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report",
section 3.4). Here, too, the largest pieces go first to the device with the least load; then slots are swapped, and
replicas given to other experts, while that makes the busiest device less busy. The figure of a placement is the largest
device load over the mean; 1 is best.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

from penstock.config.convert import Checked, Count
from penstock.errors import ConfigError

_HOLE = -1
"""The expert of a slot that is left empty."""
_EFFORT = 24_000
"""Slots times experts over all starts: small placements start several times, from slightly perturbed loads."""
_FEW_CHOICES = 100
"""Numbers of slots up to which all are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room(Checked, where="place"):
    """The devices that experts are placed on."""

    gpus: Count = 1
    slots: Count | None = None
    """Replicas of all experts together, on all devices; none: one of each. Any number: devices then differ by one."""
    nodes: Count = 1
    """Nodes, of equally many devices; matters with groups."""
    groups: Count = 1
    """Groups of equally many experts, each of which stays on one node; 1: any expert may be anywhere."""

    def fitted(self, experts: int) -> Room:
        """The room with its number of slots filled in. Raises ConfigError if they cannot hold `experts` experts."""
        slots = self.slots or experts
        problems = [
            f"place has {name}={value}, which {of} does not divide; choose one that does."
            for name, value, part, of in (
                ("gpus", self.gpus, self.nodes, f"nodes={self.nodes}"),
                ("groups", self.groups, self.cells, f"nodes={self.nodes}"),
            )
            if value % part
        ]
        if experts % self.groups:
            problems.append(f"place has groups={self.groups}, which must divide the {experts} experts.")
        if not experts <= slots <= experts * self.gpus // self.cells:
            problems.append(
                f"place has slots={slots}, but {experts} experts need at least {experts}, and fill at most "
                f"{experts * self.gpus // self.cells}, one replica of each on every device that it may be on."
            )
        if slots % self.cells:
            problems.append(
                f"place has slots={slots}, which nodes={self.nodes} must divide where there are groups."
            )
        if problems:
            raise ConfigError(problems)
        return replace(self, slots=slots)

    @property
    def cells(self) -> int:
        """Nodes that experts cannot leave."""
        return self.nodes if self.groups > 1 else 1


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts that each device holds. The replicas of an expert take even shares of its tokens."""

    devices: tuple[tuple[int, ...], ...]

    def figure(self, loads: Sequence[int]) -> float:
        """The largest load of a device over the mean one; 1 where there is none."""
        total = sum(loads)
        return max(_Cell(loads, self.devices).device_loads) * len(self.devices) / total if total else 1.0

    def moved(self, before: Placement) -> int:
        """Number of slots whose expert differs from the placement `before` and must be fetched."""
        return sum(len(set(now) - set(then)) for now, then in zip(self.devices, before.devices))


def place(
    loads: Sequence[int], room: Room, *, before: Placement | None = None, moves: int | None = None
) -> Placement:
    """A placement of experts with these loads. With a placement `before`, at most `moves` slots change (none: one in
    twenty), and groups stay on their nodes.

    Raises:
        ConfigError: the experts have no room, or the placement before is of other experts or devices.
    """
    room = room.fitted(len(loads))
    assert room.slots is not None
    own = room.gpus // room.cells
    if before is not None:
        _require_same(before, len(loads), room)
        budget, per_device = room.slots // 20 if moves is None else moves, -(-room.slots // room.gpus)
        held = [[*experts, *[_HOLE] * (per_device - len(experts))] for experts in before.devices]
        cells = [_Cell(loads, held[first : first + own]) for first in range(0, room.gpus, own)]
        for cell in sorted(cells, key=lambda cell: -max(cell.device_loads)):
            budget -= cell.descend(budget)
    else:
        cells, rng = _filled(loads, loads, room), random.Random(0)
        for _ in range(min(200, _EFFORT // (room.slots * len(loads)))):
            if _top(cells) * room.gpus <= 1.002 * sum(loads):
                break
            guess = [load * rng.uniform(0.8, 1.25) for load in loads]
            cells = min(cells, _filled(loads, guess, room), key=_top)
    return Placement(
        tuple(tuple(sorted(e for e in slots if e != _HOLE)) for cell in cells for slots in cell.slots)
    )


def bound(loads: Sequence[int], room: Room) -> float:
    """A lower bound of any placement's figure: from the node with the heaviest group, and from the device with the
    largest piece when replicas are assigned so that it is smallest."""
    room = room.fitted(len(loads))
    assert room.slots is not None
    if not (total := sum(loads)):
        return 1.0
    *others, heaviest = sorted(_group_loads(loads, room.groups))
    node = heaviest + sum(others[: room.groups // room.cells - 1])
    counts = _counts(loads, room.slots, room.gpus // room.cells)
    piece = max(load / count for load, count in zip(loads, counts))
    return max(1.0, node * room.cells / total, piece * room.gpus / total)


def slots_needed(loads: Sequence[int], room: Room, target: float = 1.05) -> int | None:
    """The fewest slots with which a placement's figure is at most `target`; None if no tried number is enough, up to
    one replica on every device. If there are many numbers to try, it is assumed that more slots are never worse.
    """
    choices = range(len(loads), len(loads) * room.gpus // room.cells + 1, room.cells)

    def enough(slots: int) -> bool:
        tried = replace(room, slots=slots)
        return bound(loads, tried) <= target and place(loads, tried).figure(loads) <= target

    if len(choices) <= _FEW_CHOICES:
        return next(filter(enough, choices), None)
    step = 1
    while not enough(choices[min(step, len(choices)) - 1]):
        if step >= len(choices):
            return None
        step *= 2
    return choices[bisect_left(choices, True, step // 2, min(step, len(choices)) - 1, key=enough)]


def _filled(loads: Sequence[int], guess: Sequence[float], room: Room) -> list[_Cell]:
    """The devices, filled by the loads in `guess` and then improved: all together, or node by node if there are
    groups."""
    assert room.slots is not None
    size, every = len(loads) // room.groups, [list(range(len(loads)))]
    if room.cells > 1:
        sums = _group_loads(guess, room.groups)
        nodes = _packed(sums, list(range(room.groups)), room.nodes, room.groups)
        every = [[group * size + e for group in sorted(node) for e in range(size)] for node in nodes]
    cells = [
        _Cell(loads, _packed(guess, experts, room.gpus // room.cells, room.slots // room.cells))
        for experts in every
    ]
    for cell in cells:
        cell.descend()
    return cells


def _top(cells: Sequence[_Cell]) -> float:
    return max(max(cell.device_loads) for cell in cells)


def _group_loads(loads: Sequence[float], groups: int) -> list[float]:
    size = len(loads) // groups
    return [sum(loads[group * size : (group + 1) * size]) for group in range(groups)]


def _counts(loads: Sequence[float], slots: int, most: int) -> list[int]:
    """Number of replicas of each expert, at most `most`: the next always goes to the expert with the largest pieces."""
    counts = [1] * len(loads)
    waiting = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapify(waiting)
    for _ in range(min(slots, most * len(loads)) - len(loads)):
        expert = waiting[0][1]
        counts[expert] += 1
        left = -loads[expert] / counts[expert] if counts[expert] < most else 1.0
        heapreplace(waiting, (left, expert))
    return counts


def _packed(loads: Sequence[float], experts: list[int], devices: int, slots: int) -> list[list[int]]:
    """Replicas of `experts` on devices, heaviest first to the device with the least load that may take it."""
    counts = dict(zip(experts, _counts([loads[e] for e in experts], slots, devices)))
    pieces = {e: loads[e] / count for e, count in counts.items()}
    per_device = -(-slots // devices)
    holds: list[list[int]] = [[] for _ in range(devices)]
    device_loads = [0.0] * devices

    def move(expert: int, to: int, out_of: int | None = None) -> None:
        holds[to].append(expert)
        device_loads[to] += pieces[expert]
        if out_of is not None:
            holds[out_of].remove(expert)
            device_loads[out_of] -= pieces[expert]

    for expert in sorted(experts, key=lambda e: (-pieces[e], e)):
        for _ in range(counts[expert]):
            able = sorted((d for d in range(devices) if expert not in holds[d]), key=device_loads.__getitem__)
            device = next((d for d in able if len(holds[d]) < per_device), None)
            if device is None:
                # The devices with room already have this expert, so another device moves a replica there to make room.
                room = next(d for d in range(devices) if len(holds[d]) < per_device)
                device, other = next((d, e) for d in able for e in holds[d] if e not in holds[room])
                move(other, room, device)
            move(expert, device)
    return [[*held, *[_HOLE] * (per_device - len(held))] for held in holds]


class _Cell:
    """Devices among which experts can move freely, with their slots and the resulting loads."""

    def __init__(self, loads: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        self.loads = loads
        self.slots = [list(experts) for experts in slots]
        self._weigh()

    def _weigh(self) -> None:
        self.holders: dict[int, list[int]] = {}
        for device, experts in enumerate(self.slots):
            for expert in experts:
                self.holders.setdefault(expert, []).append(device)
        self.holders.pop(_HOLE, None)
        self.piece = {expert: self.loads[expert] / len(where) for expert, where in self.holders.items()}
        self.piece[_HOLE] = 0.0
        self.device_loads = [sum(map(self.piece.__getitem__, experts)) for experts in self.slots]
        self.top = max(range(len(self.slots)), key=self.device_loads.__getitem__)

    def descend(self, budget: float = math.inf) -> int:
        """Reduce the busiest device's load step by step, until no step does, or more than `budget` slots would change
        their expert. Returns the number of changed slots."""
        start = [set(experts) for experts in self.slots]
        changed = 0
        while step := self._swap() or self._new_replica():
            before = [list(experts) for experts in self.slots]
            for device, slot, expert in step:
                self.slots[device][slot] = expert
            now = sum(len(set(experts) - then - {_HOLE}) for experts, then in zip(self.slots, start))
            if now > budget:
                self.slots = before
                break
            changed = now
            self._weigh()
        return changed

    def _swap(self) -> list[tuple[int, int, int]]:
        """The swap between a slot of the busiest device and a slot of another that makes the larger load smallest: each
        device, slot and new expert. Empty if no swap lowers the load."""
        top, loads, piece = self.top, self.device_loads, self.piece
        best, step = loads[top] * (1 - 1e-9), []
        for other, slots in enumerate(self.slots):
            if loads[other] >= best:
                continue
            gap = loads[top] - loads[other]
            for i, a in enumerate(self.slots[top]):
                if a == _HOLE or a in slots:
                    continue
                for j, b in enumerate(slots):
                    less = piece[a] - piece[b]
                    if 0 < less < gap and (b == _HOLE or b not in self.slots[top]):
                        high = max(loads[top] - less, loads[other] + less)
                        if high < best:
                            best, step = high, [(top, i, b), (other, j, a)]
        return step

    def _new_replica(self) -> list[tuple[int, int, int]]:
        """The slot to reassign to an expert of the busiest device, as one more replica, so that the largest changed
        load is smallest: device, slot and new expert. Empty if none lowers the load."""
        best, step = self.device_loads[self.top] * (1 - 1e-9), []
        for less, where in self.holders.items():
            if len(where) < 2:
                continue
            up = self.loads[less] / (len(where) - 1) - self.piece[less]
            over = [d for d in where if d != self.top and self.device_loads[d] + up >= best]
            # If the grown pieces are too much for a device, the replica must be taken from that device.
            for device in (over or where) if len(over) < 2 else ():
                for more in self.slots[self.top]:
                    if more not in (less, _HOLE) and more not in self.slots[device]:
                        high = self._after(less, more, device)
                        if high < best:
                            best, step = high, [(device, self.slots[device].index(less), more)]
        return step

    def _after(self, less: int, more: int, device: int) -> float:
        """The largest changed load after a replica of `less` on a device is replaced by a replica of `more`."""
        up = self.loads[less] / (len(self.holders[less]) - 1) - self.piece[less]
        down = self.loads[more] / (len(self.holders[more]) + 1) - self.piece[more]
        changed = {d: self.device_loads[d] + up for d in self.holders[less]}
        changed[device] = self.device_loads[device] - self.piece[less] + self.piece[more] + down
        for d in self.holders[more]:
            changed[d] = changed.get(d, self.device_loads[d]) + down
        return max(changed.values())


def _require_same(before: Placement, experts: int, room: Room) -> None:
    """Raise ConfigError if the placement `before` is not of these experts on these devices."""
    slots = [expert for device in before.devices for expert in device]
    twice = any(len(set(device)) < len(device) for device in before.devices)
    if (
        len(before.devices) != room.gpus
        or len(slots) != room.slots
        or set(slots) != set(range(experts))
        or twice
    ):
        raise ConfigError(
            f"The placement before has {len(before.devices)} devices and {len(slots)} slots of {len(set(slots))} "
            f"experts, and not gpus={room.gpus} and slots={room.slots} of {experts}; place them without it."
        )
    own, size = room.gpus // room.cells, experts // room.groups
    seen = {(e // size, device // own) for device, held in enumerate(before.devices) for e in held}
    if room.cells > 1 and len(seen) > room.groups:
        raise ConfigError(
            f"The placement before has groups on several of nodes={room.nodes}; place them without it."
        )
