"""The addresses at which other hosts may reach this one."""

import fcntl
import os
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def own_addresses(towards: str | None = None) -> list[str]:
    """Addresses at which other hosts may reach this one, likely ones first.

    Args:
        towards: the address of another host, or of the store, if it is known.
    """
    found = [_address_of(name) for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    found.append(_address_towards(towards) if towards else None)
    with suppress(OSError):
        found += [str(row[4][0]) for row in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys([address for address in (*found, "127.0.0.1") if address]))


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial, suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(trial.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _address_towards(other: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial, suppress(OSError):
        trial.connect((other, 9))
        return str(trial.getsockname()[0])
    return None
