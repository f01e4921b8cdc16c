"""A line in the file $AUDITED for whatever a Python process opens, connects to or starts; found through PYTHONPATH."""

import json
import os
import sys
from pathlib import Path

DESCRIPTOR = os.open(os.environ["AUDITED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def note(event: str, given: tuple[object, ...]) -> None:
    if event == "open" and isinstance(given[0], (str, bytes)):
        how = "write" if isinstance(given[2], int) and given[2] & WRITES else "read"
        row = [how, str(Path(os.fsdecode(given[0])).absolute())]
    elif event == "socket.connect":
        row = ["connect", str(given[1])]
    elif event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        row = ["start", str(given[1] if event == "subprocess.Popen" else given[0])]
    else:
        return
    os.write(DESCRIPTOR, json.dumps(row).encode() + b"\n")


sys.addaudithook(note)
