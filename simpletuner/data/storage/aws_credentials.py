"""Credentials for a bucket: from the dataset, the environment, or a profile in ~/.aws.

obstore itself knows the environment, web identities, containers and instance metadata, but not the files of a profile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.data.config.object_store_keys import S3Place
from simpletuner.errors import EnvironmentNotReady

if TYPE_CHECKING:
    from obstore.store import S3Credential, S3CredentialProvider


def credential_provider(place: S3Place, profile: Mapping[str, str]) -> S3CredentialProvider | None:
    """Return what gives obstore its credentials, or None where it looks for them itself."""
    if place.aws_access_key_id and place.aws_secret_access_key:
        token = place.aws_session_token.get_secret_value() if place.aws_session_token else None
        key, secret = (each.get_secret_value() for each in (place.aws_access_key_id, place.aws_secret_access_key))
        return fixed_credential(key, secret, token)
    key, secret = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
    if key and secret and "AWS_ACCESS_KEY_ID" not in os.environ:
        return fixed_credential(key, secret, profile.get("aws_session_token"))
    return None


def fixed_credential(key: str, secret: str, token: str | None) -> S3CredentialProvider:
    # A provider instead of obstore's config, which would add the environment's session token to the dataset's key.
    credential: S3Credential = {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": None}
    return lambda: credential


def read_profile(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what ~/.aws says of the profile that AWS_PROFILE names. Raises EnvironmentNotReady for a damaged file."""
    name = environment.get("AWS_PROFILE", "default")
    values: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        path = Path(environment.get(variable) or f"~/.aws/{file}").expanduser()
        parser = ConfigParser(interpolation=None)
        try:
            parser.read(path, encoding="utf-8")
        except (ConfigError, UnicodeDecodeError):  # their messages quote the line, which may be the secret
            hint = f"correct it, or name another file in {variable}"
            raise EnvironmentNotReady(f"{path} does not parse", hint) from None
        values |= parser[section] if parser.has_section(section) else {}
    return values
