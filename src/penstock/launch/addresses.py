"""Addresses of this host with their interfaces; and calls in threads of their own, because they may never end: torch's
store waits for its host for minutes after the network has vanished, and no signal interrupts it."""

from __future__ import annotations

import ctypes
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from penstock.launch.signals import STOPS


class Route(NamedTuple):
    """How this host reaches another host."""

    target: str
    """The other host's address."""
    own: str
    """This host's address on that route; unless it is a loopback address, the other hosts can reach it there."""


def route_to(host: str) -> Route:
    """The route from this host to `host`. Sends nothing. Raises OSError if there is none."""
    family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return Route(str(target[0]), str(probe.getsockname()[0]))


def describe_route(host: str) -> str:
    """A sentence on the route to `host`, for users whose hosts do not find each other."""
    try:
        target, own = route_to(host)
    except OSError as problem:
        return f"This host knows no way to {host}: {problem.strerror}."
    if not is_loopback(own):
        return f"This host is {own} ({interface_of(own)}) on the way to {target}."
    outside = [address for address, _ in _addresses() if not is_loopback(address)]
    such = f", such as {' or '.join(outside[:3])}" if outside else ""
    return (
        f"Here {host} is {target}, at which no other host can reach this one: others must know it by another "
        f"address{such}."
    )


def is_loopback(address: str) -> bool:
    """Whether `address` can only be reached from this host itself."""
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """The network interface that has `address`; empty if none has."""
    return next(
        (name for own_address, name in _addresses() if own_address == address.partition("%")[0]),
        "lo" if is_loopback(address) else "",
    )


class _Entry(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3), whose first fields are the same on Linux and macOS."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_ubyte)),
]


def _addresses() -> list[tuple[str, str]]:
    """This host's addresses, each with its network interface."""
    libc, first, addresses = ctypes.CDLL(None), ctypes.POINTER(_Entry)(), list[tuple[str, str]]()
    if libc.getifaddrs(ctypes.byref(first)):
        return addresses
    entry = first
    while entry:
        current, entry = entry.contents, entry.contents.next
        if not current.address:
            continue
        # The family has 16 bits in the host's byte order; macOS uses the first 8 for the length.
        family = current.address[1] or current.address[0]
        for kind, begin, end in ((socket.AF_INET, 4, 8), (socket.AF_INET6, 8, 24)):
            if family == kind:
                addresses.append(
                    (socket.inet_ntop(kind, bytes(current.address[begin:end])), current.name.decode())
                )
    libc.freeifaddrs(first)
    return addresses


T = TypeVar("T")


def call(function: Callable[[], T]) -> Future[T]:
    """Start `function` in a thread of its own. A process that ends does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        # Else a signal could reach this thread, while the main thread, which handles it, sleeps on.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, signal.SIGINT))
        try:
            future.set_result(function())
        except BaseException as problem:  # noqa: BLE001  # raised again by the future's `result`
            future.set_exception(problem)

    threading.Thread(target=run, name="penstock-store", daemon=True).start()
    return future
