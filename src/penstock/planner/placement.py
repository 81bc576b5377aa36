"""Where to put the experts of a mixture, so that no device has much more to do than the others.

Experts have loads, and each has one or more replicas, which take even shares of its tokens, or uneven ones. A device
has room for some replicas, and never two of one expert. With groups, all experts of a group are on one node, as routers
want that choose a few groups first. The problem is that of DeepSeek's EPLB (DeepSeek-AI, 2024, "DeepSeek-V3 Technical
Report", section 3.4), with any number of replicas, fewer moves, and a search behind the greedy start. The figure of a
placement is the largest load of a device over the mean one; 1 is best.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import combinations

from penstock.config.convert import Checked, Count
from penstock.errors import ConfigError

HOLE = -1
"""The expert of a slot that is left empty."""
_EFFORT = 24_000
"""Slots that the search visits again from other starts, all starts together."""
_MOST_STARTS = 300
_SHARE_EFFORT = 40_000
"""The same of the search for uneven shares, which looks at all slots after each step."""
_SMALL = 64
"""Slots up to which there is such a search; with more, the shares of the search for even ones are hardly less even."""
_FEW_CHOICES = 100
"""Numbers of slots up to which all are tried."""
_MOST_WAYS = 40
"""Ways to give groups to nodes up to which all are tried."""


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
        """The same with a number of slots. Raises ConfigError where they cannot hold `experts` experts."""
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
    """Which experts each device holds, and which share of their tokens."""

    devices: tuple[tuple[int, ...], ...]
    """Experts on each device, in ascending order."""
    shares: tuple[tuple[float, ...], ...]
    """Share of each of these experts' tokens that the device computes; an expert's shares sum to 1."""

    def loads(self, loads: Sequence[float]) -> list[float]:
        """The load of each device."""
        return [
            sum(loads[expert] * share for expert, share in zip(experts, shares))
            for experts, shares in zip(self.devices, self.shares)
        ]

    def figure(self, loads: Sequence[float]) -> float:
        """The largest load of a device over the mean one; 1 where there is none."""
        device_loads, total = self.loads(loads), sum(loads)
        return max(device_loads) * len(device_loads) / total if total else 1.0

    def moved(self, before: Placement) -> int:
        """Slots that hold another expert than in a placement before, which must be fetched."""
        return sum(len(set(now) - set(then)) for now, then in zip(self.devices, before.devices))


def place(
    loads: Sequence[int], room: Room, *, uneven: bool = False, before: Placement | None = None, moves: int | None = None
) -> Placement:  # fmt: skip
    """A placement of experts with these loads. With `uneven`, replicas take the shares of tokens that balance best.

    With a placement `before`, at most `moves` slots change (none: one in twenty), and groups stay on their nodes.

    Raises:
        ConfigError: the experts have no room, or the placement before is of other experts or devices.
    """
    room = room.fitted(len(loads))
    assert room.slots is not None
    own = room.gpus // room.cells
    if before is not None:
        _require_same(before, len(loads), room)
        budget = room.slots // 20 if moves is None else moves
        cells = (before.devices[cell * own : (cell + 1) * own] for cell in range(room.cells))
        filled = [_Cell(loads, list(map(list, each)), room.slots // room.cells) for each in cells]
        for cell in sorted(filled, key=lambda cell: -max(cell.device_loads)):
            budget -= cell.descend(budget)
    else:
        filled = _best_cells(loads, room, own, uneven=uneven)
    devices = [sorted(e for e in slots if e != HOLE) for cell in filled for slots in cell.slots]
    return _with_shares(loads, devices, uneven=uneven)


def bound(loads: Sequence[int], room: Room, *, uneven: bool = False) -> float:
    """A figure that no placement is below: that of the heaviest node in the best split of groups over nodes, and of the
    device with the largest piece where an expert is cut into as many as there can be."""
    room = room.fitted(len(loads))
    assert room.slots is not None
    total = sum(loads)
    if not total:
        return 1.0
    mean, least = total / room.gpus, 1.0
    if room.cells > 1:
        least = max(least, _heaviest_node(loads, room) * room.cells / total)
    devices = room.gpus // room.cells
    spare = room.slots // room.cells - len(loads) // room.cells + 1
    most = min(devices, spare)
    if uneven:
        return max(least, max(loads) / most / mean)
    pieces = [load / count for load, count in zip(loads, _counts(loads, room.slots, devices, spare))]
    # A device that is full holds other pieces beside the largest one, none smaller than the smallest there can be.
    beside = (room.slots // room.gpus - 1) * min(loads) / most
    return max(least, (max(pieces) + max(0.0, beside)) / mean)


def slots_needed(
    loads: Sequence[int], room: Room, target: float = 1.05, *, uneven: bool = False
) -> int | None:
    """The fewest slots with which a placement's figure is at most `target`; None where no number that is tried is
    enough, up to one replica on every device. Where there are many numbers to try, more slots are taken to be no worse.
    """
    choices = range(len(loads), len(loads) * room.gpus // room.cells + 1, room.cells)
    room.fitted(len(loads))

    def enough(slots: int) -> bool:
        tried = replace(room, slots=slots)
        if bound(loads, tried, uneven=uneven) > target:
            return False
        return place(loads, tried, uneven=uneven).figure(loads) <= target

    if len(choices) <= _FEW_CHOICES:
        return next((slots for slots in choices if enough(slots)), None)
    if bound(loads, replace(room, slots=choices[-1]), uneven=uneven) > target:
        return None
    last, step = -1, 1
    while not enough(choices[min(last + step, len(choices) - 1)]):
        last, step = last + step, 2 * step
        if last >= len(choices) - 1:
            return None
    return choices[bisect_left(choices, True, last + 1, min(last + step, len(choices) - 1), key=enough)]


# -- groups to nodes, experts to replicas


def _best_cells(loads: Sequence[int], room: Room, devices: int, *, uneven: bool) -> list[_Cell]:
    """The devices that experts may be on, filled: all of them together, or node by node where there are groups."""
    assert room.slots is not None
    if room.groups == 1:
        return [_searched(loads, list(range(len(loads))), devices, room.slots, uneven=uneven)]
    best: list[_Cell] = []
    least = math.inf
    for way in _by_node(loads, room):
        if max(sum(loads[e] for e in experts) for experts in way) / devices >= least:
            break
        slots = room.slots // room.nodes
        cells = [_searched(loads, experts, devices, slots, uneven=uneven) for experts in way]
        if (high := max(_top(cell) if uneven else max(cell.device_loads) for cell in cells)) < least:
            best, least = cells, high
    return best


def _group_loads(loads: Sequence[int], groups: int) -> list[int]:
    size = len(loads) // groups
    return [sum(loads[group * size : (group + 1) * size]) for group in range(groups)]


def _has_few_ways(room: Room) -> bool:
    """Whether there are few ways to give groups to nodes, so that all can be tried."""
    ways: int = math.factorial(room.groups // room.nodes) ** room.nodes * math.factorial(room.nodes)
    return math.factorial(room.groups) <= _MOST_WAYS * ways


def _by_node(loads: Sequence[int], room: Room) -> Iterator[list[list[int]]]:
    """Ways to give groups to nodes, as the experts of each node; the one with the lightest heaviest node first, and
    where there are few ways, all of them."""
    size, sums = len(loads) // room.groups, _group_loads(loads, room.groups)
    each = room.groups // room.nodes
    if _has_few_ways(room):
        ways = sorted(_splits(tuple(range(room.groups)), each), key=lambda way: _heaviest_load(way, sums))
    else:
        packed = _searched(sums, list(range(room.groups)), room.nodes, room.groups, uneven=False)
        ways = [tuple(map(tuple, packed.slots))]
    for way in ways:
        yield [[group * size + place for group in sorted(groups) for place in range(size)] for groups in way]


def _splits(groups: tuple[int, ...], each: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to split groups into sets of `each`, whose order does not matter."""
    if not groups:
        yield ()
        return
    for fellows in combinations(groups[1:], each - 1):
        remaining = tuple(group for group in groups[1:] if group not in fellows)
        yield from (((groups[0], *fellows), *way) for way in _splits(remaining, each))


def _heaviest_load(way: Sequence[Sequence[int]], loads: Sequence[int]) -> int:
    return max(sum(loads[group] for group in groups) for groups in way)


def _heaviest_node(loads: Sequence[int], room: Room) -> float:
    """A load that the heaviest node has at least; exact where there are few ways to give groups to nodes."""
    sums, each = _group_loads(loads, room.groups), room.groups // room.nodes
    if _has_few_ways(room):
        return min(_heaviest_load(way, sums) for way in _splits(tuple(range(room.groups)), each))
    return max(sum(sums) / room.nodes, max(sums) + sum(sorted(sums)[: each - 1]))


def _counts(loads: Sequence[int], slots: int, most: int, spare: int) -> list[int]:
    """How many replicas each expert has, so that the largest piece is smallest: the next replica is always of the
    expert whose pieces are largest. None has more than `most`, or than one and all that is `spare`."""
    counts, most = [1] * len(loads), min(most, spare)
    waiting = [(-float(load), expert) for expert, load in enumerate(loads)] if most > 1 else []
    heapify(waiting)
    for _ in range(slots - len(loads)):
        if not waiting:
            break
        _, expert = heappop(waiting)
        counts[expert] += 1
        if counts[expert] < most:
            heappush(waiting, (-loads[expert] / counts[expert], expert))
    return counts


# -- one set of devices over which experts may be anywhere


def _searched(loads: Sequence[int], experts: list[int], devices: int, slots: int, *, uneven: bool) -> _Cell:
    """The best placement that a search finds from several starts; the same one each time."""
    best = _Cell(loads, _packed(loads, experts, devices, slots), slots)
    best.descend()
    rng = random.Random(0)
    now = best
    for _ in range(min(_MOST_STARTS, _EFFORT // (slots * len(experts)))):
        if max(best.device_loads) <= 1.002 * best.mean:
            break
        trial = now.copy()
        trial.shake(rng)
        trial.descend()
        if trial.score() <= now.score() or rng.random() < 0.05:
            now = trial
        if trial.score() < best.score():
            best = trial
    if uneven and slots <= _SMALL:
        _search_shares(best)
    return best


def _packed(loads: Sequence[int], experts: list[int], devices: int, slots: int) -> list[list[int]]:
    """Replicas of `experts` on devices, heaviest first to the device with the least load that may take it."""
    counts = _counts([loads[e] for e in experts], slots, devices, slots)
    pieces = sorted(
        ((loads[e] / count, e) for e, count in zip(experts, counts) for _ in range(count)), reverse=True
    )
    per_device = -(-slots // devices)
    holds: list[list[int]] = [[] for _ in range(devices)]
    device_loads = [0.0] * devices
    for weight, expert in pieces:
        free = [d for d in range(devices) if len(holds[d]) < per_device and expert not in holds[d]]
        if free:
            device = min(free, key=device_loads.__getitem__)
        else:
            # The devices with room have this expert already: one of them takes another's in exchange for a place there.
            full = next(d for d in range(devices) if len(holds[d]) < per_device)
            device, other = next(
                (d, e)
                for d in sorted(range(devices), key=device_loads.__getitem__)
                for e in holds[d]
                if expert not in holds[d] and e not in holds[full]
            )
            holds[device].remove(other)
            holds[full].append(other)
            share = loads[other] / counts[experts.index(other)]
            device_loads[device] -= share
            device_loads[full] += share
        holds[device].append(expert)
        device_loads[device] += weight
    return holds


class _Cell:
    """A placement that changes: slots of devices, and the loads that follow from them under even shares."""

    def __init__(self, loads: Sequence[int], slots: list[list[int]], count: int) -> None:
        self.loads = loads
        per_device = -(-count // len(slots))
        self.slots = [[*experts, *[HOLE] * (per_device - len(experts))] for experts in slots]
        self.replicas = dict(Counter(e for experts in slots for e in experts if e != HOLE))
        self.device_loads: list[float] = []
        self._weigh()
        self.mean = sum(self.device_loads) / len(self.device_loads)

    def _weigh(self) -> None:
        self.piece = {expert: self.loads[expert] / count for expert, count in self.replicas.items()}
        self.piece[HOLE] = 0.0
        self.device_loads = [sum(map(self.piece.__getitem__, experts)) for experts in self.slots]

    def copy(self) -> _Cell:
        copied = object.__new__(_Cell)
        copied.loads, copied.mean = self.loads, self.mean
        copied.slots, copied.device_loads = [list(experts) for experts in self.slots], list(self.device_loads)
        copied.replicas, copied.piece = dict(self.replicas), dict(self.piece)
        return copied

    def score(self) -> tuple[float, float]:
        """Smaller is better: the largest load, then how far loads are apart."""
        return round(max(self.device_loads), 6), round(sum(load * load for load in self.device_loads), 3)

    def descend(self, budget: int | None = None) -> int:
        """Improve the device with the most load step by step, until nothing does, or more than `budget` slots would
        have other experts. Returns how many have."""
        start = [set(experts) for experts in self.slots]
        while budget is None or self._changed(start) < budget:
            top = max(range(len(self.device_loads)), key=self.device_loads.__getitem__)
            if self.device_loads[top] <= self.mean * (1 + 1e-9):
                break
            before = self.copy() if budget is not None else None
            if not (self._swap(top) or self._convert(top)):
                break
            if before is not None and budget is not None and self._changed(start) > budget:
                vars(self).update(vars(before))
                break
        return self._changed(start)

    def _changed(self, start: Sequence[set[int]]) -> int:
        return sum(len(set(experts) - then - {HOLE}) for experts, then in zip(self.slots, start))

    def _swap(self, top: int) -> bool:
        """Exchange a slot of `top` with the one that lowers the larger of both loads most. Whether one does."""
        device_loads, piece, top_slots = self.device_loads, self.piece, self.slots[top]
        best, choice = device_loads[top] * (1 - 1e-9), None
        for other, other_slots in enumerate(self.slots):
            if other == top or device_loads[other] >= best:
                continue
            gap = device_loads[top] - device_loads[other]
            for i, a in enumerate(top_slots):
                if a == HOLE or a in other_slots:
                    continue
                for j, b in enumerate(other_slots):
                    less = piece[a] - piece[b]
                    if 0 < less < gap and (b == HOLE or b not in top_slots):
                        high = max(device_loads[top] - less, device_loads[other] + less)
                        if high < best:
                            best, choice = high, (other, i, j)
        if choice is None:
            return False
        other, i, j = choice
        less = piece[top_slots[i]] - piece[self.slots[other][j]]
        top_slots[i], self.slots[other][j] = self.slots[other][j], top_slots[i]
        device_loads[top] -= less
        device_loads[other] += less
        return True

    def _convert(self, top: int) -> bool:
        """Give an expert of `top` a replica more in place of one of another expert, or of `top`'s a replica fewer.
        Whether that lowers the load of `top` without any other reaching it."""
        best, choice = self.device_loads[top] * (1 - 1e-9), None
        holders = _holders(self.slots)
        gains = [more for more in self.slots[top] if more != HOLE]
        for less, where in holders.items():
            if len(where) < 2:
                continue
            up = self.loads[less] / (len(where) - 1) - self.piece[less]
            over = [device for device in where if device != top and self.device_loads[device] + up >= best]
            if len(over) > 1:
                continue
            # Where the pieces that grow are too much for a device, it is this one that loses its own.
            for device in over or where:
                for more in gains:
                    if more != less and more not in self.slots[device]:
                        high = self._after(less, more, device, holders)
                        if high < best:
                            best, choice = high, (less, more, device)
        if choice is None:
            return False
        self._apply(*choice)
        return True

    def _after(self, less: int, more: int, device: int, holders: dict[int, list[int]]) -> float:
        """The largest load of those that change when a replica of `less` on a device becomes one of `more`."""
        up = self.loads[less] / (self.replicas[less] - 1) - self.piece[less]
        down = self.loads[more] / (self.replicas[more] + 1) - self.piece[more]
        changed = {d: self.device_loads[d] + up for d in holders[less]}
        changed[device] = self.device_loads[device] - self.piece[less]
        for d in holders[more]:
            changed[d] = changed.get(d, self.device_loads[d]) + down
        changed[device] += self.piece[more] + down
        return max(changed.values())

    def _apply(self, less: int, more: int, device: int) -> None:
        experts = self.slots[device]
        experts[experts.index(less)] = more
        self.replicas[less] -= 1
        self.replicas[more] += 1
        self._weigh()

    def shake(self, rng: random.Random) -> None:
        """Some steps by chance."""
        for _ in range(rng.randint(1, 4)):
            self.step(rng)
        self._weigh()

    def step(self, rng: random.Random) -> bool:
        """Exchange two slots by chance, or give one to another expert; loads do not follow. Whether it could."""
        first, second = rng.randrange(len(self.slots)), rng.randrange(len(self.slots))
        i, j = rng.randrange(len(self.slots[first])), rng.randrange(len(self.slots[second]))
        a, b = self.slots[first][i], self.slots[second][j]
        if self.replicas.get(a, 0) > 1 and rng.random() < 0.4:
            more = rng.choice(list(self.replicas))
            if more in self.slots[first]:
                return False
            self.slots[first][i] = more
            self.replicas[a] -= 1
            self.replicas[more] += 1
            return True
        lands = (a == HOLE or a not in self.slots[second]) and (b == HOLE or b not in self.slots[first])
        if first == second or not lands:
            return False
        self.slots[first][i], self.slots[second][j] = b, a
        return True


# -- uneven shares


def _search_shares(cell: _Cell) -> None:
    """Let the cell become the one with the most even best shares that a walk finds, which goes up a little at first."""
    rng = random.Random(0)
    now = best = _top(cell)
    best_cell, steps = cell.copy(), _SHARE_EFFORT // sum(map(len, cell.slots))
    for step in range(steps):
        if best <= 1.002 * cell.mean:
            break
        trial = cell.copy()
        if not trial.step(rng):
            continue
        high = _top(trial)
        if high < now * (1 + 0.03 * (1 - step / steps) * rng.random()):
            cell.slots, cell.replicas, now = trial.slots, trial.replicas, high
        if high < best:
            best, best_cell = high, trial
    cell.slots, cell.replicas = best_cell.slots, best_cell.replicas


def _top(cell: _Cell) -> float:
    """The largest load of a device under the best shares."""
    return max(_balanced(cell.loads, cell.slots)[1])


def _holders(slots: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """The devices that hold each expert."""
    holders: dict[int, list[int]] = {}
    for device, experts in enumerate(slots):
        for expert in experts:
            if expert != HOLE:
                holders.setdefault(expert, []).append(device)
    return holders


def _balanced(
    loads: Sequence[int], slots: Sequence[Sequence[int]], rounds: int = 60
) -> tuple[dict[int, dict[int, float]], list[float]]:
    """Loads of each expert by device that make the loads of devices as even as can be, and these. Experts in turn fill
    the devices that hold them, the least loaded first, which converges to the most even flow."""
    holders = _holders(slots)
    flows = {e: dict.fromkeys(where, loads[e] / len(where)) for e, where in holders.items()}
    device_loads = [0.0] * len(slots)
    for flow in flows.values():
        for device, load in flow.items():
            device_loads[device] += load
    several = [expert for expert, where in holders.items() if len(where) > 1]
    tolerance = 1e-4 * max(device_loads, default=0.0)
    for _ in range(rounds):
        moved = 0.0
        for expert in several:
            flow = flows[expert]
            below = sorted((device_loads[device] - load, device) for device, load in flow.items())
            level, total = 0.0, float(loads[expert])
            for count in range(1, len(below) + 1):
                level = (total + sum(base for base, _ in below[:count])) / count
                if count == len(below) or level <= below[count][0]:
                    break
            for base, device in below:
                load = max(0.0, level - base)
                moved = max(moved, abs(load - flow[device]))
                flow[device], device_loads[device] = load, base + load
        if moved <= tolerance:
            break
    return flows, device_loads


def _with_shares(loads: Sequence[int], devices: list[list[int]], *, uneven: bool) -> Placement:
    """The placement with the shares of each replica."""
    flows = _balanced(loads, devices, 1000)[0] if uneven else {}
    counts = Counter(expert for experts in devices for expert in experts)

    def share(device: int, expert: int) -> float:
        return flows[expert][device] / loads[expert] if uneven and loads[expert] else 1 / counts[expert]

    shares = (tuple(share(device, e) for e in experts) for device, experts in enumerate(devices))
    return Placement(tuple(map(tuple, devices)), tuple(shares))


def _require_same(before: Placement, experts: int, room: Room) -> None:
    """Raise ConfigError where a placement before is not one of these experts on these devices."""
    slots = [expert for device in before.devices for expert in device]
    devices, size = room.gpus // room.cells, experts // room.groups
    nodes: dict[int, set[int]] = {}
    for device, each in enumerate(before.devices):
        for expert in each:
            nodes.setdefault(expert // size, set()).add(device // max(1, devices))
    groups_split = room.cells > 1 and any(len(where) > 1 for where in nodes.values())
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
    if groups_split:
        raise ConfigError(
            f"The placement before has groups on several of nodes={room.nodes}; place them without it."
        )
