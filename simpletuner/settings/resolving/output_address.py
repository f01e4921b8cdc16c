"""`output_dir` as an address in a bucket: a folder of this machine, mirrored there."""

from __future__ import annotations

from dataclasses import replace

from simpletuner.settings.files.raw_values import RawValue
from simpletuner.settings.resolving.sources import MergedValues
from simpletuner.settings.values.buckets import check_bucket, parse_bucket

NAME, MIRROR = "output_dir", "mirror_output"


def apply_output_address(merged: MergedValues) -> None:
    """Set mirror_output to the address that output_dir gives, and output_dir to a folder of the same name here.

    Another value of mirror_output is a mistake.
    """
    given = str(merged.values.get(NAME, ""))
    if (address := parse_bucket(given)) is None:
        return
    origin = merged.origins[NAME]
    place = f"{NAME} = {given} ({origin})"
    folder = address.folder.rpartition("/")[2] or address.bucket
    merged.require_equal(RawValue(MIRROR, check_bucket(given), place), origin.source, "output_dir is in a bucket")
    merged.values[NAME] = folder
    merged.origins[NAME] = replace(origin, reason="the folder on this machine of that address")
