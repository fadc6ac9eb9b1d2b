"""Hosts of their own on this machine: network namespaces with addresses, joined by a link that delays and loses.

The link is a thread that carries packets between the namespaces' TUN devices. The kernel could do the same with
`tc netem`, where it was built with that.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DEVICE = "eth0"
"""The name of the network device of every host."""
_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Hosts:
    """Several hosts; a context that removes them.

    Args:
        count: how many.
        delay: seconds that a packet takes.
        loss: share of packets that are lost.
        seed: of what is lost.
    """

    def __init__(self, count: int, delay: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        self.delay, self.loss, self.random = delay, loss, random.Random(seed)
        self.names = [f"ek{os.getpid()}-{index}" for index in range(count)]
        self.addresses = [f"10.213.7.{index + 1}" for index in range(count)]
        self.cut: set[str] = set()
        """The addresses of the hosts that nothing reaches."""
        self.carried = self.dropped = 0
        self._devices: dict[str, int] = {}
        # torchrun looks up the name of its host
        self._known_hosts = tempfile.NamedTemporaryFile("w", suffix=".hosts")  # noqa: SIM115
        lines = [f"{address} host{index}" for index, address in enumerate(self.addresses)]
        self._known_hosts.write("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._known_hosts.flush()
        self._stopped = threading.Event()
        self._link = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Hosts:
        try:
            for name, address in zip(self.names, self.addresses, strict=True):
                _ip("netns", "add", name)
                self.run_in(self.names.index(name), lambda address=address: self._open_device(address))
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        self._link.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        if self._link.is_alive():
            self._link.join()
        for device in self._devices.values():
            os.close(device)
        self._known_hosts.close()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def _open_device(self, address: str) -> None:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        self._devices[address] = device

    def _carry(self) -> None:
        """Carry packets from host to host until the end."""
        waiting: list[tuple[float, int, int, bytes]] = []
        while not self._stopped.is_set():
            pause = min(max(waiting[0][0] - time.monotonic(), 0.0), 0.05) if waiting else 0.05
            for device in select.select(list(self._devices.values()), [], [], pause)[0]:
                packet = os.read(device, 65536)
                source, target = (".".join(map(str, packet[at : at + 4])) for at in (12, 16))
                is_known = packet[0] >> 4 == 4 and target in self._devices
                if not is_known or {source, target} & self.cut or self.random.random() < self.loss:
                    self.dropped += is_known
                    continue
                self.carried += 1
                heapq.heappush(waiting, (time.monotonic() + self.delay, self.carried, self._devices[target], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(waiting)
                with suppress(OSError):
                    os.write(device, packet)

    def enter(self, index: int) -> None:
        """Move this process, which has no other threads, to a host."""
        _enter_network(self.names[index])
        _call(_libc.unshare, CLONE_NEWUTS)
        name = f"host{index}".encode()
        _call(_libc.sethostname, name, len(name))
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE

    def run_in(self, index: int, work: Any) -> Any:
        """Do something in the network of a host, in a thread of its own, and return what comes of it."""
        results: list[Any] = []

        def enter_and_work() -> None:
            _enter_network(self.names[index])
            results.append(work())

        thread = threading.Thread(target=enter_and_work)
        thread.start()
        thread.join()
        return results[0]

    def command(self, index: int, *arguments: str) -> list[str]:
        """Return the command that runs another on a host, with processes of its own."""
        enter = ["ip", "netns", "exec", self.names[index], "unshare", "--uts", "--pid", "--fork", "--kill-child"]
        mounts = f"mount -t proc proc /proc && mount --bind {self._known_hosts.name} /etc/hosts"
        script = f'{mounts} && hostname host{index} && exec "$@"'
        return [*enter, "--mount", "sh", "-c", script, "sh", *arguments]


def _enter_network(name: str) -> None:
    with Path("/run/netns", name).open() as namespace:
        _call(_libc.setns, namespace.fileno(), CLONE_NEWNET)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)


def reason_against_hosts() -> str:
    """Say why hosts cannot be made here; empty if they can."""
    try:
        with Hosts(1):
            return ""
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        return f"network namespaces are not permitted here: {error}"
