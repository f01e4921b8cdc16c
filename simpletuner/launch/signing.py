"""What machines write into the store for one another: JSON, signed where the run has a secret.

torch's store asks nobody for a password. So what is read there is checked: it must be JSON of the expected form, and
carry a signature (HMAC-SHA256 over run, key and text) if this machine has a secret. All else counts as absent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.errors import SettingsError

SECRET = "SIMPLETUNER_RUN_SECRET"
"""Variable with the secret itself; the setting run_secret_file names a file with it."""
ENOUGH_CHARACTERS = 16


class MessageSigner:
    """Sign and check messages; an empty secret signs nothing, and accepts only what is not signed."""

    def __init__(self, secret: bytes = b"") -> None:
        self.secret = secret
        self.ignored = ""
        """The key of the first message that was not accepted."""

    def for_run(self, nonce: str) -> MessageSigner:
        """Return a seal for one run, so that nothing recorded in another one is accepted."""
        return MessageSigner(hmac.digest(self.secret, nonce.encode(), hashlib.sha256)) if self.secret else self

    def write(self, key: str, values: Mapping[str, Any]) -> str:
        """Return a message for a key of the store."""
        text = json.dumps(values)
        return json.dumps({"text": text, "signature": self._signature(key, text)})

    def read(self, key: str, message: bytes) -> dict[str, Any] | None:
        """Return what a message says; None if it is none of this run's."""
        try:
            outer = json.loads(message)
            text, signature = outer["text"], outer["signature"]
            if hmac.compare_digest(signature.encode(), self._signature(key, text).encode()):
                values = json.loads(text)
                return {str(name): value for name, value in values.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        self.ignored = self.ignored or key
        return None

    def _signature(self, key: str, text: str) -> str:
        if not self.secret:
            return ""
        return hmac.new(self.secret, f"{len(key)}:{key}{text}".encode(), hashlib.sha256).hexdigest()


def message_signer(run_secret_file: Path | None, environment: Mapping[str, str] = os.environ) -> MessageSigner:
    """Return the seal of the secret in the environment or in a file; the file must be readable for its owner alone.

    Raises SettingsError where it is not, and where the secret is short enough to be guessed.
    """
    secret, place = environment.get(SECRET, "").strip(), SECRET
    if not secret and run_secret_file is not None:
        secret, place = secret_in(run_secret_file), str(run_secret_file)
        if not secret:
            raise SettingsError(f"run_secret_file {place} is empty", f"make one: openssl rand -hex 32 > {place}")
    if secret and len(secret) < ENOUGH_CHARACTERS:
        raise SettingsError(
            f"the run secret in {place} has {len(secret)} characters; at least {ENOUGH_CHARACTERS} are needed",
            "make one with `openssl rand -hex 32`",
        )
    return MessageSigner(secret.encode())


def secret_in(path: Path) -> str:
    """Return the secret in a file. Raises SettingsError when it cannot be read, or others can read it."""
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise SettingsError(f"run_secret_file {path} can be read by others", f"chmod 600 {path}")
            return file.read().strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SettingsError(f"run_secret_file {path} cannot be read: {reason}", "name a file with one line") from None


def printable(text: object) -> str:
    """Return text from another machine without what could steer a terminal, or pass for a line of its own."""
    lines = str(text).splitlines()
    return "\n  ".join("".join(c if c.isprintable() else "?" for c in line).strip() for line in lines)
