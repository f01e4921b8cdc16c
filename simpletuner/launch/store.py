"""Key-value store for launchers, ranks and the nodes of `nfs check`, with signed messages.

There are two stores: torch's, served by machine 0 over TCP, and a shared folder (`tools/nfs/workspace.py`).
torch's has no authentication. So every message is validated: JSON of the expected form, and, if this machine
has a secret, a signature (HMAC-SHA256 over run, key and text). Everything else counts as absent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from simpletuner.errors import EnvironmentNotReady, SettingsError

if TYPE_CHECKING:
    from torch.distributed import Store as AnyTorchStore

Message = TypeVar("Message")
Parser = Callable[[Mapping[str, object]], Message | None]
"""Turns a JSON object into a message; None if it is not one."""

# Environment variable with the secret itself; the setting run_secret_file names a file with it.
SECRET = "SIMPLETUNER_RUN_SECRET"
# Least length of a secret: shorter ones can be guessed.
SECRET_CHARACTERS = 16
# Attempts to rewrite a key that somebody else overwrites; doing so all the time prevents the run.
ATTEMPTS = 10


class Store(Protocol):
    """A key-value store that several processes share."""

    def set(self, key: str, value: str) -> None:
        """Write a value, replacing an earlier one."""
        ...

    def existing(self, keys: Collection[str]) -> set[str]: ...

    def all_exist(self, keys: Collection[str]) -> bool:
        """True if all keys exist, by a single request."""
        ...

    def get(self, keys: Sequence[str]) -> list[bytes]: ...

    def compare_set(self, key: str, expected: bytes, desired: str) -> bytes:
        """Write a value if the present one is `expected` (empty: none); return the value then held."""
        ...


class TorchStore:
    """A store of torch.distributed. All methods raise DistError when the connection to it is lost."""

    def __init__(self, store: AnyTorchStore) -> None:
        self.store = store

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def existing(self, keys: Collection[str]) -> set[str]:
        if self.all_exist(keys):  # the usual case: one request for all
            return set(keys)
        return {key for key in keys if self.store.check([key])} if len(keys) > 1 else set()

    def all_exist(self, keys: Collection[str]) -> bool:
        return self.store.check(list(keys))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return self.store.multi_get(list(keys)) if keys else []

    def compare_set(self, key: str, expected: bytes, desired: str) -> bytes:
        return self.store.compare_set(key, expected, desired)  # pyright: ignore[reportArgumentType] (takes bytes, too)


class MessageSigner:
    """Signs and verifies texts. Without a secret, only unsigned messages are accepted."""

    def __init__(self, secret: bytes = b"") -> None:
        self.secret = secret

    def for_run(self, nonce: str) -> MessageSigner:
        # A message that was recorded in another run is rejected.
        return MessageSigner(hmac.digest(self.secret, nonce.encode(), hashlib.sha256)) if self.secret else self

    def encode(self, key: str, values: Mapping[str, object]) -> str:
        # The key is signed too: a message is not valid under another key.
        text = json.dumps(values)
        return json.dumps({"text": text, "signature": self._signature(key, text)})

    def decode(self, key: str, message: bytes) -> dict[str, Any] | None:
        """Verify and decode a message; None if it is not valid."""
        try:
            outer = json.loads(message)
            text, signature = outer["text"], outer["signature"]
            if hmac.compare_digest(signature.encode(), self._signature(key, text).encode()):
                values = json.loads(text)
                return {str(name): value for name, value in values.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # all that hostile input raises
            pass
        return None

    def _signature(self, key: str, text: str) -> str:
        if not self.secret:
            return ""
        return hmac.new(self.secret, f"{len(key)}:{key}{text}".encode(), hashlib.sha256).hexdigest()


class MessageStore:
    def __init__(self, store: Store, signer: MessageSigner | None = None) -> None:
        self.store, self.signer = store, signer or MessageSigner()
        self.rejected_key = ""
        """The key of the first message that was not valid."""

    def for_run(self, nonce: str) -> MessageStore:
        return MessageStore(self.store, self.signer.for_run(nonce))

    def write(self, key: str, values: Mapping[str, object]) -> None:
        self.store.set(key, self.signer.encode(key, values))

    def read(self, key: str, parse: Parser[Message]) -> Message | None:
        """Read one message; None if there is no valid one."""
        return self.read_all([key], parse).get(key)

    def read_all(self, keys: Collection[str], parse: Parser[Message]) -> dict[str, Message]:
        existing = self.store.existing(keys)
        present = [key for key in keys if key in existing]
        values = dict(zip(present, self.store.get(present), strict=True))
        decoded = {key: self._decode(key, value, parse) for key, value in values.items()}
        return {key: message for key, message in decoded.items() if message is not None}

    def put_first(self, key: str, values: Mapping[str, object], parse: Parser[Message]) -> Message:
        """Write a message unless a valid one exists; return the one in effect. Overwrites invalid ones."""
        mine, present = self.signer.encode(key, values), b""
        for _ in range(ATTEMPTS):
            holder = self.store.compare_set(key, present, mine)
            if (found := self._decode(key, holder, parse)) is not None:
                return found
            present = holder
        raise EnvironmentNotReady(
            f"somebody else writes to `{key}` in the store of this run", "use a network that you trust"
        )

    def _decode(self, key: str, value: bytes, parse: Parser[Message]) -> Message | None:
        values = self.signer.decode(key, value)
        if values is None:
            self.rejected_key = self.rejected_key or key
            return None
        return parse(values)


def message_signer(run_secret_file: Path | None, environment: Mapping[str, str] = os.environ) -> MessageSigner:
    """Make the signer of the secret in the environment or in a file, which must be readable for its owner
    alone.

    Raises SettingsError where it is not, and where the secret is short enough to be guessed.
    """
    secret, place = environment.get(SECRET, "").strip(), SECRET
    if not secret and run_secret_file is not None:
        secret, place = read_secret(run_secret_file), str(run_secret_file)
        if not secret:
            raise SettingsError(f"run_secret_file {place} is empty", f"make one: openssl rand -hex 32 > {place}")
    if secret and len(secret) < SECRET_CHARACTERS:
        raise SettingsError(
            f"the run secret in {place} has {len(secret)} characters; at least {SECRET_CHARACTERS} are needed",
            "make one with `openssl rand -hex 32`",
        )
    return MessageSigner(secret.encode())


def read_secret(path: Path) -> str:
    """Read a secret. Raises SettingsError when the file cannot be read, or when others can read it."""
    try:
        descriptor = os.open(path.expanduser(), os.O_RDONLY | os.O_NONBLOCK)  # opening a FIFO waits for a writer
        with os.fdopen(descriptor, encoding="utf-8") as file:
            mode = os.fstat(descriptor).st_mode  # of the open file: the path may be replaced meanwhile
            if not stat.S_ISREG(mode):
                raise SettingsError(f"run_secret_file {path} is not a regular file", "write the secret into a file")
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise SettingsError(f"run_secret_file {path} can be read by others", f"chmod 600 {path}")
            return file.read().strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise SettingsError(f"run_secret_file {path} cannot be read: {reason}", "name a file with one line") from None


def sanitize(text: object) -> str:
    """Remove from another machine's text what could control a terminal, or pass for a line of its own."""
    lines = str(text).splitlines()
    return "\n  ".join("".join(c if c.isprintable() else "?" for c in line).strip() for line in lines)
