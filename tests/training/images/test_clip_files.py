"""Validation clips as files: equal frames are equal bytes, whatever the process and the machine."""

from __future__ import annotations

import os
import subprocess
import sys

ENCODE = """
import hashlib, os, sys
import numpy as np
from PIL import Image
from simpletuner.training.images.clip_files import as_mp4
if sys.argv[1:]:
    os.sched_setaffinity(0, {int(sys.argv[1])})
random = np.random.default_rng(0)
for size in ((32, 32), (66, 50), (512, 320)):
    noise = [Image.fromarray(random.integers(0, 255, (8, 12, 3), dtype=np.uint8)) for _ in range(9)]
    print(hashlib.sha256(as_mp4([image.resize(size) for image in noise], 16)).hexdigest())
"""


def test_an_mp4_depends_neither_on_the_number_of_cpus_nor_on_what_memory_was_before():
    """glibc fills memory that it hands out with MALLOC_PERTURB_, as a process does that ran long."""
    one_cpu, found = [str(min(os.sched_getaffinity(0)))], []
    for environment, arguments in (({}, []), ({"MALLOC_PERTURB_": "85"}, one_cpu), ({"MALLOC_PERTURB_": "170"}, [])):
        command = [sys.executable, "-c", ENCODE, *arguments]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    assert found[0] == found[1] == found[2] and len(found[0]) == 3
