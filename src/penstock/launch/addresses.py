"""Addresses of this host and the interfaces that have them; and calls that may never end, each in a thread of its own:
torch's store waits for its host for minutes where the network has vanished, and no signal interrupts it."""

from __future__ import annotations

import ctypes
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.launch.signals import STOPS


@dataclass(frozen=True, slots=True)
class Way:
    """How this host reaches another one."""

    host: str
    """The other host, as the user named it."""
    target: str
    """Its address."""
    own: str
    """This host's address on the way there, by which the others can reach it unless it is a loopback address."""

    def words(self) -> str:
        """A sentence for a user whose hosts do not find each other."""
        if not is_loopback(self.own):
            return f"This host is {self.own} ({interface_of(self.own)}) on the way to {self.target}."
        outside = [address for address, _ in _addresses() if not is_loopback(address)]
        such = f", such as {' or '.join(outside[:3])}" if outside else ""
        return (
            f"Here {self.host} is {self.target}, at which no other host can reach this one: others must know it by "
            f"another address{such}."
        )


def way_to(host: str) -> Way:
    """The way from this host to `host`. Sends nothing. Raises OSError where there is none."""
    family, _, _, _, target = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return Way(host, str(target[0]), str(probe.getsockname()[0]))


def words_of_way(host: str) -> str:
    """`Way.words` of the way to `host`, or that there is none."""
    try:
        return way_to(host).words()
    except OSError as problem:
        return f"This host knows no way to {host}: {problem.strerror}."


def is_loopback(address: str) -> bool:
    """Whether only this host itself reaches it by `address`."""
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """The network interface that has `address`; empty where none has."""
    return next(
        (name for own, name in _addresses() if own == address.partition("%")[0]),
        "lo" if is_loopback(address) else "",
    )


class _Entry(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3), which Linux and macOS begin alike."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_ubyte)),
]


def _addresses() -> list[tuple[str, str]]:
    """Addresses of this host, each with its interface."""
    libc, first, addresses = ctypes.CDLL(None), ctypes.POINTER(_Entry)(), list[tuple[str, str]]()
    if libc.getifaddrs(ctypes.byref(first)):
        return addresses
    entry = first
    while entry:
        each, entry = entry.contents, entry.contents.next
        if not each.address:
            continue
        # A family of 16 bits in the host's order, of which macOS gives the first 8 to the length.
        family = each.address[1] or each.address[0]
        for known, begin, end in ((socket.AF_INET, 4, 8), (socket.AF_INET6, 8, 24)):
            if family == known:
                addresses.append(
                    (socket.inet_ntop(known, bytes(each.address[begin:end])), each.name.decode())
                )
    libc.freeifaddrs(first)
    return addresses


T = TypeVar("T")


class Call(Generic[T]):
    """`function` in a thread of its own. A process that ends does not wait for it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._values: list[T] = []
        self._problem: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="penstock-store", daemon=True).start()

    def wait(self, seconds: float = 0.0) -> bool:
        """Whether it has ended after `seconds` more."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """The value it returned, once it has ended. Raises its error."""
        if self._problem is not None:
            raise self._problem
        return self._values[0]

    def _run(self) -> None:
        # Else a signal may reach this thread, and the main one, which handles it, sleeps on.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOPS, signal.SIGINT))
        try:
            self._values.append(self._function())
        except BaseException as problem:  # noqa: BLE001  # raised again by `result`
            self._problem = problem
        self._ended.set()
