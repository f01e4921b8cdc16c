"""The keys of a dataset file that say where a bucket is, and with which credentials it is opened."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from simpletuner.data.folders import check_id
from simpletuner.settings.knob import Section


def check_bucket(name: str) -> str:
    if not re.fullmatch(r"[^/:\s]+", name):
        raise ValueError("use the bucket's name alone; folders in it are aws_data_prefix")
    return name


def check_endpoint(address: str | None) -> str | None:
    if address and not re.match(r"https?://[^/\s]", address):
        raise ValueError("use an address that begins with https:// or http://")
    return address


class S3Place(Section):
    """A folder of an S3-compatible store. Credentials are never shown, not even as a part of a mistake."""

    id: Annotated[str, AfterValidator(check_id)]
    aws_bucket_name: Annotated[str, AfterValidator(check_bucket)]
    aws_data_prefix: str = ""
    aws_region_name: str | None = None
    aws_endpoint_url: Annotated[str | None, AfterValidator(check_endpoint)] = None
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

    @property
    def address(self) -> str:
        return "/".join(["s3:/", self.aws_bucket_name, *filter(None, [self.aws_data_prefix.strip("/")])])
