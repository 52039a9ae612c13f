"""The key that the user copies from the host to a machine that joins, and its TLS certificate."""

import base64
import hashlib
import os
import secrets
import ssl
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from .. import system
from ..protocol.errors import ConfigError

SECRET_BYTES, FINGERPRINT_BYTES = 16, 32
CERTIFICATE, PRIVATE_KEY, SECRET = "certificate.pem", "private-key.pem", "secret"


@dataclass(frozen=True)
class Key:
    """Credentials of a machine to join: they authenticate the host to it, and it to the host."""

    fingerprint: bytes             # SHA-256 of the host's certificate
    secret: bytes = field(repr=False)                          # not in tracebacks and logs

    @property
    def text(self):
        return base64.urlsafe_b64encode(self.fingerprint + self.secret).decode()


def read_key(text):
    """Parse the Key that a user has pasted. Raises ConfigError for other text."""
    try:
        raw = base64.urlsafe_b64decode(text)
    except ValueError:
        raw = b""
    if len(raw) != FINGERPRINT_BYTES + SECRET_BYTES:
        raise ConfigError(f"Copy the whole key again, which has 64 characters: python -m xdit_backend key shows it on "
                          f"the machine with ComfyUI. These {len(text)} characters are not a key.")
    return Key(raw[:FINGERPRINT_BYTES], raw[FINGERPRINT_BYTES:])


def key_folder(comfyui):
    """Folder of the key in ComfyUI's default user folder."""
    return Path(comfyui) / "user" / "xdit" / "machines"


def identity(folder):
    """Read the host's Key, with its certificate and secret, from a private folder, after creating it if necessary.

    Raises ConfigError without openssl.
    """
    folder = Path(folder)
    try:
        return _identity(folder)
    except OSError as error:
        raise ConfigError(f"Allow this user to write to {folder}, and free some space there: the key for other "
                          f"machines to join cannot be stored ({error}).") from error


def _identity(folder):
    system.make_private(folder, parents=True)
    system.restrict(folder)
    if not all((folder / name).is_file() for name in (CERTIFICATE, PRIVATE_KEY, SECRET)):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                   "-days", "36500",
                   "-subj", "/CN=xdit", "-keyout", str(folder / PRIVATE_KEY), "-out", str(folder / CERTIFICATE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, umask=0o077)
        except FileNotFoundError:
            raise ConfigError("Install openssl, such as with apt install openssl: other machines join over TLS, and "
                              "openssl, which creates the certificate, is not installed.") from None
        except (subprocess.SubprocessError, OSError) as error:
            raise ConfigError(f"openssl could not create a certificate for other machines to join: "
                              f"{getattr(error, 'stderr', None) or error}") from error
        # on a full disk the file would be too short, and a secret that others could guess
        unfinished = folder / f"{SECRET}.new"
        with open(unfinished, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        unfinished.replace(folder / SECRET)
    return _read(folder)


def read_identity(folder):
    """Read the Key of a folder; None if there is none. Raises ConfigError if this user may not read it."""
    try:
        return _read(Path(folder))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Run this as the user who runs ComfyUI: the key in {folder} cannot be read "
                          f"({error}).") from error


def _read(folder):
    certificate = ssl.PEM_cert_to_DER_cert((folder / CERTIFICATE).read_text())
    return Key(hashlib.sha256(certificate).digest(), (folder / SECRET).read_bytes())


def server_context(folder):
    """TLS context of the host's Listener, with the certificate in the folder of `identity`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(Path(folder) / CERTIFICATE, Path(folder) / PRIVATE_KEY)
    context.num_tickets = 0                                    # a peer that only sends would never read them
    return context
