"""Mask credentials in text that is printed, logged or sent: those of an address, and those named by a key."""

from __future__ import annotations

import re

# `user:password@` of an address. A user alone may be a token, as in `https://ghp_...@host`.
USERINFO = re.compile(r"(?<=://)[^\s/?#\\'\"<>]*@")
# Query parameters that give access, such as S3's X-Amz-Signature, Azure's `sig`, and `token`.
SIGNED = re.compile(
    r"""([?&;](?:[\w.-]*(?:token|signature|secret|passw|credential|api[_-]?key|access[_-]?key)[\w.-]*|sig|key|auth|pwd)=)
    [^\s&;\#\\'"<>]+""",
    re.IGNORECASE | re.VERBOSE,
)
MASK = "..."


def mask_credentials(text: str) -> str:
    """Replace user names, passwords and signatures in the addresses of a text by dots."""
    return SIGNED.sub(rf"\g<1>{MASK}", USERINFO.sub(f"{MASK}@", text)) if "://" in text else text
