"""The list of runs, the page of one, its images, and starting and stopping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from simpletuner.errors import SettingsError, SimpleTunerError, explain_os_error
from simpletuner.page.configurations import list_files
from simpletuner.page.queue import waiting as queue
from simpletuner.page.queue.waiting import MachineBusy, queue_fragment, queue_of
from simpletuner.page.rendering import field, folders_of, render, respond, respond_error, toast
from simpletuner.page.runs import results, samples, watching
from simpletuner.page.runs.fragments import Fragment, KeptRows, fragments_of, view_of, watched_of
from simpletuner.page.runs.processes import leave_run, stop_run
from simpletuner.runs.folder import RunFolder, open_run
from simpletuner.runs.gallery import FILE
from simpletuner.runs.images import MP4
from simpletuner.runs.listing import RunList
from simpletuner.runs.settings_record import SETTINGS, base_of, read_settings

STOP_POLLING = 286
"""HTTP status by which htmx ends a poll."""
# Longer sides of images: in the grid over all steps, and of the step that the slider shows.
EDGES_PX = (160, 512)


def show_list(request: Request) -> Response:
    files = list_files(folders_of(request))
    fragments = {"queue": queue_fragment(request), "rows": list_fragment(request)}
    return respond(request, "runs/list", title="Runs", fragments=fragments, files=files)


def poll_list(request: Request) -> Response:
    return news(request, lambda: [queue_fragment(request), list_fragment(request)])


def run_list(request: Request) -> RunList:
    return request.app.state.runs


def list_fragment(request: Request) -> Fragment:
    kept: KeptRows = request.app.state.rows
    return kept.fragment(run_list(request).summaries(), folders_of(request).roots)


def show_run(request: Request) -> Response:
    runs, smoothing = view_of(request)
    names = [run.name for run in runs]
    others = [run.name for run in run_list(request).runs() if run.name not in names]
    query = urlencode({"run": names[0], "with": names[1:], "smoothing": smoothing}, doseq=True)
    values = {
        "names": names,
        "others": others,
        "smoothings": tuple(watching.SMOOTHING),
        "smoothing": smoothing,
    }
    fragments = {each.name: each for each in fragments_of(request, runs, smoothing)}
    settings = read_settings(runs[0].path / SETTINGS) if runs[0].file(SETTINGS) is not None else None
    base, is_lora = base_of(settings or {}), (settings or {}).get("model_type") == "lora"
    shown = {"fragments": fragments, "base": base, "is_lora": is_lora, "images": samples.images_taken(runs[0])}
    return respond(request, "runs/run", title=names[0], query=query, **shown, **values)


def poll_run(request: Request) -> Response:
    return news(request, lambda: fragments_of(request, *view_of(request)))


def news(request: Request, make: Callable[[], list[Fragment]]) -> Response:
    """Return the parts that differ from those that the page has; 204 where there is nothing new."""
    try:
        fragments = make()
    except (SimpleTunerError, OSError) as error:  # a folder that is gone is said once, not every two seconds
        refused = explain_os_error(error) if isinstance(error, OSError) else error
        return respond_error(request, refused, STOP_POLLING)
    texts = [each.html() for each in fragments if field(request, f"seen-{each.name}") != each.key]
    # htmx swaps nothing at 204.
    return HTMLResponse("".join(texts)) if texts else Response(status_code=204)


def show_image(request: Request) -> Response:
    """Validation image as WebP; a clip's moves."""
    edge = field(request, "edge", str(EDGES_PX[0]))
    if edge not in map(str, EDGES_PX):
        raise samples.no_image()
    run, path = image_of_round(request)
    watched = watched_of(request).of(run)
    with watched.lock:
        content = watched.gallery.thumbnail(path, int(edge))
    # The address has the time of the start, so a start that makes the image again has another one.
    return Response(content, media_type="image/webp", headers={"Cache-Control": "private, max-age=3600"})


def play_clip(request: Request) -> Response:
    run, path = image_of_round(request)
    return samples.send_clip(run, f"validation/{path.parent.name}/{path.with_suffix(MP4).name}")


def image_of_round(request: Request) -> tuple[RunFolder, Path]:
    """The PNG that a request names. Its place is put together here, from parts that cannot lead elsewhere."""
    run = open_run(folders_of(request), field(request, "run"))
    name, step = field(request, "name"), field(request, "step")
    path = None
    # Python refuses to convert more than 4,300 digits.
    if FILE.fullmatch(name) and step.isascii() and step.isdecimal() and len(step) < 12:
        path = run.file(f"validation/step-{int(step):06d}/{name}")
    if path is None:
        raise samples.no_image()
    return run, path


def start(request: Request) -> Response:
    """Start a run, and go to its page. Where GPUs are taken, offer the queue."""
    name, checkpoint = field(request, "file"), field(request, "checkpoint")
    if not name:
        raise SettingsError("which configuration?", "choose a file")
    try:
        run = queue_of(request).start(name, checkpoint, field(request, "anyway") == "on")
    except MachineBusy as busy:
        offer = render("runs/offer", busy=busy, chosen={"file": name, "checkpoint": checkpoint})
        return HTMLResponse(offer, headers={"HX-Reswap": "none"})
    return HTMLResponse(headers={"HX-Redirect": f"/runs/watch?{urlencode({'run': run.name})}"})


def stop(request: Request) -> Response:
    run = open_run(folders_of(request), field(request, "run"))
    pid = stop_run(request, run)
    said = toast(f"{run.name} is asked to stop (pid {pid})", "it finishes its step and saves a checkpoint")
    return HTMLResponse(said, headers={"HX-Reswap": "none"})


def leave(request: Request) -> Response:
    run = open_run(folders_of(request), field(request, "run"))
    pid = leave_run(request, run)
    said = toast(f"{run.name} is asked to leave at once (pid {pid})", "its last checkpoint is what is left of it")
    return HTMLResponse(said, headers={"HX-Reswap": "none"})


ROUTES = [
    Route("/runs", show_list),
    Route("/runs/rows", poll_list),
    Route("/runs/watch", show_run),
    Route("/runs/watch/news", poll_run),
    Route("/runs/image", show_image),
    Route("/runs/clip", play_clip),
    Route("/runs/start", start, methods=["POST"]),
    Route("/runs/stop", stop, methods=["POST"]),
    Route("/runs/leave", leave, methods=["POST"]),
    *queue.ROUTES,
    *results.CHECKPOINT_ROUTES,
    *results.ROUTES,
    *samples.ROUTES,
]
