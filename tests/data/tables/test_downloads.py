"""Lists of addresses: downloaded once, whatever the network does, and read like a folder."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import downloading
import pytest
from PIL import Image
from tabled import scan_table, write_rows
from video_files import SIZE, numbers_of, write_video

from simpletuner.data.config.dataset_types import UrlImages
from simpletuner.data.config.datasets import load_datasets
from simpletuner.data.tables import downloads
from simpletuner.data.tables.downloads import as_folder, download
from simpletuner.errors import DataError, Stopped
from simpletuner.settings.declared.sections import Data


@dataclass
class Server:
    """Images by path, and how often each path was asked for; `faults` are the statuses of its first answers."""

    address: str
    content: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[int]] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(downloads, "WAIT_SECONDS", 0.001)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked[self.path] += 1
            faults = state.faults.get(self.path, [])
            status = faults.pop(0) if faults else 200 if self.path in state.content else 404
            content = state.content.get(self.path, b"")
            self.send_response(max(status, 200))
            if status == 302:
                self.send_header("Location", content.decode())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if status == 0 else content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    class Listening(ThreadingHTTPServer):
        request_queue_size = 64  # with the usual 5, a connection of many waits a second for its second attempt

    served = Listening(("127.0.0.1", 0), Handler)
    state = Server(f"http://127.0.0.1:{served.server_port}")
    thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield state
    served.shutdown()
    served.server_close()


def image(kind: str, side: int = 64) -> bytes:
    with io.BytesIO() as file:
        Image.new("RGB", (side, 64), "red").save(file, kind)
        return file.getvalue()


def urls(folder: Path, server: Server, *paths: str, table: str = "urls.csv", **values) -> UrlImages:
    rows = [{"url": server.address + path if path[0] == "/" else path, "text": f"of {path}"} for path in paths]
    given = {"caption_strategy": "csv", "csv_caption_column": "text", "resolution": 64, **values}
    listed = write_rows(folder / table, rows)
    return UrlImages(id="d", type="csv", csv_file=listed, csv_cache_dir=folder / "cache", **given)


def fetched(dataset: UrlImages) -> downloads.Downloads:
    return download(dataset, lambda: None, lambda count: None)


def test_a_list_becomes_a_folder_with_captions_and_is_downloaded_once(server, tmp_path):
    server.content = {"/a.jpg": image("JPEG"), "/b?x=1": image("PNG", 80), "/c": image("WEBP", 96)}
    server.faults = {"/a.jpg": [503, 429], "/c": [0]}
    dataset = urls(tmp_path, server, "/a.jpg", "/b?x=1", "/c", "/a.jpg")
    found = fetched(dataset)
    assert (found.count, found.lost, found.unreachable) == (3, {}, {})
    assert server.asked == {"/a.jpg": 3, "/b?x=1": 1, "/c": 2}
    before = sorted((tmp_path / "cache").iterdir())
    fetched(dataset)
    assert server.asked.total() == 6 and sorted((tmp_path / "cache").iterdir()) == before
    samples = found_in(dataset)
    assert sorted((each.geometry.original.width, each.captions) for each in samples) == [
        (64, ("of /a.jpg",)),
        (80, ("of /b?x=1",)),
        (96, ("of /c",)),
    ]
    fewer = urls(
        tmp_path, server, "/c", caption_strategy="instanceprompt", instance_prompt="p", csv_caption_column=None
    )
    fetched(fewer)
    assert [each.captions for each in found_in(fewer)] == [("p",)]


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_a_list_of_videos_becomes_clips_and_what_is_no_video_is_named(server, tmp_path, suffix):
    kinds = (".mp4", ".mkv", ".webm", ".avi", ".gif", ".webp")
    server.content = {
        f"/{number}": write_video(tmp_path / f"a{kind}").read_bytes() for number, kind in enumerate(kinds)
    }
    server.content |= {"/a.png": image("PNG"), "/cut.mp4": server.content["/0"][:40]}
    server.faults = {"/1": [503], "/2": [0]}
    asked = [f"/{number}" for number in range(6)]
    video = {"dataset_type": "video", "video": {"num_frames": 9}}
    dataset = urls(tmp_path, server, *asked, "/a.png", "/cut.mp4", table=f"urls{suffix}", **video)
    found = fetched(dataset)
    lost = {url.removeprefix(server.address): why for url, why in found.lost.items()}
    assert found.count == 6 and lost.pop("/a.png") == "is no video in a format that is read"
    assert lost == {"/cut.mp4": "is not a video in a known format, or is damaged"} and not found.unreachable
    samples = found_in(dataset)
    assert sorted(each.captions for each in samples) == [(f"of {path}",) for path in asked]
    for sample in samples:
        assert numbers_of(list(sample.images(SIZE))) == list(range(9)), sample.name
    again = server.asked.total()
    assert fetched(dataset).count == 6 and server.asked.total() == again + 2, "only what was lost is asked for again"
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_a_stop_ends_a_long_download_and_a_video_beyond_the_limit_is_named(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "BLOCK_BYTES", 100)
    server.content = {"/a.mp4": write_video(tmp_path / "a.mp4").read_bytes()}
    dataset = urls(tmp_path, server, "/a.mp4", dataset_type="video")
    (tmp_path / "cache").mkdir()
    stopping = threading.Event()
    stopping.set()
    with pytest.raises(InterruptedError):
        downloads.fetch(dataset, f"{server.address}/a.mp4", stopping)
    monkeypatch.setattr(downloads, "LARGEST_READ", 200)
    assert [*fetched(dataset).lost.values()] == ["has more than 200 bytes"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [downloads.INDEX]


def found_in(dataset: UrlImages):
    folder = as_folder(dataset)
    block = folder.model_dump(mode="json", exclude_none=True)["parquet"]
    clips = {"dataset_type": "video", "video": folder.video.model_dump(exclude_none=True)} if folder.video else {}
    values = clips | {"caption_strategy": folder.caption_strategy, "instance_prompt": folder.instance_prompt}
    return scan_table(
        folder.instance_data_dir, Path(block.pop("path")), block, metadata_backend="parquet", **values
    ).found.samples


def test_what_is_lost_is_named_and_what_may_come_back_is_not_given_up(server, tmp_path):
    server.content = {
        "/a.png": image("PNG"),
        "/page": b"<html>",
        "/cut.png": image("PNG")[:20],
        "/to": b"file:///etc/passwd",
    }
    server.content["/down.png"] = image("PNG", 80)
    server.faults = {"/down.png": [500] * 5, "/to": [302]}
    dataset = urls(
        tmp_path,
        server,
        "/a.png",
        "/page",
        "/cut.png",
        "/gone.png",
        "/to",
        "file:///etc/hosts",
        "http://[",
        "/down.png",
    )
    found = fetched(dataset)
    lost = {url.removeprefix(server.address): why for url, why in found.lost.items()}
    assert lost.pop("/cut.png") and lost.pop("http://[").startswith("is no ")
    assert lost == {
        "/page": "is no image in a format that is read",
        "/gone.png": "HTTP 404",
        "/to": "HTTP 302",
        "file:///etc/hosts": "is no http:// or https:// address",
    }
    assert [url.removeprefix(server.address) for url in found.unreachable] == ["/down.png"]
    assert not (tmp_path / "cache" / downloads.INDEX).exists()
    asked = server.asked["/a.png"]
    again = fetched(dataset)
    assert again.count == 2 and again.unreachable == {} and server.asked["/a.png"] == asked
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.name != downloads.INDEX] == [".png", ".png"]


def test_two_machines_download_a_shared_folder_once_and_only_what_their_own_lacks(server, starter, tmp_path):
    contents = {"a.png": image("PNG"), "b.jpg": image("JPEG", 80), "c.webp": image("WEBP", 96)}
    cases = tmp_path / "cases"
    hashed: dict[str, Path] = {}
    for case in ("shared", "apart", "partly", "left", "unequal"):
        paths = [f"/{case}/{name}" for name in contents]
        server.content |= dict(zip(paths, contents.values(), strict=True))
        (cases / case).mkdir(parents=True)
        urls(cases / case, server, *paths)
        hashed |= {path: Path(downloads.name_of(server.address + path) + Path(path).suffix) for path in paths}
    for case in ("shared", "left"):
        (cases / case / "shared").mkdir()
    for rank, name in enumerate(("a.png", "b.jpg")):  # each machine has another one
        (cases / "partly" / f"rank{rank}").mkdir()
        (cases / "partly" / f"rank{rank}" / hashed[f"/partly/{name}"]).write_bytes(contents[name])
    half = cases / "left" / "shared" / f".{hashed['/left/a.png'].stem}.unfinished"
    half.write_bytes(contents["a.png"][:9])  # a killed start has left it
    server.faults = {"/shared/a.png": [0], "/unequal/b.jpg": [200, 404]}

    run = starter.start(downloading.download_cases, 2, str(cases), str(tmp_path / "report.json"))
    assert run.wait() == [0, 0], run.said
    said = json.loads((tmp_path / "report.json").read_text())
    asked = {case: [server.asked[f"/{case}/{name}"] for name in contents] for case in said}
    assert asked == {"shared": [2, 1, 1], "apart": [2] * 3, "partly": [1, 1, 2], "left": [1] * 3, "unequal": [2] * 3}
    assert all(one == two for one, two in said.values()), "both machines say the same"
    assert said.pop("unequal")[0].startswith("4: the table of dataset `d` has other content on rank 1 ")
    assert all(f"of /{case}/{name}" in one for case, (one, _) in said.items() for name in contents)
    files = [path for path in cases.glob("*/*/*.*") if path.suffix in (".png", ".jpg", ".webp")]
    assert len(files) == 3 + 3 + 6 + 6 + 5 and all(path.read_bytes() in contents.values() for path in files)
    assert not [*cases.rglob(".*.unfinished")]


def test_two_commands_at_once_download_a_folder_once(server, tmp_path):
    paths = [f"/{number}.png" for number in range(20)]
    server.content = dict.fromkeys(paths, image("PNG"))
    dataset = urls(tmp_path, server, *paths)
    with ThreadPoolExecutor(2) as commands:
        found = [each.result().count for each in [commands.submit(fetched, dataset) for _ in range(2)]]
    assert found == [20, 20] and server.asked.total() == 20
    assert len([*(tmp_path / "cache").iterdir()]) == 21


def test_a_stop_is_answered_and_the_rest_comes_later(server, tmp_path):
    paths = [f"/{number}.png" for number in range(40)]
    server.content = dict.fromkeys(paths, image("PNG"))
    dataset = urls(tmp_path, server, *paths)
    stops = iter(range(100))

    def stop() -> None:
        if next(stops) > 1:
            raise Stopped(15, "stopped")

    with pytest.raises(Stopped):
        download(dataset, stop, lambda count: None)
    first = server.asked.total()
    assert 0 < first < 40
    assert fetched(dataset).count == 40 and server.asked.total() == 40


def test_mistakes_name_the_keys_of_the_list(server, tmp_path):
    dataset = urls(tmp_path, server, "/a", csv_url_column="link", csv_caption_column="text")
    with pytest.raises(DataError) as caught:
        fetched(dataset)
    assert "has no column `link`" in caught.value.message and caught.value.hint.startswith("correct csv_url_column; ")
    path = tmp_path / "d.json"
    for values, said in (
        ('"caption_strategy": "csv"', "csv_caption_column ("),
        ('"caption_strategy": "textfile"', "images of type csv have csv or instanceprompt"),
        ('"caption_strategy": "csv", "metadata_backend": "parquet"', "have their table in csv_file: leave it out"),
        ('"instance_data_dir": "x"', "only images of type local have it"),
    ):
        path.write_text(f'[{{"id": "d", "type": "csv", "csv_file": "u.csv", "csv_cache_dir": "c", {values}}}]')
        with pytest.raises(Exception, match="d.json:1, dataset `d`") as mistake:
            load_datasets(Data(data_backend_config=path))
        assert said in str(mistake.value)
