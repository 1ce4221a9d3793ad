"""The job's credentials, known to its nodes alone: a secret, and a certificate with its key.

The launcher makes them once.

It travels by the launcher's own channel (an environment variable, ssh's standard input), never over the nodes'
connections. The certificate carries no name: each side shows it and takes no other, so it is the job's, whatever a
host is called.
"""

from __future__ import annotations

import base64
import datetime
import hmac
import os
from dataclasses import dataclass, field

import msgspec

from multiverso.errors import StartupError

_SECRET_BYTES = 32
_LONGEST_TEXT = 16_384
# any time: a host's clock may be wrong, and the key goes with the job
_VALID = (datetime.datetime(2000, 1, 1), datetime.datetime(2999, 1, 1))
MISSING = (
    "connections between hosts are encrypted with pyOpenSSL, which is not installed here: "
    'pip install "multiverso[hosts]" on every host, or start with --insecure-fabric on a network that you trust'
)


@dataclass(frozen=True)
class Credentials:
    """A job's, the same on all of its hosts.

    Attributes:
        secret: what each side of a connection proves to know.
        certificate: PEM; empty where nothing is encrypted.
        key: PEM; empty where nothing is encrypted.
    """

    secret: bytes = field(repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)

    @property
    def encrypted(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.key)

    def to_text(self) -> str:
        """Returns it as one line of text, as an environment variable carries it."""
        return base64.b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def from_text(cls, text: str) -> Credentials:
        """The inverse of `to_text`.

        Raises:
            StartupError: it is damaged, or what it needs is not installed here.
        """
        text = text.strip()
        try:
            if len(text) > _LONGEST_TEXT:
                raise ValueError("it is too long")
            made = msgspec.json.decode(base64.b64decode(text, validate=True), type=cls)
            if len(made.secret) < _SECRET_BYTES or bool(made.certificate) != bool(made.key):
                raise ValueError("a part is missing")
        except (ValueError, msgspec.MsgspecError) as error:
            raise StartupError(
                f"the job's credentials are damaged ({error}); pass them on unchanged from where the job was started"
            ) from error
        if made.encrypted:
            check_installed()
        return made


def new_credentials(encrypted: bool = True) -> Credentials:
    """Makes a job's credentials.

    Args:
        encrypted: False for a network that is trusted: connections still prove that they know the secret.

    Raises:
        StartupError: pyOpenSSL is not installed.
    """
    return _made(os.urandom(_SECRET_BYTES), os.urandom(_SECRET_BYTES), encrypted)


def derived_credentials(known: str, job: str, encrypted: bool = True) -> Credentials:
    """Makes a job's credentials on each of its hosts by itself: where nothing carries them from one to the others.

    The same arguments give the same bytes anywhere; what the network sees of one job says nothing of another's.

    Args:
        known: what only this user knows, on all hosts.
        job: what tells this job from all others of this user.
        encrypted: as for `new_credentials`.

    Raises:
        StartupError: pyOpenSSL is not installed.
    """
    secret, seed = (
        hmac.new(known.encode(), f"multiverso {part}\0{job}".encode(), "sha256").digest() for part in ("secret", "key")
    )
    return _made(secret, seed, encrypted)


def _made(secret: bytes, seed: bytes, encrypted: bool) -> Credentials:
    """Ed25519, as its signatures have no random part: the same seed makes the same certificate."""
    if not encrypted:
        return Credentials(secret)
    check_installed()
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.x509.oid import NameOID

    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "multiverso job")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_VALID[0])
        .not_valid_after(_VALID[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    return Credentials(
        secret,
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def check_installed() -> None:
    """Raises StartupError, with what to do, where pyOpenSSL is missing."""
    try:
        import OpenSSL.SSL  # noqa: F401
    except ImportError as error:
        raise StartupError(f"{MISSING} ({error})") from error
