"""Times of collectives: latency per step and bytes over bandwidth, on rings and trees, within and between nodes.

Thakur, Rabenseifner and Gropp (IJHPCA 2005) give the ring's terms, Sanders, Speck and Träff (Parallel Computing 2009)
the double tree's. Devices are numbered as launchers number them: tensor parallel ranks are neighbours, then context,
then data, then pipeline. A group with members in several nodes shares the nodes' adapters with the groups that run at
the same time, so its ring gets one share of them for each member in a node.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from penstock.planner.rates import Rates


class DeviceGroup(NamedTuple):
    """Devices that communicate: `size` of them, `inside` in each node, over `bandwidth` bytes per second."""

    size: int
    inside: int
    bandwidth: float
    """Bus bandwidth: of one member in its ring."""
    step: float
    """Mean latency of one step of the ring."""
    hop: float
    """Latency of one level of a tree."""
    tree: float
    """Latency of a tree up and down, and of the ring inside each node."""
    outward: float
    """Bytes per second out of a node, of all its devices together."""
    rates: Rates


@lru_cache(maxsize=1 << 14)
def group_of(rates: Rates, size: int, stride: int) -> DeviceGroup:
    """The group of `size` devices that are `stride` apart."""
    per_node = rates.machine.devices_per_node
    link_step, node_step = rates.constants.link_step_seconds, rates.constants.node_step_seconds
    inside = min(size, max(1, per_node // stride))
    levels = 4 * (size - 1).bit_length()
    if inside >= size:
        rates = (rates.pairs or rates) if size == 2 else rates
        tree = levels * link_step
        return DeviceGroup(size, inside, rates.link, link_step, link_step, tree, rates.node, rates)
    nodes = -(-size // inside)
    # Members are `stride` apart, so that those in neighbouring nodes come first.
    node_stride = max(1, stride // per_node)
    above = rates.machine.leaf_nodes and nodes * node_stride > rates.machine.leaf_nodes
    node = rates.node * (rates.machine.spine_share if above else 1.0)
    bandwidth = min(rates.link, node * inside / per_node)
    step = (nodes * node_step + (size - nodes) * link_step) / size
    tree = levels * node_step + inside * step
    return DeviceGroup(size, inside, bandwidth, step, node_step, tree, node, rates)


def gather_seconds(group: DeviceGroup, moved: float, calls: float = 1.0, *, scatters: bool = False) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, `moved` bytes: each member ends (or starts) with all of
    them.

    It uses a ring, whose steps add up: nccl has no tree for these before 2.23, and later only for one device per node.
    """
    n = group.size
    if n == 1 or moved <= 0:
        return 0.0
    called = calls * group.rates.call_seconds
    bandwidth = group.bandwidth * (group.rates.scattering if scatters else group.rates.gathering)
    return (n - 1) / n * moved / bandwidth + (n - 1) * group.step + _ramp(group, moved) / 2 + called


def reduce_seconds(group: DeviceGroup, moved: float, calls: float = 1.0) -> float:
    """Seconds of an all-reduce of `moved` bytes, by a ring or a double tree, whichever is faster."""
    n = group.size
    if n == 1 or moved <= 0:
        return 0.0
    called = calls * group.rates.call_seconds
    steps = min(2 * (n - 1) * group.step, group.tree)
    return 2 * (n - 1) / n * moved / group.bandwidth + steps + _ramp(group, moved) + called


def exchange_seconds(group: DeviceGroup, moved: float, once: int = 0, reach: float = 1.0) -> float:
    """Seconds of an all-to-all in which each member sends `moved` bytes in total, including the part that it keeps.

    Within a node they go over the links, between nodes through each member's own share of the adapters, both at the
    same time. With `once`, each token goes to `once` destinations, drawn evenly from the share `reach` of the members,
    and `moved` counts all of them: a token enters each node once, and is forwarded to each of the node's members once,
    as in DeepEP's kernels for training (its README). The same multiprocessors do both, so both slow down.
    """
    n, per_node = group.size, group.rates.machine.devices_per_node
    if n == 1 or moved <= 0:
        return 0.0
    nodes = n / group.inside
    inside, across = moved * (group.inside - 1) / n, moved * (n - group.inside) / n
    if once:
        inside = moved * (n - 1) / n * distinct_places(n * reach, once) / once
        across *= distinct_places(nodes * reach, once) / once
    seconds = inside / group.rates.link
    if nodes > 1:
        outside = across / (group.outward / per_node)
        seconds = math.hypot(seconds, outside) if once else max(seconds, outside)
    return seconds + group.hop + _ramp(group, moved) / 2 + group.rates.call_seconds


def distinct_places(places: float, draws: int) -> float:
    """Expected number of distinct places among `draws` random draws from `places`; at least one."""
    places = max(1.0, places)
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def send_seconds(rates: Rates, stride: int, moved: float) -> float:
    """Seconds to send `moved` bytes to the device that is `stride` away, while all devices of a node send."""
    constants, per_node = rates.constants, rates.machine.devices_per_node
    across = stride >= per_node
    bandwidth = min(rates.link, rates.node / per_node) if across else rates.sending
    latency = constants.node_step_seconds if across else constants.link_step_seconds
    return moved / bandwidth + latency + (rates.pairs or rates).call_seconds


def exposed_seconds(rates: Rates, transfer: float, computing: float) -> float:
    """Seconds that a transfer adds to the computation that it overlaps: the excess over the computation's time, but at
    least its duration times the share of the multiprocessors that it occupies."""
    return max(transfer - computing, rates.collective_share * transfer)


def _ramp(group: DeviceGroup, moved: float) -> float:
    constants = group.rates.constants
    return constants.ramp_seconds * float(min(1.0, moved / constants.ramp_bytes) ** 0.5)
