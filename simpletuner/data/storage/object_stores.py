"""obstore stores for the buckets of datasets and caches, with their credentials.

A dataset's own credentials come first, as a provider: obstore's settings would mix them with the
environment's, such as the session token of another key. For S3, boto3 finds the others, in the environment
and in the profiles of ~/.aws.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from simpletuner.data.config.places import AzurePlace, BucketPlace, GcsPlace, S3Place
from simpletuner.errors import EnvironmentNotReady

if TYPE_CHECKING:
    from obstore.store import (
        AzureConfig,
        AzureCredential,
        AzureCredentialProvider,
        ClientConfig,
        GCSConfig,
        RetryConfig,
        S3Config,
        S3Credential,
        S3CredentialProvider,
    )


def region_and_credentials(place: S3Place) -> tuple[str | None, S3CredentialProvider | None]:
    """Region and credentials of an AWS profile; None where obstore finds them. Raises EnvironmentNotReady."""
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
    # A provider, since obstore's config would add the environment's session token to the dataset's key.
    credential: S3Credential = {
        "access_key_id": key.get_secret_value(),
        "secret_access_key": secret.get_secret_value(),
        "token": token.get_secret_value() if token else None,
        "expires_at": None,
    }
    return lambda: credential


Store = S3Store | GCSStore | AzureStore

RETRIES: RetryConfig = {
    "max_retries": 100,  # obstore's 10 are over in 2 s; a store that throttles needs longer
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}
NAMES_REGION = {"AWS_REGION", "AWS_DEFAULT_REGION"}


def open_store(place: BucketPlace) -> tuple[Store, str]:
    """Return the store of a folder in a bucket, and the host, for messages; nothing is asked of the server
    yet.

    Raises EnvironmentNotReady where credentials are missing or cannot be read.
    """
    if isinstance(place, S3Place):
        return open_s3(place)
    if isinstance(place, GcsPlace):
        return open_gcs(place)
    assert isinstance(place, AzurePlace)
    return open_azure(place)


def open_s3(place: S3Place) -> tuple[Store, str]:
    profile_region, provider = region_and_credentials(place)
    given = endpoint_of(place.aws_endpoint_url, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    # obstore's `endpoint` would lose against AWS_ENDPOINT_URL_S3 of the environment.
    config: S3Config = {"aws_endpoint_url_s3": given} if given else {}
    # obstore removes a single object by POST ?delete, which Google's and others' S3 endpoints lack, and
    # JuiceFS answers without the key (arrow-rs-object-store #731).
    config["disable_bulk_delete"] = True
    if region := place.aws_region_name or (profile_region if not NAMES_REGION & {*os.environ} else None):
        config["region"] = region
    return build(S3Store, place, given, config=config, credential_provider=provider), host_of(given, "AWS")


def open_gcs(place: GcsPlace) -> tuple[Store, str]:
    given = endpoint_of(place.gcs_endpoint_url, "GOOGLE_BASE_URL")
    config: GCSConfig = {"base_url": given} if given else {}
    if place.gcs_service_account is not None:
        config["service_account"] = str(place.gcs_service_account)
    return build(GCSStore, place, given, config=config), host_of(given, "Google")


def open_azure(place: AzurePlace) -> tuple[Store, str]:
    # AZURE_STORAGE_ACCOUNT is what Azure's own tools read; obstore knows only the other one.
    names = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    account = place.azure_account_name or next((os.environ[each] for each in names if os.environ.get(each)), "")
    if not account:
        raise EnvironmentNotReady(
            f"{place.owner}: it is not known which storage account has the container `{place.bucket}`",
            "set azure_account_name, or AZURE_STORAGE_ACCOUNT_NAME in the environment",
        )
    given = endpoint_of(place.azure_endpoint_url, "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    config: AzureConfig = {"account_name": account}
    if given:
        config["endpoint"] = given
    provider = azure_provider(place)
    store = build(AzureStore, place, given, config=config, credential_provider=provider)
    return store, host_of(given, f"Azure, account {account}")


def azure_provider(place: AzurePlace) -> AzureCredentialProvider | None:
    """Credentials of an Azure dataset; None where obstore finds them."""
    credential: AzureCredential
    if place.azure_access_key:
        credential = {"access_key": place.azure_access_key.get_secret_value(), "expires_at": None}
    elif place.azure_sas_token:
        credential = {"sas_token": place.azure_sas_token.get_secret_value(), "expires_at": None}
    else:
        return None
    return lambda: credential


def build(kind: Callable[..., Store], place: BucketPlace, endpoint: str, **settings: Any) -> Store:
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http:"),
        "connect_timeout": "5s",
        "read_timeout": "30s",
        "timeout": "1h",  # of a whole body, which may be 1 GiB on a slow line; `read_timeout` ends what stalls
        "pool_max_idle_per_host": str(place.concurrent_reads),
    }
    try:
        prefix = place.prefix or None
        return kind(place.bucket, prefix=prefix, client_options=client, retry_config=RETRIES, **settings)
    except BaseError:  # its text may quote a key that does not parse
        raise EnvironmentNotReady(
            f"{place.owner}: its credentials for {place.address} cannot be read",
            f"check {place.service.credentials}, or what takes their place: docs/tables-and-stores.md lists the places",
        ) from None


def endpoint_of(given: str | None, *variables: str) -> str:
    return given or next((os.environ[name] for name in variables if os.environ.get(name)), "")


def host_of(endpoint: str, otherwise: str) -> str:
    return urlsplit(endpoint).netloc.rpartition("@")[2] if endpoint else otherwise
