"""Errors of the system, in the words that libraries have for them: what was full, and what was used up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner.errors import EnvironmentNotReady, explain_system_errors, without_errno
from simpletuner.system.files.atomic import write_file
from simpletuner.system.files.checksums import write_with_checksum

LIMITED = """
import resource
from pathlib import Path
import torch
from diffusers import AutoencoderKL
from safetensors import safe_open
from simpletuner.errors import explain_system_errors, EnvironmentNotReady
from simpletuner.checkpoints.tensors import read_tensors
from simpletuner.models.folder.malformed import translate_load_errors
from simpletuner.parallel.world import joined_world

def decode(): bytearray(1 << 40)
def tensor(): torch.empty(1 << 40)
def mapping(): safe_open(weights, framework="pt")
def library(): AutoencoderKL.from_pretrained(weights.parent)
def reading():
    with translate_load_errors(weights): decode()
def checkpoint():
    with joined_world({}, use_cpu=True):
        read_tensors([weights], {"decoder.conv_in.bias": torch.empty(32)}, "a checkpoint")

taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20),) * 2)
for call in (decode, tensor, mapping, library, reading, checkpoint):
    try:
        with explain_system_errors():
            call()
    except EnvironmentNotReady as error:
        print(call.__name__, error.message, error.hint)
"""


@pytest.mark.parametrize("message", ["can't start new thread", "could not create a primitive"])
def test_what_a_limit_of_threads_or_memory_makes_of_other_calls_is_no_bug(message):
    """The first is hidden by multiprocessing's pools, whose cleaning up fails in turn."""
    with pytest.raises(EnvironmentNotReady, match="out of memory") as caught, explain_system_errors():
        try:
            raise RuntimeError(message)
        finally:
            raise AttributeError("'DummyProcess' object has no attribute 'terminate'")
    assert "ulimit -u" in caught.value.hint


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_a_limit_of_memory_is_called_memory_whatever_a_library_calls_it(starter, tmp_path):
    AutoencoderKL = pytest.importorskip("diffusers").AutoencoderKL  # noqa: N806
    AutoencoderKL(block_out_channels=(32,), norm_num_groups=32).save_pretrained(tmp_path)
    [weights] = tmp_path.glob("*.safetensors")
    with weights.open("r+b") as file:  # larger than what is left: the header still fits
        header = int.from_bytes(file.read(8), "little")
        file.seek(8)
        text = file.read(header)
        size = 1 << 30
        grown = text.rstrip()[:-1] + b',"grown":{"dtype":"U8","shape":[%d],"data_offsets":[%d,%d]}}'
        data = weights.stat().st_size - 8 - header
        grown = grown % (size, data, data + size)
        content = file.read()
        file.seek(0)
        file.write(len(grown).to_bytes(8, "little") + grown + content)
        file.truncate(8 + len(grown) + data + size)
    limited = starter.start(exec, 1, LIMITED, {"weights": weights})
    limited.wait()
    lines = limited.said.splitlines()
    calls = ["decode", "tensor", "mapping", "library", "reading", "checkpoint"]
    assert [line.partition(" ")[0] for line in lines] == calls, limited.said
    assert all("out of memory" in line and "ulimit -v" in line for line in lines), limited.said


@pytest.mark.parametrize("write", [write_file, lambda path, content: write_with_checksum(path, [memoryview(content)])])
def test_a_full_disk_names_the_file(write, tmpfs):
    path = tmpfs("size=64k") / "weights"
    with (
        pytest.raises(EnvironmentNotReady, match=f"cannot use {path}: No space left on device"),
        explain_system_errors(),
    ):
        write(path, os.urandom(1 << 20))


def test_where_no_file_is_known_the_folder_is_named():
    with pytest.raises(EnvironmentNotReady, match=r"cannot use out: No space left"), explain_system_errors(Path("out")):
        raise RuntimeError("I/O error: No space left on device (os error 28)")


def test_a_library_that_could_not_be_mapped_is_memory_and_one_that_must_not_be_is_not():
    message = "libtorch_cpu.so: failed to map segment from shared object"
    with pytest.raises(EnvironmentNotReady, match="out of memory"), explain_system_errors():
        raise ImportError(message)
    with pytest.raises(ImportError, match="not permitted"), explain_system_errors():
        raise ImportError(f"{message}: Operation not permitted")


def test_packages_that_do_not_fit_each_other_are_named_and_are_no_bug(tmp_path, monkeypatch):
    """As diffusers says it that torchao 0.18 imports what torch 2.9 does not have."""
    for name, version, content in (
        ("olderpart", "2.9.1", ""),
        ("newerpart", "0.18.0", "from olderpart import ScalingType"),
    ):
        (tmp_path / f"{name}.py").write_text(content)
        metadata = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)

    def loading() -> None:
        try:
            import newerpart  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise RuntimeError("Failed to import diffusers.pipelines") from error

    expected = "newerpart 0.18.0 does not work with olderpart 2.9.1: cannot import name 'ScalingType' from 'olderpart'"
    with pytest.raises(EnvironmentNotReady) as raised, explain_system_errors():
        loading()
    assert raised.value.message == expected
    assert "pip install --upgrade newerpart olderpart" in raised.value.hint
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"), explain_system_errors():  # a bug of ours
        from simpletuner.errors import Nothing  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ZeroDivisionError), explain_system_errors():
        try:
            import newerpart  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError:
            1 / 0  # noqa: B018


@pytest.mark.parametrize(
    ("number", "sentence", "hint"),
    [
        (errno.ESTALE, "the file server has removed or replaced it since it was opened", "`simpletuner nfs check`"),
        (errno.EIO, "the disk or the file server answers with an error", "`sudo dmesg | tail`"),
        (errno.EFBIG, "the file would be larger than a limit allows", "`ulimit -f`"),
    ],
)
def test_what_file_servers_and_limits_answer_is_one_sentence(number, sentence, hint):
    failed = OSError(number, os.strerror(number), "run/.state.unfinished", None, "run/state.json")
    with pytest.raises(EnvironmentNotReady) as caught, explain_system_errors(Path("run")):
        raise failed
    assert caught.value.message == f"cannot use run/.state.unfinished and run/state.json: {sentence}"
    assert hint in caught.value.hint
    assert without_errno(failed, Path("run/state.json")) == f"{sentence}: run/.state.unfinished"
    own = OSError(number, "it is larger than 256 MiB", "a.json")
    assert without_errno(own, Path("a.json")) == "it is larger than 256 MiB", "what we say ourselves stays"


def test_a_link_that_leads_to_itself_is_named(tmp_path):
    (loop := tmp_path / "loop").symlink_to("loop")
    for use in (Path.resolve, Path.read_bytes):
        with pytest.raises(EnvironmentNotReady) as caught, explain_system_errors():
            use(loop)
        assert (
            caught.value.message == f"cannot use {loop}: it is a link that leads to itself, or one that is not followed"
        )
    with pytest.raises(RecursionError), explain_system_errors():
        raise RecursionError


def test_a_report_above_a_limit_of_files_names_its_path_once(tmp_path):
    """A warning, since a run goes on without its report."""
    said = """
import resource, signal, sys
from pathlib import Path
from simpletuner.errors import without_errno
from simpletuner.system.files.atomic import write_file
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
path = Path(sys.argv[1])
try:
    write_file(path, bytes(1 << 20))
except OSError as error:
    print(f"{path} could not be written: {without_errno(error, path)}")
"""
    path = tmp_path / "report.html"
    done = subprocess.run([sys.executable, "-c", said, str(path)], capture_output=True, text=True)
    assert done.stdout == f"{path} could not be written: the file would be larger than a limit allows\n", done.stderr
