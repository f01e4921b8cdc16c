"""Places of a dataset and its caches: local folders named after its id, or a bucket with its credentials."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.settings.declared.knob import Section
from simpletuner.settings.declared.sections import Settings
from simpletuner.settings.values.parsed import parse_bucket
from simpletuner.settings.values.spelling import fill
from simpletuner.system.files.paths import ENVIRONMENT

if TYPE_CHECKING:
    from simpletuner.data.config.dataset_types import ImageDataset
    from simpletuner.data.config.embeds import TextEmbeds

# Of each part of a path, on the usual file systems.
MAX_NAME_BYTES = 255
WITH_REFERENCES = "with-references"
"""Ends the names of folders for embeddings by text encoders that read references, too."""


def latents_folder(dataset: ImageDataset, settings: Settings) -> Path:
    if dataset.cache_dir_vae is None:
        return latents_root(settings) / dataset.id
    return fill(dataset.cache_dir_vae, {**run_values(settings), "id": dataset.id})


def latents_root(settings: Settings) -> Path:
    """Return the folder for the latents of all datasets that do not name one of their own."""
    return fill(settings.data.cache_dir_vae or default_folder(settings, "latents"), run_values(settings))


def text_folder(texts: TextEmbeds, settings: Settings) -> Path:
    return fill(texts.cache_dir, {**run_values(settings), "id": texts.id})


def paired_folder(texts: TextEmbeds, dataset: ImageDataset, settings: Settings) -> Path:
    """Folder for embeddings of a dataset's captions by text encoders that read its references, too."""
    return paired_root(texts, settings) / dataset.id


def paired_root(texts: TextEmbeds, settings: Settings) -> Path:
    folder = text_folder(texts, settings)
    return folder.with_name(f"{folder.name}-{WITH_REFERENCES}")


def run_values(settings: Settings) -> dict[str, object]:
    """Return the values of names in braces in the path of a cache folder."""
    return {"model_family": settings.model.model_family, "output_dir": settings.training.output_dir}


def default_folder(settings: Settings, kind: str) -> Path:
    return settings.training.output_dir / "cache" / kind


def check_id(name: str) -> str:
    """Return a dataset's id. Raises ValueError for one that is not a relative path below a folder."""
    parts = name.split("/")
    if not name.strip():
        raise ValueError("an id cannot be empty")
    if ENVIRONMENT.search(name):
        raise ValueError("an id cannot hold {env:NAME}: it is the name of a cache, which must not change")
    if any(is_control(letter) for letter in name):
        raise ValueError("an id cannot hold control characters")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError("its cache would not be in a folder of its own: use a plain name, such as `photos`")
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise ValueError(f"an id has at most {MAX_NAME_BYTES} bytes")
    return name


def is_control(letter: str) -> bool:
    """True for a control character or a lone surrogate, which stands for an undecodable byte."""
    return unicodedata.category(letter) in ("Cc", "Cs")


def id_of_folder(name: str) -> str:
    return "".join("_" if is_control(letter) else letter for letter in name) or "images"


def find_nested_ids(names: Sequence[str]) -> list[str]:
    """A sentence for each dataset id with its folder inside another id's folder."""
    paths = {name: PurePosixPath(name) for name in names}
    return [
        f"the cache of dataset `{inner}` would be inside that of `{outer}`: rename one of them"
        for outer in paths
        for inner in paths
        if inner != outer and paths[inner].is_relative_to(paths[outer])
    ]


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
# Keys that may differ between the machines of a run: how each of them reaches the same bucket.
MACHINE_KEYS = frozenset(
    {*SECRET_KEYS, "gcs_service_account"}
    | {f"{each.keys}_{end}" for each in (S3, GCS, AZURE) for end in ("endpoint_url", "max_pool_connections")}
)
MIRROR = "mirror_output"
"""The `id` of the folder that a run's results go to, which is the name of a setting."""
PLACES_BY_SCHEME: dict[str, type[BucketPlace]] = {"s3": S3Place, "gs": GcsPlace, "az": AzurePlace}


def mirror_place(address: str) -> BucketPlace:
    scheme, bucket, folder = parse_bucket(address) or ("", "", "")
    place = PLACES_BY_SCHEME[scheme]
    keys = place.service.keys
    return place.model_validate(
        {"id": MIRROR, f"{keys}_{place.service.bucket}_name": bucket, f"{keys}_data_prefix": folder}
    )
