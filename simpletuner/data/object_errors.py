"""What the errors of an S3-compatible store mean: for one object, or for the run."""

from __future__ import annotations

import re

from simpletuner.errors import DataError, EnvironmentNotReady, SimpleTunerError

BUCKET_GONE = "NoSuchBucket"
DAMAGED_OBJECTS = {
    "InvalidObjectState": "is archived: restore it first",
    "InvalidRange": "is empty, or was made shorter while it was read",
}
"""S3's codes of errors that concern one object alone, and why it is not read."""

AGAIN = "then run the same command again: it continues"
RENEW = f"renew the credentials, {AGAIN}"
CHECK_KEY = (
    "check aws_access_key_id and aws_secret_access_key, or what takes their place: docs/data.md lists the places"
)
EXPIRED = ("its credentials have expired", RENEW)
INVALID = ("its credentials are not valid", CHECK_KEY)
DENIED = (
    "access is denied",
    "these credentials need s3:ListBucket for the bucket, s3:GetObject for its objects, and s3:PutObject for caches",
)
REGION = ("it is in another region", "set aws_region_name to the bucket's region")
THROTTLED = ("it refuses requests, having had too many", f"lower aws_max_pool_connections, {AGAIN}")
FAILS = ("it fails to answer", f"wait until it is well, {AGAIN}")

ENDING: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"), EXPIRED),
    **dict.fromkeys(("InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "401"), INVALID),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set it, for example by NTP"),
    **dict.fromkeys(
        ("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"), REGION
    ),
    **dict.fromkeys(("SlowDown", "429"), THROTTLED),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "403"), DENIED),
    **dict.fromkeys(("500", "502", "503", "504"), FAILS),
}
"""By S3's code or the status of HTTP, as far as they say what to do."""


def code_of(text: str) -> str:
    """Return S3's code in the text of an error, else the status of HTTP, else nothing."""
    code = re.search(r"<Code>(\w+)</Code>", text)
    status = re.search(r"status code: (\d+)", text)
    return code[1] if code else status[1] if status else ""


def run_error(text: str, owner: str) -> SimpleTunerError:
    """Return the error that ends the run, by the text of obstore's; `owner` begins the sentence."""
    if re.search(r"^Generic S3 error: Error performing \w+ \S+/latest/(api|meta-data)/", text):
        # The last place that obstore asks is the metadata server of a cloud instance, which others do not have.
        return EnvironmentNotReady(f"{owner}: no credentials were found", CHECK_KEY)
    code, status = code_of(text), re.search(r"status code: (\d+)", text)
    if code == BUCKET_GONE or (status and status[1] == "404"):
        return DataError(f"{owner} does not exist", "check aws_bucket_name, aws_region_name and aws_endpoint_url")
    if code not in ENDING and status:
        code = status[1]
    if "configured region" in text:
        code = "PermanentRedirect"
    if not code and not re.search("error sending request|timed out|body error", text):
        return EnvironmentNotReady(f"{owner}: it answers as no S3 store does", "check aws_endpoint_url")
    if not code:
        return EnvironmentNotReady(f"{owner} cannot be reached", f"check aws_endpoint_url and the network, {AGAIN}")
    reason, hint = ENDING.get(code, (f"it answers with the error {code}", "look it up in the manual of the store"))
    return EnvironmentNotReady(f"{owner}: {reason}", hint)
