"""Credentials for S3: those of the dataset, else what boto3 finds in the environment and in the profiles of ~/.aws."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from simpletuner.data.config.object_store_keys import S3Place
from simpletuner.errors import EnvironmentNotReady

if TYPE_CHECKING:
    from obstore.store import S3Credential, S3CredentialProvider


def region_and_credentials(place: S3Place) -> tuple[str | None, S3CredentialProvider | None]:
    """Return what the profile adds to the dataset; None is what obstore finds itself. Raises EnvironmentNotReady."""
    from boto3 import Session  # takes 0.2 s
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = Session()
        region, fixed = session.region_name, fixed_credentials(place)
        # Without a profile boto3 would ask an instance for its role, as obstore does again.
        if fixed or session.profile_name not in session.available_profiles or session.get_credentials() is None:
            return region, fixed
        # boto3 renews what expires within 10 minutes, if it is asked.
        provider = Boto3CredentialProvider(session, ttl=timedelta(minutes=5))
    except (BotoCoreError, OSError, ValueError) as error:  # the last two by `credential_process`
        reason, hint = (
            " ".join(str(error).split()),
            "correct the files in ~/.aws, or name another profile in AWS_PROFILE",
        )
        raise EnvironmentNotReady(f"{place.owner}: its AWS profile cannot be used: {reason}", hint) from None
    return region, lambda: provider()  # obstore would take its region before that of AWS_REGION


def fixed_credentials(place: S3Place) -> S3CredentialProvider | None:
    key, secret, token = place.aws_access_key_id, place.aws_secret_access_key, place.aws_session_token
    if not (key and secret):
        return None
    # A provider instead of obstore's config, which would add the environment's session token to the dataset's key.
    credential: S3Credential = {
        "access_key_id": key.get_secret_value(),
        "secret_access_key": secret.get_secret_value(),
        "token": token.get_secret_value() if token else None,
        "expires_at": None,
    }
    return lambda: credential
