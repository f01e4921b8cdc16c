"""Meaning of an object store's errors: for one object, or for the run."""

from __future__ import annotations

import re

from simpletuner.data.config.places import Service
from simpletuner.errors import DataError, EnvironmentNotReady, SimpleTunerError

BUCKET_GONE = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
# Codes of errors that concern one object alone, and why it is not read.
DAMAGED_OBJECTS = {
    **dict.fromkeys(("InvalidObjectState", "BlobArchived"), "is archived: restore it first"),
    "InvalidRange": "is empty, or was made shorter while it was read",
}

AGAIN = "then run the same command again: it continues"
RENEW = f"renew the credentials, {AGAIN}"
CHECK_KEY = "check {service.credentials}, or what takes their place: docs/tables-and-stores.md lists the places"
EXPIRED = ("its credentials have expired", RENEW)
INVALID = ("its credentials are not valid", CHECK_KEY)
DENIED = ("access is denied", "these credentials need {service.rights}")
LOCKED = (
    "it keeps objects locked for some time",
    "use a {service.bucket} without Object Lock, retention or immutability: a run replaces and removes what it wrote",
)
FULL = ("it is full, or over its quota", f"make room there, or raise the quota, {AGAIN}")
REGION = ("it is in another region", "set aws_region_name to the bucket's region")
THROTTLED = ("it refuses requests, having had too many", "lower {service.keys}_max_pool_connections, " + AGAIN)
FAILS = ("it fails to answer", f"wait until it is well, {AGAIN}")
TAKES_NOTHING = "it takes nothing, though it can be listed; is it full?"

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
    # of AWS, Azure and Alibaba; the others say it in words, see IN_WORDS
    **dict.fromkeys(
        ("MissingUploadObjectWithObjectLockHeaders", "BlobImmutableDueToPolicy", "FileImmutable", "ObjectLocked"),
        LOCKED,
    ),
    # of MinIO, Ceph, Google and Huawei
    **dict.fromkeys(("XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded", "507"), FULL),
    **dict.fromkeys(("InsufficientStorageSpace", "quotaExceeded"), FULL),
    **dict.fromkeys(("500", "502", "503", "504"), FAILS),
}
# Meanings of several codes each: the message has the one that came.
NAMED = (DENIED, LOCKED, FULL, FAILS)
REFUSALS = (DENIED, LOCKED)
# Error texts about locked objects: AWS (InvalidRequest, AccessDenied), Google (AccessDenied), Azure (409).
IN_WORDS = re.compile(r"object.?lock|retention|immutab|legal hold|\bWORM\b", re.IGNORECASE)
# Metadata server of a cloud instance, the last place that obstore asks, which other machines do not have.
LAST_PLACES = r"Error performing \w+ \S*(/latest/(api|meta-data)/|/computeMetadata/|/metadata/identity/)"


class StoreUnavailable(EnvironmentNotReady):
    """The store answers that it failed, after all retries."""


class StoreRefusal(EnvironmentNotReady):
    """Refusals by a healthy store: a missing right, a lock, an unsupported request."""


def code_of(text: str) -> str:
    """Return the store's code in the text of an error, else the status of HTTP, else nothing."""
    # in parentheses: of one key among several, as Azure removes them
    code = re.search(r"<Code>(\w{1,64})</Code>", text) or re.search(r"\(code: (\w{1,64})\)", text)
    status = re.search(r"status code: (\d+)", text)
    return code[1] if code else status[1] if status else ""


def words_of(text: str) -> str:
    """Message of the store beside its code, without the names of objects."""
    said = re.findall(r"<(?:Message|Details)>([^<]*)<|failed for key .*?: (.*) \(code:", text)
    return " ".join(part for parts in said for part in parts)


def run_error(text: str, owner: str, service: Service, removing: bool = False) -> SimpleTunerError:
    """Return the error that ends the run, by the text of obstore's; `owner` begins the sentence.

    It is a StoreUnavailable or a StoreRefusal where the store's answer says so.
    """
    if re.search(LAST_PLACES, text):
        return EnvironmentNotReady(f"{owner}: no credentials were found", CHECK_KEY.format(service=service))
    code, status = code_of(text), re.search(r"status code: (\d+)", text)
    if code in BUCKET_GONE or (status and status[1] == "404"):
        return DataError(f"{owner} does not exist", f"check {service.place}")
    named = code
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
    return store_error(code, named, bool(IN_WORDS.search(words_of(text))), owner, service, removing)


def store_error(
    code: str, named: str, is_locked: bool, owner: str, service: Service, removing: bool
) -> EnvironmentNotReady:
    """Return the error for a code of the table or a status; `named` is the store's own."""
    unknown = (f"it answers with the error {named}", "look it up in the manual of the store")
    meaning = LOCKED if is_locked else ENDING.get(code, unknown)
    reason, hint = meaning[0] + f" ({named})" * (meaning in NAMED), meaning[1]
    if removing and meaning is DENIED:
        hint = "these credentials need {service.removal}"
    kind = (
        StoreUnavailable
        if meaning is FAILS
        else StoreRefusal
        if meaning in (*REFUSALS, unknown)
        else EnvironmentNotReady
    )
    removes = "it removes nothing: " * (removing and kind is StoreRefusal)
    return kind(f"{owner}: {removes}{reason}", hint.format(service=service))
