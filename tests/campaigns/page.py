"""Random requests to a real page, as a visitor with the token and as one without: `python tests/campaigns/page.py`.

Every parameter gets traversal, markup, huge numbers and broken encodings. No answer may be a bug, hold markup that was
sent, show what is outside of the folders, or change anything there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote, urlencode

from PIL import Image

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS)]

from page_server import Answer, PageServer, page_server  # noqa: E402
from run_pages import write_round, write_rows  # noqa: E402

from simpletuner.page.datasets.checks import result_name  # noqa: E402
from simpletuner.runs.images import ImageInfo, write_png  # noqa: E402
from simpletuner.settings.declared.sections import setting_fields  # noqa: E402

INFO = ImageInfo("a circle", "", 1, 4, 3.0, 8, 8, 5, "trained")
OWN_FILES = (
    "status.json",
    "metrics.jsonl",
    "log.txt",
    "settings.json",
    "console.txt",
    "console.start.txt",
    "durations.json",
    ".lock",
    "sample_losses.jsonl",
)

MARKUP = '"><img src=x onerror=alert(1)><script>alert(2)</script>{{7*7}}'
SECRET = "what nobody may read"
PICTURE = MARKUP.replace("/", "") + ".png"
GET = (
    *(
        "/",
        "/configurations",
        "/configurations/edit",
        "/configurations/flavours",
        "/configurations/recipe",
        "/export",
        "/export/download",
    ),
    *("/preferences", "/runs", "/blocks", "/deepspeed", "/static/style.css", "/static/../guard.py", "/nowhere"),
    *(
        "/runs/rows",
        "/runs/watch",
        "/runs/watch/news",
        "/runs/image",
        "/runs/checkpoints/compare",
        "/runs/results/download",
    ),
    *("//evil.example/x", "/%5Cevil.example"),
    *("/datasets", "/datasets/picture", "/datasets/caption", "/datasets/progress"),
)
POST = (
    *("/configurations/new", "/configurations/copy", "/configurations/check", "/configurations/save"),
    *("/deepspeed/preview", "/deepspeed/recommend", "/deepspeed/template", "/deepspeed/apply", "/preferences/clear"),
    *("/runs/stop", "/runs/leave", "/runs/start"),  # of files that cannot be trained with
    *("/runs/queue/add", "/runs/queue/remove", "/runs/queue/move"),
    *("/datasets/caption", "/datasets/undo", "/datasets/stop"),
    *("/runs/checkpoints/delete", "/runs/checkpoints/export"),
    *("/plan", "/datasets/check", "/blocks/detect"),  # these start processes
)
NAMES = (
    *("file", "target", "view", "q", "checksum", "to", "all", "kind", "template", "template_name", "replace"),
    *(
        "model_family",
        "model_flavour",
        "num_processes",
        "recipe",
        "gpu_memory",
        "host_memory",
        "parameters",
        "build_zero_stage",
    ),
    *("build_offload_param_path", "accelerate_config", "token"),
    *("run", "run", "run", "with", "step", "name", "edge", "smoothing", "seen-status", "seen-curves"),
    *(
        "entry",
        "dataset",
        "dataset",
        "name",
        "text",
        "edit",
        "row",
        "bucket",
        "finding",
        "order",
        "page",
        "shown",
        "shows",
    ),
)
FILES = (
    *("run.toml", "run.yaml", "run.json", "config/config.env", "new.toml", "link.toml", "up/secret.toml"),
    *("out", "out", "out/validation", "trained-00.png", "../../../secret.toml"),
    *("odd/images", "odd/images", *(f"odd/fifo-{number}" for number in range(10))),
    *(f"trained-{number:02d}.png" for number in range(1, 9)),
    *("pictures.toml", "pictures.toml", "pictures", "pictures", "a.png", "link.png", "latin.png", PICTURE),
    *("broken.toml", MARKUP.replace("/", "") + ".toml"),
)
ODD = (
    *("", " ", "\0", "../secret.toml", "../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "~", "~root/x"),
    *("{env:HOME}", MARKUP, MARKUP.replace("/", "") + ".toml", "%2e%2e%2fsecret.toml", "..\\secret.toml", "a" * 5000),
    *(
        "1e999",
        "-1",
        "99999999999999999999",
        "NaN",
        "none",
        "{",
        '{"a": 1}',
        "[1, 2]",
        "[",
        "sdxl",
        "tiny",
        "true",
        "2",
    ),
    *("cpu", "nvme", "24GiB", "all", "latents", "blocks", "deepspeed", "toml", "slurm", "accelerate", "zero3", "mine"),
    *("\ud83d", "\u202e", "\r\nSet-Cookie: a=b", "x.json", "sub/x.toml", "run.toml/x.toml", "config"),
)


def prepare(folder: Path) -> None:
    """Write files as people have them, some with markup, and what must not be seen or changed."""
    outside = folder.parent
    (outside / "secret.toml").write_text(f'tracker_run_name = "{SECRET}"\n')
    (folder / "config").mkdir()
    (folder / "run.toml").write_text(
        f"model_family = 'sdxl'\nvalidation_prompt = ['{MARKUP}']\ninstance_data_dir = '{MARKUP}'\n"
    )
    (folder / "run.yaml").write_text(f"model_family: flux\nmodel_flavour: tiny\n'{MARKUP}': 1\n")
    (folder / "run.json").write_text('{"model_family": "sdxl", "zero_stage": 2, "num_processes": 2}')
    (folder / f"{MARKUP.replace('/', '')}.toml").write_text("model_family = 'sdxl'\nseed = 1\n")
    (folder / "broken.toml").write_text(f"seed = {MARKUP}")
    (folder / "link.toml").symlink_to(outside / "secret.toml")
    (folder / "up").symlink_to(outside)
    write_run(folder / "out", outside)
    write_odd(folder / "odd")
    write_dataset(folder, outside)
    for number in range(185):
        write_ended(folder / "many" / f"run-{number}")


def write_run(output: Path, outside: Path) -> None:
    """Write what a run leaves, with markup in all of it, and links that lead out of the folders."""
    (output / "checkpoints").mkdir(parents=True)
    (output / ".lock").write_text(f"{MARKUP} 1\n")
    (output / "log.txt").write_text(f"2026-01-01 00:00:00 started: {MARKUP}\n2026-01-01 00:00:01 error: {MARKUP}\n")
    (output / "settings.json").write_text(json.dumps({"model_family": MARKUP, "max_train_steps": 5}))
    write_rows(output, 20)
    write_round(output, 5, [MARKUP])
    (output / "validation" / "step-000005" / "base-00.png").symlink_to(outside / "secret.toml")
    (output / "checkpoints" / "checkpoint-000005").symlink_to(outside)
    (output / "console.txt").symlink_to(outside / "secret.toml")
    (output / "status.json").write_text(
        json.dumps({"state": "failed", "reason": MARKUP, "config": MARKUP, "doing": MARKUP})
    )


def write_dataset(folder: Path, outside: Path) -> None:
    """Write images with markup in names and captions, a link that leads out, and what a check finds there."""
    pictures, config = folder / "pictures", folder / "pictures.toml"
    pictures.mkdir()
    for name in ("a.png", PICTURE):
        Image.new("RGB", (64, 64)).save(pictures / name)
        (pictures / name).with_suffix(".txt").write_text(MARKUP)
    Image.new("RGB", (64, 64)).save(pictures / "latin.png")
    (pictures / "latin.txt").write_bytes("größe".encode("latin-1"))
    Image.new("RGB", (64, 64)).save(outside / "outside.png")
    (pictures / "link.png").symlink_to(outside / "outside.png")
    (pictures / "link.txt").symlink_to(outside / "secret.toml")
    config.write_text("model_family = 'sdxl'\ninstance_data_dir = 'pictures'\nresolution = 64\n")
    kept = outside / "home" / "datasets" / result_name(config)
    command = [sys.executable, "-m", "simpletuner", "dataset", "check", f"--config={config}", f"--listing={kept}"]
    subprocess.run([*command, "--headers_only"], cwd=folder, capture_output=True)
    assert (kept / "datasets.json").exists()


def write_odd(output: Path) -> None:
    """Write a FIFO in the place of each file of a run, and images that are bombs or say odd things of themselves."""
    for number, name in enumerate((*OWN_FILES, "checkpoints", "validation")):
        run = output / f"fifo-{number}"
        run.mkdir(parents=True)
        (run / ".lock").touch()
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    run = output / "images"
    write_round(run, 5, [MARKUP])
    place = run / "validation" / "step-000005"
    (run / ".lock").touch()
    Image.new("1", (20_000, 20_000)).save(place / "trained-01.png")
    os.mkfifo(place / "trained-02.png")
    (place / "trained-03.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage")
    for number, odd in enumerate(({"guidance": "y"}, {"prompt": ["a"]}, {"seed": None}, {"width": -1}, []), start=4):
        text = json.dumps({**asdict(INFO), **odd} if isinstance(odd, dict) else odd)
        write_png(place / f"trained-{number:02d}.png", Image.new("RGB", (8, 8)), {"simpletuner": text})


def write_ended(output: Path) -> None:
    output.mkdir(parents=True)
    (output / ".lock").write_text("elsewhere 1\n")
    (output / "status.json").write_text(json.dumps({"state": "failed", "reason": MARKUP, "hint": MARKUP}))


def value(rng: random.Random) -> str:
    return rng.choice(FILES if rng.random() < 0.4 else ODD)


def parameters(rng: random.Random) -> dict[str, str]:
    names = rng.choices((*NAMES, *setting_fields()), k=rng.randrange(6))
    return {name: value(rng) for name in names} | ({"file": rng.choice(FILES)} if rng.random() < 0.7 else {})


def requests(rng: random.Random, server: PageServer) -> Iterator[tuple[str, str, Mapping[str, str], bytes]]:
    """Yield methods, addresses, headers and bodies without end."""
    own = server.script_headers()
    while True:
        query = urlencode(parameters(rng), errors="surrogatepass")
        if rng.random() < 0.5:
            path = rng.choice(GET) if rng.random() < 0.9 else quote(value(rng), errors="surrogatepass") or "/"
            headers = own if rng.random() < 0.9 else {}
            yield "GET", f"{path if path.startswith('/') else '/' + path}?{query}", headers, b""
        else:
            body = query.encode() if rng.random() < 0.95 else rng.randbytes(50)
            kept = own if rng.random() < 0.9 else {name: own[name] for name in rng.sample(list(own), 3)}
            yield rng.choice(("POST",) * 9 + ("PUT",)), rng.choice(POST), kept, body


def check(sent: tuple[str, str, Mapping[str, str], bytes], answer: Answer) -> None:
    """Raise AssertionError for an answer that must not be."""
    assert answer.code in (200, 204, 286, 303, 400, 401, 403, 404, 405, 413, 421), (
        sent,
        answer.code,
        answer.text[-500:],
    )
    assert SECRET not in answer.text, sent
    is_html = answer.headers.get("content-type", "").startswith("text/html")
    assert not is_html or ("<img src=x" not in answer.text and "<script>alert" not in answer.text), sent
    assert "set-cookie" not in answer.headers or "SameSite=strict" in answer.headers["set-cookie"], sent


def outside(folder: Path) -> dict[str, bytes]:
    """All files beside the folder, but for the page's log and the user's own templates and caches."""
    skipped = (folder, folder.parent / "home", folder.parent / f"{folder.name}-page.log")
    paths = [path for path in folder.parent.rglob("*") if not any(path.is_relative_to(each) for each in skipped)]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def fuzz(server: PageServer, seed: int, count: int) -> Counter[int]:
    """Send `count` requests; return how many there were of each code."""
    rng = random.Random(seed)
    before = outside(server.folder)
    codes: Counter[int] = Counter()
    for _, sent in zip(range(count), requests(rng, server), strict=False):
        answer = server.send(*sent)
        check(sent, answer)
        codes[answer.code] += 1
    assert outside(server.folder) == before, "something outside of the folders was changed"
    return codes


def poll_together(server: PageServer, clients: int, polls: int) -> list[float]:
    """Poll the list of runs from several clients at once; return how long each answer took."""
    waits: list[float] = []

    def poll() -> None:
        for _ in range(polls):
            begin = time.monotonic()
            assert server.get("/runs/rows").code == 200
            waits.append(time.monotonic() - begin)

    threads = [threading.Thread(target=poll) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(waits) == clients * polls, "each poll was answered"
    return waits


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=2000)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "work"
        folder.mkdir()
        prepare(folder)
        with page_server(folder) as server:
            print(dict(fuzz(server, chosen.seed, chosen.count)))
            print(f"20 clients waited {max(poll_together(server, 20, 10)):.2f} s at most")


if __name__ == "__main__":
    main()
