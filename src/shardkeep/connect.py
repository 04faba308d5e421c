"""TCP connections of our own between the ranks of a load: a message is the number of a read and its bytes.

In: addresses that ranks exchange over our store. Out: `Inbox` hands incoming messages to any number of
threads, a message to one thread; `Outbox` sends them, a message at a time per peer. A connection has one
direction and is opened by its sender at the first message. `close` ends every call that waits in it.

Why not a gloo group: it connects all ranks with all, a wait in it cannot be given up when another rank has
failed without waiting for its time-out, a time-out shorter than that breaks the group, and it may be used by
one thread only. On one host these sockets moved 1.15 times the bytes of gloo's send and recv.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

_HELLO = struct.Struct("<16sq")  # the receiver's token, the sender's rank
_NUMBER = struct.Struct("<q")
_HELLO_S = 5.0
_ACCEPTED = b"k"


class PeerGone(Exception):
    """A rank closed its connection or cannot be reached. Internal: it has died, or its own error says why."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank = rank
        self.why = why


class Incoming:
    """One connection from a rank."""

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self.sock = sock

    def number(self) -> int:
        """The number at the head of a message."""
        head = bytearray(_NUMBER.size)
        self.fill(memoryview(head))
        return int(_NUMBER.unpack(head)[0])

    def fill(self, into: memoryview, moved: Callable[[int], None] = lambda n: None) -> None:
        """The next bytes; `moved` is told of each part."""
        at = 0
        while at < len(into):
            try:
                got = self.sock.recv_into(into[at:])
            except OSError as e:
                raise PeerGone(self.rank, str(e)) from e
            if not got:
                raise PeerGone(self.rank, "it closed its connection")
            at += got
            moved(got)


class Inbox:
    """Where other ranks connect to. Each connection is handed out to one thread at a time."""

    def __init__(self) -> None:
        self._token = os.urandom(16)
        self._dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if self._dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=self._dual, backlog=128)
        self._from: dict[int, Incoming] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)  # stays ready, for all threads, until `reset`
        self._poll.register(self._server, select.EPOLLIN | select.EPOLLONESHOT)

    def card(self, hosts: list[str]) -> list[Any]:
        """What a sender must know."""
        return [hosts, self._server.getsockname()[1], self._token]

    def next(self) -> Incoming | None:
        """A connection on which a message begins, the caller's until `again`; None once `wake` was called."""
        while True:
            for fd, _ in self._poll.poll(maxevents=1):
                if fd == self._wake:
                    return None
                if fd != self._server.fileno():
                    return self._from[fd]
                self._accept()
                self._arm(fd)

    def again(self, incoming: Incoming) -> None:
        """The message is read; any thread may have the next one."""
        self._arm(incoming.sock.fileno())

    def _arm(self, fd: int) -> None:
        self._poll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _accept(self) -> None:
        """Take a connection if it begins as ours do; strangers are hung up on."""
        sock, _ = self._server.accept()
        try:
            sock.settimeout(_HELLO_S)
            token, rank = _HELLO.unpack(sock.recv(_HELLO.size, socket.MSG_WAITALL))
            if not hmac.compare_digest(token, self._token):
                raise ConnectionRefusedError
            sock.sendall(_ACCEPTED)
            sock.settimeout(None)
        except (OSError, struct.error):
            sock.close()
            return
        self._from[sock.fileno()] = Incoming(sock, rank)
        self._poll.register(sock, select.EPOLLIN | select.EPOLLONESHOT)

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def reset(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def shut(self) -> None:
        """End the calls that wait on a connection."""
        for incoming in list(self._from.values()):
            _shut(incoming.sock)

    def close(self) -> None:
        """After all threads have left."""
        for incoming in self._from.values():
            incoming.sock.close()
        self._poll.close()
        self._server.close()
        os.close(self._wake)


class Outbox:
    """Connections to other ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._cards: dict[int, list[Any]] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._socks: dict[int, socket.socket] = {}
        self._is_shut = False

    def know(self, cards: Mapping[int, list[Any]]) -> None:
        """Where ranks are; called before any thread sends to them."""
        for rank, card in cards.items():
            self._cards.setdefault(rank, card)
            self._locks.setdefault(rank, threading.Lock())

    def send(self, rank: int, number: int, data: memoryview, moved: Callable[[int], None]) -> None:
        """PeerGone if it does not reach the rank."""
        with self._locks[rank]:
            try:
                sock = self._socks.get(rank) or self._connect(rank)
                sock.sendall(_NUMBER.pack(number), socket.MSG_MORE)
                at = 0
                while at < len(data):
                    sent = sock.send(data[at:])
                    at += sent
                    moved(sent)
            except OSError as e:
                raise PeerGone(rank, str(e)) from e

    def _connect(self, rank: int) -> socket.socket:
        hosts, port, token = self._cards[rank]
        tried = []
        for host in dict.fromkeys(hosts):
            if self._is_shut:
                break
            try:
                sock = _greeted(host, port, _HELLO.pack(token, self._rank))
            except OSError as e:  # not there, or something else listens: the next address
                tried.append(f"{host} ({e})")
                continue
            self._socks[rank] = sock
            if self._is_shut:
                _shut(sock)
            return sock
        raise ConnectionError(f"it cannot be reached on port {port} of {', '.join(tried)}")

    def shut(self) -> None:
        """End the calls that wait on a connection, and let none wait any more."""
        self._is_shut = True
        for sock in list(self._socks.values()):
            _shut(sock)

    def close(self) -> None:
        """After all threads have left."""
        for sock in self._socks.values():
            sock.close()


def _greeted(host: str, port: int, hello: bytes) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=_HELLO_S)
    try:
        sock.sendall(hello)
        if sock.recv(1) != _ACCEPTED:
            raise ConnectionRefusedError("no rank of this job")
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):  # already closed by the peer
        sock.shutdown(socket.SHUT_RDWR)
