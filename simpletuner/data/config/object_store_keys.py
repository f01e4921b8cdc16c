"""The keys of a dataset file that say where a bucket is, and with which credentials it is opened, per service."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.data.config.folders import check_id
from simpletuner.settings.declared.knob import Section
from simpletuner.settings.values.buckets import parse_bucket


@dataclass(frozen=True)
class Service:
    """Names of an object store in addresses, keys and hints."""

    name: str
    scheme: str
    keys: str
    """Prefix of its keys."""
    bucket: str
    credentials: str
    place: str
    rights: str
    removal: str
    """The right to remove objects."""


S3 = Service(
    "S3",
    "s3",
    "aws",
    "bucket",
    "aws_access_key_id and aws_secret_access_key",
    "aws_bucket_name, aws_region_name and aws_endpoint_url",
    "s3:ListBucket for the bucket, s3:GetObject for its objects, s3:PutObject for caches, and s3:PutObject and "
    "s3:DeleteObject for mirror_output",
    "s3:DeleteObject",
)
GCS = Service(
    "Google Cloud Storage",
    "gs",
    "gcs",
    "bucket",
    "gcs_service_account",
    "gcs_bucket_name and gcs_endpoint_url",
    "storage.objects.list and storage.objects.get (Storage Object Viewer), for caches and mirror_output also "
    "storage.objects.create and storage.objects.delete (Storage Object User)",
    "storage.objects.delete (Storage Object User)",
)
AZURE = Service(
    "Azure Blob Storage",
    "az",
    "azure",
    "container",
    "azure_account_name, azure_access_key and azure_sas_token",
    "azure_account_name, azure_container_name and azure_endpoint_url",
    "the role Storage Blob Data Reader, for caches and mirror_output Storage Blob Data Contributor, or a signature "
    "with these rights",
    "the role Storage Blob Data Contributor, or a signature that allows to delete",
)


def name_alone(other: str) -> Callable[[str], str]:
    """Return a check that a name of a bucket is no path or address; `other` is the key for folders in it."""

    def check(name: str) -> str:
        if not re.fullmatch(r"[^/:\s]+", name):
            raise ValueError(f"use the bucket's name alone; folders in it are {other}")
        return name

    return check


def check_endpoint(address: str | None) -> str | None:
    if address and not re.match(r"https?://[^/\s]", address):
        raise ValueError("use an address that begins with https:// or http://")
    return address


Endpoint = Annotated[str | None, AfterValidator(check_endpoint)]


class BucketPlace(Section):
    """A folder of an object store. Credentials are never shown, not even as a part of a mistake."""

    service: ClassVar[Service]
    id: Annotated[str, AfterValidator(check_id)]

    @property
    def owner(self) -> str:
        """Name for messages of what is in the bucket."""
        return self.id if self.id == MIRROR else f"dataset `{self.id}`"

    @property
    def bucket(self) -> str:
        return self._value(f"{self.service.bucket}_name")

    @property
    def prefix(self) -> str:
        return self._value("data_prefix").strip("/")

    @property
    def concurrent_reads(self) -> int:
        return self._value("max_pool_connections")

    @property
    def address(self) -> str:
        return "/".join([f"{self.service.scheme}:/", self.bucket, *filter(None, [self.prefix])])

    def below(self, folder: str) -> Self:
        """Return the place of a folder in this one."""
        key = f"{self.service.keys}_data_prefix"
        return self.model_copy(update={key: "/".join(filter(None, [self.prefix, folder]))})

    def _value(self, key: str) -> Any:
        return getattr(self, f"{self.service.keys}_{key}")


class S3Place(BucketPlace):
    """A folder of an S3-compatible store."""

    service = S3
    aws_bucket_name: Annotated[str, AfterValidator(name_alone("aws_data_prefix"))]
    aws_data_prefix: str = ""
    aws_region_name: str | None = None
    aws_endpoint_url: Endpoint = None
    aws_access_key_id: SecretStr | None = None
    aws_secret_access_key: SecretStr | None = None
    aws_session_token: SecretStr | None = None
    aws_max_pool_connections: int = Field(32, ge=1, le=1024)

    @model_validator(mode="after")
    def check_credentials(self) -> S3Place:
        if (self.aws_access_key_id is None) != (self.aws_secret_access_key is None):
            missing = "aws_secret_access_key" if self.aws_access_key_id else "aws_access_key_id"
            raise PydanticCustomError(missing, "is missing: it belongs to the other half of the key")
        if self.aws_session_token and not self.aws_access_key_id:
            raise PydanticCustomError("aws_access_key_id", "is missing: aws_session_token belongs to a key")
        return self


class GcsPlace(BucketPlace):
    """A folder of a bucket of Google Cloud Storage."""

    service = GCS
    gcs_bucket_name: Annotated[str, AfterValidator(name_alone("gcs_data_prefix"))]
    gcs_data_prefix: str = ""
    gcs_service_account: Path | None = None
    gcs_endpoint_url: Endpoint = None
    gcs_max_pool_connections: int = Field(32, ge=1, le=1024)


class AzurePlace(BucketPlace):
    """A folder of a container of Azure Blob Storage."""

    service = AZURE
    azure_container_name: Annotated[str, AfterValidator(name_alone("azure_data_prefix"))]
    azure_data_prefix: str = ""
    azure_account_name: str | None = None
    azure_access_key: SecretStr | None = None
    azure_sas_token: SecretStr | None = None
    azure_endpoint_url: Endpoint = None
    azure_max_pool_connections: int = Field(32, ge=1, le=1024)

    @model_validator(mode="after")
    def check_credentials(self) -> AzurePlace:
        if self.azure_access_key and self.azure_sas_token:
            raise PydanticCustomError("azure_sas_token", "azure_access_key opens the container, too: leave one out")
        return self


SECRET_KEYS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token", "azure_access_key", "azure_sas_token")
MACHINE_KEYS = frozenset(
    {*SECRET_KEYS, "gcs_service_account"}
    | {f"{each.keys}_{end}" for each in (S3, GCS, AZURE) for end in ("endpoint_url", "max_pool_connections")}
)
"""Keys that may differ between the machines of a run: how each of them reaches the same bucket."""
MIRROR = "mirror_output"
"""The `id` of the folder that a run's results go to, which is the name of a setting."""
PLACES_BY_SCHEME: dict[str, type[BucketPlace]] = {"s3": S3Place, "gs": GcsPlace, "az": AzurePlace}
ADDRESSES = {"s3": "aws", "gs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""`type` of a dataset by the scheme of an address."""
ONLY_LISTS = "a web server lists no files: write the addresses of its images into a table, and use type csv"


def no_address(folder: Path) -> Path:
    """Return a folder. Raises ValueError for an address, with what to write instead."""
    scheme = re.match(r"([a-z0-9]+):/", str(folder))
    if scheme and scheme[1] in ("http", "https"):
        raise ValueError(ONLY_LISTS)
    if scheme and (kind := ADDRESSES.get(scheme[1])):
        bucket = "container" if kind == "azure" else "bucket"
        raise ValueError(f"is no folder: use type {kind}, {kind}_{bucket}_name and {kind}_data_prefix")
    return folder


def mirror_place(address: str) -> BucketPlace:
    """Return the place that mirror_output names. Its credentials are those of the environment."""
    scheme, bucket, folder = parse_bucket(address) or ("", "", "")
    place = PLACES_BY_SCHEME[scheme]
    keys = place.service.keys
    return place.model_validate(
        {"id": MIRROR, f"{keys}_{place.service.bucket}_name": bucket, f"{keys}_data_prefix": folder}
    )
