"""Hosts with names, addresses and links of their own, on this machine: namespaces of Linux, which share its disk.

Each host is a process in namespaces of its own, which ends with the process that made it, and the namespaces with it.
Their links meet in a bridge in one more such namespace, so nothing of this machine's own network is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Self

PORT = 29433
_KINDS = ("--net", "--uts", "--mount")


def why_not() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} (packages iproute2 and util-linux) are missing"
    tried = subprocess.run(
        ["unshare", *_KINDS, "ip", "link", "add", "name", "bridge0", "type", "bridge"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"this machine lets nobody make namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One host, until closed. `address` is that of its only link, by which the others reach it."""

    def __init__(self, number: int, names: dict[str, str]) -> None:
        """`names` are what its /etc/hosts says of addresses; without any it is this machine's."""
        self.name, self.address = f"node-{number}", f"10.231.77.{number}"
        self._holder = subprocess.Popen(
            ["unshare", *_KINDS, "sh", "-c", 'hostname "$1"; echo; read end', "-", self.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # the namespaces are there
        pid = self._holder.pid
        self._net = os.readlink(f"/proc/{pid}/ns/net")
        assert self._net != os.readlink("/proc/self/ns/net")
        self.prefix = ("nsenter", "--target", str(pid), *_KINDS, "--")
        """What a command on this host begins with."""
        self.run("ip", "link", "set", "lo", "up")
        if names:
            lines = "".join(f"{address} {name}\n" for name, address in names.items())
            self.run("sh", "-c", 'mount -t tmpfs none /mnt; printf "$1" > /mnt/hosts', "-", lines)
            self.run("mount", "--bind", "/mnt/hosts", "/etc/hosts")

    def run(self, *command: str) -> None:
        """Run a command there to its end."""
        subprocess.run([*self.prefix, *command], check=True)

    def close(self) -> None:
        """End it, with all that runs there."""
        if self._holder.returncode is not None:
            return
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "net") == self._net and int(entry.name) != self._holder.pid:
                    os.kill(int(entry.name), 9)
            except OSError:
                continue  # it has ended
        self._holder.kill()  # the last: until then no other namespace has its number
        self._holder.communicate()


class Network:
    """Hosts on one network while entered, numbered from 1. `names` are entries of each one's /etc/hosts."""

    def __init__(self, count: int, names: tuple[dict[str, str], ...] = ()) -> None:
        self._names = names or ({},) * count
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._switch = self._add(stack, Host(0, {}))
            self._switch.run("ip", "link", "add", "name", "bridge0", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge0", "up")
            self._stack, self._made = stack, 0
            self.hosts = [self.add(names) for names in self._names]
            self._stack = stack.pop_all()
        return self

    def add(self, names: dict[str, str] | None = None) -> Host:
        """One more host."""
        self._made += 1
        host = self._add(self._stack, Host(self._made, names or {}))
        words = ("type", "veth", "peer", "name", "eth0", "netns", host.prefix[2])
        self._switch.run("ip", "link", "add", "name", f"port{self._made}", *words)
        self._switch.run("ip", "link", "set", f"port{self._made}", "master", "bridge0", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def silence(self, host: Host) -> None:
        """Let packets from and to a host vanish, without a sign of it at either end."""
        self._switch.run("ip", "link", "set", f"port{host.name[5:]}", "nomaster")

    def lose(self, host: Host) -> None:
        """End a host as a power cut does: nothing that it has sent tells the others."""
        self.silence(host)
        host.close()

    @staticmethod
    def _add(stack: ExitStack, host: Host) -> Host:
        stack.callback(host.close)
        return host
