"""Authentication by ZeroMQ's CURVE: folders of keys, the authenticator at the learner's socket, the monitor of handshakes.

Each process is given one folder, a policy server one for each of its two sides. The learner's holds its secret key and a public
key of every worker that may connect; a worker's holds its own secret key and the learner's public one:

    learner/  learner.key_secret  NAME.key ...
    NAME/     worker.key_secret     learner.key

Files are as `zmq.auth` writes and reads them. A secret is in its file and in the socket that uses it: never in an error, a
log line, a setting, or the text of an object.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from common.errors import ConfigError, HandshakeFailure, ResourceError
from common.transport.api import Handshakes

LEARNER: Final = "learner"
WORKER: Final = "worker"
SECRET: Final = ".key_secret"  # noqa: S105  the end of a name
PUBLIC: Final = ".key"

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Of the folder of a worker's keys."""

DOMAIN: Final = b"rookery"
"""Name of the learner's socket in ZeroMQ's authentication protocol."""

Key: TypeAlias = bytes
"""32 bytes in the 40 characters of Z85."""

_FIX: Final = "`rookery keys DIRECTORY` makes folders of keys"
_OF_OTHERS: Final = stat.S_IRWXO | stat.S_IWGRP
"""A group may read: Kubernetes mounts a secret for a user other than root that way."""


# -- folders of keys -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """Keys of the socket of a learner or policy server."""

    public: Key
    secret: Key = field(repr=False)
    allowed: Mapping[str, Key]  # public keys of the workers that may connect, by the names of their files

    @classmethod
    def of(cls, folder: str) -> ServerKeys | None:
        """Those in `folder`, None where none is named. Raises `ConfigError` where they cannot be read or used."""
        if not folder:
            return None
        public, secret = _secret_key(Path(folder, LEARNER + SECRET))
        own = LEARNER + PUBLIC  # ZeroMQ's tools write it beside the secret
        allowed = {path.stem: _read(path)[0] for path in sorted(Path(folder).glob(f"*{PUBLIC}")) if path.name != own}
        if not allowed:
            found = f"no file *{PUBLIC} in {folder} other than {own}"
            raise ConfigError("no worker may connect", found=found, wanted="one at least", fix=_FIX)
        return cls(public=public, secret=secret, allowed=allowed)

    @property
    def options(self) -> dict[zmq.SocketOption, int | bytes]:
        """Return the options to set before it binds. ENFORCE_DOMAIN: without an authenticator no connection is accepted."""
        return {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: self.secret,
            zmq.ZAP_DOMAIN: DOMAIN,
            zmq.ZAP_ENFORCE_DOMAIN: 1,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKeys:
    """Keys of a worker's socket."""

    public: Key
    secret: Key = field(repr=False)
    server: Key  # its public key: a process without the secret one is another server

    @classmethod
    def of(cls, folder: str) -> WorkerKeys | None:
        """Those in `folder`, None where none is named. Raises `ConfigError` where they cannot be read or used."""
        if not folder:
            return None
        public, secret = _secret_key(Path(folder, WORKER + SECRET))
        return cls(public=public, secret=secret, server=_read(Path(folder, LEARNER + PUBLIC))[0])

    @property
    def options(self) -> dict[zmq.SocketOption, int | bytes]:
        """Of the socket, to be set before it connects."""
        return {zmq.CURVE_PUBLICKEY: self.public, zmq.CURVE_SECRETKEY: self.secret, zmq.CURVE_SERVERKEY: self.server}


def _need_curve() -> None:
    if not zmq.has("curve"):
        fix = "install pyzmq from its wheel, or build libzmq with libsodium"
        found = f"libzmq {zmq.zmq_version()} built without it"
        raise ConfigError("keys need CURVE", found=found, wanted="libzmq with CURVE", fix=fix)


def _secret_key(path: Path) -> tuple[Key, Key]:
    public, secret = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OF_OTHERS:
        wanted = "0600, or less"
        raise ConfigError(
            f"secret key is open to others: {path}", found=f"mode {mode:04o}", wanted=wanted, fix=f"chmod 600 {path}"
        )
    if not _is_key(secret) or zmq.curve_public(secret) != public:
        found = "none, or one that is not of the public key beside it" if secret else "a public key alone"
        raise ConfigError(f"no secret key in {path}", found=found, wanted="a pair of keys", fix=_FIX)
    return public, secret


def _read(path: Path) -> tuple[Key, Key]:
    """The public key in a file, and the secret one or nothing."""
    _need_curve()
    try:
        with path.open("rb"):  # its error has the reason, which that of `load_certificate` lacks
            public, secret = load_certificate(path)
    except OSError as error:
        found = f"{error.strerror} at {path}"
        raise ConfigError("key cannot be read", found=found, wanted="a file of a key", fix=_FIX) from error
    except (ValueError, IndexError):  # no line of a key; one without `=`
        public, secret = b"", None
    if not _is_key(public):
        raise ConfigError("file is no key", found=str(path), wanted='a line `public-key = "..."`, 40 characters of Z85', fix=_FIX)
    return public, secret or b""


def _is_key(text: Key) -> bool:
    with suppress(ValueError, KeyError, struct.error):  # a length, a character, a group of five that is too large
        return len(z85.decode(text)) == 32  # noqa: PLR2004  bytes
    return False


def make(folder: Path, workers: Sequence[str]) -> list[Path]:
    """Make a key pair for each of `workers`, and one for the learner where `folder` has none yet; the files that were written.

    Nothing is overwritten. Raises `ConfigError` for a name that cannot be, or keys that are there; `ResourceError`
    where a file cannot be written.
    """
    _need_curve()
    for name in workers:
        if not NAME.fullmatch(name) or name == LEARNER:
            wanted = f"up to 64 letters, digits and _.-, and not {LEARNER}"
            raise ConfigError("no name for a worker's folder of keys", found=repr(name), wanted=wanted)
    home = folder / LEARNER
    own = home / (LEARNER + SECRET)
    written = []
    try:
        for path in (path for name in workers for path in (folder / name, home / (name + PUBLIC))):
            with suppress(FileNotFoundError):  # not `exists`, by which Python 3.14 hides that we may not look
                path.stat()
                fix = "choose another name; to replace a key, make one under a new name first"
                raise ConfigError("keys are never overwritten", found=str(path), wanted="a new name", fix=fix)
        if own.exists():
            learner, _ = _secret_key(own)
        else:
            learner, secret = zmq.curve_keypair()
            written.append(_write(own, "Secret key of the learner: for it alone.", learner, secret))
        for name in workers:
            public, secret = zmq.curve_keypair()
            about = f"worker {name}"
            written.append(_write(folder / name / (WORKER + SECRET), f"Secret key of {about}: for it alone.", public, secret))
            written.append(_write(folder / name / (LEARNER + PUBLIC), "Public key of the learner.", learner))
            written.append(_write(home / (name + PUBLIC), f"Public key of {about}, which may connect.", public))
    except OSError as error:
        denied = isinstance(error, PermissionError)
        fix = "run it as the owner of the folder, or choose another folder" if denied else "choose another folder"
        raise ResourceError("key cannot be written", found=f"{error.strerror} at {error.filename}", fix=fix) from error
    return written


def _write(path: Path, about: str, public: Key, secret: Key = b"") -> Path:
    """Write a new file that is never open to others, as it would be for a time with `zmq.auth.create_certificates`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [f"# {about}", "curve", f'    public-key = "{public.decode()}"']
    lines += [f'    secret-key = "{secret.decode()}"'] if secret else []
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "w") as file:
        file.write("\n".join(lines) + "\n")
    return path


# -- at the socket ---------------------------------------------------------------------------------------------------------


class ZapAuthenticator:
    """Accepts or refuses the key of each connection by ZeroMQ's authentication protocol (ZAP 1.0), in the learner's own thread.

    Without one CURVE would encrypt, and accept any key. Make it before the socket binds.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Iterable[Key]) -> None:
        """For all sockets of `context`. The caller of `answer` waits for `socket` to be readable."""
        self._allowed = frozenset(map(z85.decode, allowed))
        self.refused = ""  # description of the last refused key
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer all that ask now. Does not wait: a handshake that is not answered in time fails, and the worker retries it."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.socket.send_multipart(self._reply(request), zmq.DONTWAIT)

    def close(self) -> None:
        """Accept no connection from now on."""
        self.socket.close()

    def _reply(self, request: list[bytes]) -> list[bytes]:
        version, number, _domain, address, _identity, mechanism, *credentials = request
        if mechanism == b"CURVE" and credentials[0] in self._allowed:
            return [version, number, b"200", b"OK", z85.encode(credentials[0]), b""]  # the last but one: User-Id of each message
        key = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else "none"
        self.refused = f"key {key} of {address.decode(errors='replace')}"
        return [version, number, b"400", b"key not allowed", b"", b""]


FAILED_HANDSHAKE: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_PROTOCOL: Final = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: HandshakeFailure.LEARNER_KEY,
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: HandshakeFailure.MECHANISM,
}


class HandshakeMonitor:
    """Monitor of the handshakes of one socket, with CURVE or without. Make it before the socket binds or connects."""

    def __init__(self, socket: zmq.Socket[bytes], handshakes: Handshakes, explain: Callable[[HandshakeFailure], str]) -> None:
        """Count in `handshakes`. `explain` returns the likely reason of a failure; it is called when `read` finds a failure."""
        self.handshakes = handshakes
        self._explain = explain
        self._watched = socket
        socket.monitor(
            f"inproc://handshakes-{id(self)}", FAILED_HANDSHAKE | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._events = socket.context.socket(zmq.PAIR)
        # No limit: at one ZeroMQ's own thread waits for a reader, and a learner that loads its checkpoint reads nothing.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(f"inproc://handshakes-{id(self)}")

    def read(self) -> list[zmq.Event]:
        """Bring `handshakes` up to now; what happened since the last call: they succeeded or failed, connections ended."""
        events: list[zmq.Event] = []
        while True:
            try:
                event, _endpoint = self._events.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return events
            kind, value = struct.unpack("=Hi", event)
            events.append(zmq.Event(kind))
            if not kind & FAILED_HANDSHAKE:
                continue
            failure = (
                HandshakeFailure.KEY if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH else _PROTOCOL.get(value, HandshakeFailure.BROKEN)
            )
            self.handshakes.failed[failure] += 1
            self.handshakes.detail = self._explain(failure)

    def close(self) -> None:
        """Stop monitoring. To be called before the socket closes."""
        self._watched.disable_monitor()
        self._events.close()
