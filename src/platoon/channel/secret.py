"""The secret of a job, and how a worker comes by it.

Whoever knows it may talk to the controller. The workers that a controller starts have it in their environment
(``PLATOON_SECRET``, which other users cannot read). Those that are started by hand read it from a file of mode
0600 that the controller writes for its port, in a directory of the user's own; so they need no argument.

The secret itself never travels: a worker shows a password derived from it and the port, and each answer and
minibatch has a proof over what the worker has made up. So a program of somebody else that took the port of a
controller learns nothing that opens another port, and cannot pass for the controller.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
from pathlib import Path

from platoon.util import PlatoonError

VARIABLE = "PLATOON_SECRET"
PROOF_BYTES = 32
_BYTES = 32


class Secret:
    """A job's secret.

    Args:
        key: its bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._keyed = hashlib.blake2b(key=hashlib.blake2b(key).digest(), digest_size=PROOF_BYTES)

    @classmethod
    def make(cls) -> Secret:
        """Returns the one that the environment has, or a new one."""
        return cls.of_environment() or cls(secrets.token_bytes(_BYTES))

    @classmethod
    def of_environment(cls) -> Secret | None:
        """Returns the secret that the environment has, or None.

        Raises:
            PlatoonError: it is too short, or no hexadecimal number.
        """
        text = os.environ.get(VARIABLE)
        return None if text is None else cls._read(text, f"the environment variable {VARIABLE}")

    @classmethod
    def _read(cls, text: str, where: str) -> Secret:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) < _BYTES:
            raise PlatoonError(
                f"{where} has no secret: expected at least {2 * _BYTES} hexadecimal digits, got {len(text)} "
                "characters"
            )
        return cls(key)

    @property
    def text(self) -> str:
        """The secret as an environment variable or a file has it."""
        return self._key.hex()

    def password(self, channel: str, port: int) -> bytes:
        """Returns what opens a port, of the channel ``"control"`` or ``"data"``.

        It opens no other port, and the secret cannot be told from it.
        """
        return self._digest(f"password {channel} {port}".encode()).hex().encode()

    def proof(self, nonce: bytes) -> bytes:
        """Returns what only somebody who has the secret can answer to ``nonce``."""
        return self._digest(b"proof " + nonce)

    def _digest(self, text: bytes) -> bytes:
        # BLAKE2 with a key is a MAC (RFC 7693, section 2.9), in a third of an HMAC's time.
        digest = self._keyed.copy()
        digest.update(text)
        return digest.digest()


class SecretFile:
    """The file in which a controller leaves the secret for workers that are started by hand.

    It is locked for as long as its controller lives, so that one whose controller was killed is known for what
    it is: no worker reads it, and the next controller removes it.

    Raises:
        PlatoonError: there can be no such file.
    """

    def __init__(self, secret: Secret, port: int) -> None:
        directory = _directory()
        _remove_abandoned(directory)
        self._path = _path(port)
        draft = directory / f".{secrets.token_hex(8)}"
        self._descriptor = os.open(
            draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, secret.text.encode())
            draft.replace(self._path)
        except OSError as error:
            os.close(self._descriptor)
            draft.unlink(missing_ok=True)
            raise PlatoonError(f"cannot leave the secret for workers in {self._path}", error) from error

    def remove(self) -> None:
        """Removes the file."""
        try:
            if os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                self._path.unlink()
        except FileNotFoundError:
            pass
        os.close(self._descriptor)


def find_secret(port: int) -> Secret | None:
    """Returns the secret of the controller on a port of this host: from the environment, or from its file.

    Raises:
        PlatoonError: where the file should be is something that another user could have made.
    """
    secret = Secret.of_environment()
    if secret is not None:
        return secret
    directory = directory_of_secrets()
    if not os.path.lexists(directory):
        return None
    _check_own(directory, os.lstat(directory), stat.S_ISDIR)
    path = _path(port)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor) as file:
        _check_own(path, os.fstat(file.fileno()), stat.S_ISREG)
        return None if _abandoned(file.fileno()) else Secret._read(file.read(1024), str(path))


def where_secrets_are(port: int) -> str:
    """Returns in words where a worker looks for a controller's secret."""
    return f"{VARIABLE} in the environment, or else the file {_path(port)}"


def directory_of_secrets() -> Path:
    """Returns the user's directory of secrets; not by TMPDIR or HOME, which differ between terminals."""
    return Path(f"/tmp/platoon-{os.geteuid()}")


def _path(port: int) -> Path:
    # Containers may share /tmp and have ports of their own.
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        network = 0
    return directory_of_secrets() / f"port-{port}-{network}"


def _directory() -> Path:
    directory = directory_of_secrets()
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    _check_own(directory, os.lstat(directory), stat.S_ISDIR)
    return directory


def _check_own(path: Path, status: os.stat_result, is_kind: object) -> None:
    assert callable(is_kind)
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PlatoonError(
            f"{path} belongs to user {status.st_uid} and has mode {status.st_mode & 0o7777:o}, so its secrets "
            f"cannot be trusted; remove it, or set {VARIABLE} to {2 * _BYTES} hexadecimal digits for the "
            "controller and its workers"
        )


def _abandoned(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_abandoned(directory: Path) -> None:
    for path in directory.iterdir():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _abandoned(descriptor) and os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                path.unlink()
        except OSError:
            pass
        finally:
            os.close(descriptor)
