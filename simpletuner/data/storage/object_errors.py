"""Meaning of an object store's errors: for one object, or for the run."""

from __future__ import annotations

import re

from simpletuner.data.config.object_store_keys import Service
from simpletuner.errors import DataError, EnvironmentNotReady, SimpleTunerError

BUCKET_GONE = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
DAMAGED_OBJECTS = {
    **dict.fromkeys(("InvalidObjectState", "BlobArchived"), "is archived: restore it first"),
    "InvalidRange": "is empty, or was made shorter while it was read",
}
"""Codes of errors that concern one object alone, and why it is not read."""

AGAIN = "then run the same command again: it continues"
RENEW = f"renew the credentials, {AGAIN}"
CHECK_KEY = "check {service.credentials}, or what takes their place: docs/data.md lists the places"
EXPIRED = ("its credentials have expired", RENEW)
INVALID = ("its credentials are not valid", CHECK_KEY)
DENIED = ("access is denied", "these credentials need {service.rights}")
REGION = ("it is in another region", "set aws_region_name to the bucket's region")
THROTTLED = ("it refuses requests, having had too many", "lower {service.keys}_max_pool_connections, " + AGAIN)
FAILS = ("it fails to answer", f"wait until it is well, {AGAIN}")

# By the code of S3, Google or Azure, or the status of HTTP, as far as they say what to do.
ENDING: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"), EXPIRED),
    **dict.fromkeys(
        ("InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "AuthenticationFailed", "401"), INVALID
    ),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set it, for example by NTP"),
    **dict.fromkeys(
        ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"), REGION
    ),
    **dict.fromkeys(("SlowDown", "ServerBusy", "429"), THROTTLED),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "PublicAccessNotPermitted", "403"), DENIED),
    **dict.fromkeys(("500", "502", "503", "504"), FAILS),
}
LAST_PLACES = r"Error performing \w+ \S*(/latest/(api|meta-data)/|/computeMetadata/|/metadata/identity/)"
"""The metadata server of a cloud instance, the last place that obstore asks, which other machines do not have."""


def code_of(text: str) -> str:
    """Return the store's code in the text of an error, else the status of HTTP, else nothing."""
    code = re.search(r"<Code>(\w+)</Code>", text)
    status = re.search(r"status code: (\d+)", text)
    return code[1] if code else status[1] if status else ""


def run_error(text: str, owner: str, service: Service) -> SimpleTunerError:
    """Return the error that ends the run, by the text of obstore's; `owner` begins the sentence."""
    if re.search(LAST_PLACES, text):
        return EnvironmentNotReady(f"{owner}: no credentials were found", CHECK_KEY.format(service=service))
    code, status = code_of(text), re.search(r"status code: (\d+)", text)
    if code in BUCKET_GONE or (status and status[1] == "404"):
        return DataError(f"{owner} does not exist", f"check {service.place}")
    if code not in ENDING and status:
        code = status[1]
    if "configured region" in text:
        code = "PermanentRedirect"
    if "Signature not valid in the specified time frame" in text:  # Azure has no code of its own for it
        code = "ExpiredToken"
    if "credential provider" in text:  # boto3 gave none, as after the hours that `aws sso login` lasts
        code = "ExpiredToken" if "SSO" in text else "401"
    endpoint = f"check {service.keys}_endpoint_url"
    if not code and not re.search("error sending request|timed out|body error", text):
        return EnvironmentNotReady(f"{owner}: it does not answer as {service.name} would", endpoint)
    if not code:
        return EnvironmentNotReady(f"{owner} cannot be reached", f"{endpoint} and the network, {AGAIN}")
    reason, hint = ENDING.get(code, (f"it answers with the error {code}", "look it up in the manual of the store"))
    return EnvironmentNotReady(f"{owner}: {reason}", hint.format(service=service))
