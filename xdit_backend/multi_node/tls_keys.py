"""The key that the user copies from the host to a machine that joins, and its TLS certificate."""

import base64
import datetime
import hashlib
import os
import secrets
import shutil
import ssl
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from .. import system
from ..protocol.errors import ConfigError

SECRET_BYTES, FINGERPRINT_BYTES = 16, 32
CERTIFICATE, PRIVATE_KEY, SECRET = "certificate.pem", "private-key.pem", "secret"
COMMON_NAME, DAYS = "xdit", 36500          # of the certificate


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

    Raises ConfigError without openssl and the package cryptography.
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
        if shutil.which("openssl") is None:
            _create_with_cryptography(folder)
        else:
            _create_with_openssl(folder)
        # on a full disk the file would be too short, and a secret that others could guess
        unfinished = folder / f"{SECRET}.new"
        with open(unfinished, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        unfinished.replace(folder / SECRET)
    return _read(folder)


def _create_with_openssl(folder):
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
               "-days", str(DAYS), "-subj", f"/CN={COMMON_NAME}", "-keyout", str(folder / PRIVATE_KEY),
               "-out", str(folder / CERTIFICATE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, umask=0o077)
    except (subprocess.SubprocessError, OSError) as error:
        raise ConfigError(f"openssl could not create a certificate for other machines to join: "
                          f"{getattr(error, 'stderr', None) or error}") from error


def _create_with_cryptography(folder):
    """Create the certificate with the package cryptography: Windows has no openssl."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError("Install openssl, such as with apt install openssl, or on Windows the package cryptography "
                          "(python -m pip install cryptography): other machines join over TLS, and neither, which "
                          "creates the certificate, is installed.") from None
    private_key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, COMMON_NAME)])
    certificate = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(private_key.public_key())
                   .serial_number(x509.random_serial_number()).not_valid_before(now)
                   .not_valid_after(now + datetime.timedelta(days=DAYS)).sign(private_key, hashes.SHA256()))
    encoded = {PRIVATE_KEY: private_key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                                      serialization.NoEncryption()),
               CERTIFICATE: certificate.public_bytes(serialization.Encoding.PEM)}
    for file_name, content in encoded.items():
        with open(folder / file_name, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(content)


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
