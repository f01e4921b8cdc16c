"""Mutate settings files of all kinds, give them to the real commands, and see that each answer keeps our promises.

    .venv/bin/python tests/campaigns/fuzz.py --cases 5000      # about 4 minutes on one core
    .venv/bin/python tests/campaigns/fuzz.py --case 123        # one of them, with its files and all that is printed

Promised: exit code 0 or 2 (3 or 4 for a named file or folder that cannot be used), no traceback, no "bug", no control
characters on a terminal, an answer within 5 s, a place in each sentence; `config validate` and `train --dry_run` say
the same; what is exported and read again means the same settings; what `config import` writes is valid, or is answered
like any other file. `tests/end_to_end/test_campaigns.py` runs a small sample.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]

from mutations import Case, draw_case  # noqa: E402
from settings_files import MODEL  # noqa: E402

from simpletuner import app  # noqa: E402
from simpletuner.run_log import CONTROLS  # noqa: E402
from simpletuner.settings import load  # noqa: E402
from simpletuner.settings.showing.clusters import CLUSTERS  # noqa: E402
from simpletuner.settings.showing.export import FORMATS, export  # noqa: E402

MOST_SECONDS = 5
HANG_SECONDS = 60
SHOWN = 3
"""Problems of one sort that are printed."""
CODES = (0, 2)
UNUSABLE = re.compile(r"cannot (read|use)|there is no folder|offload_param_path = ")
"""Answers that may end with 3 or 4: they are about what a file names."""
WITHOUT_PLACE = re.compile(r"(error: )?(model_family is missing|no images: give)|warning: deepspeed is not installed")
"""What is nowhere has no place."""
WHOLE_FILE = re.compile(
    r"cannot read|does not parse: (its brackets|a whole number|duplicate key)|holds (a list|one value)"
    r"|must hold a list|names no dataset|dataset `.*`: there is no folder"
    r"|is no accelerate|in lines \d|ha(s|ve) no effect here|with another default here|passed on to the ranks"
    r"|is read by every run|has no dataset of images|is imported already|holds none of config"
    r"|asks for what this version does not do|is a file of|says nothing; here it is"
)
"""Answers about a file rather than a line of it."""
NO_SENTENCE = re.compile(
    r"^hint: .*\n|^.*settings, all valid\n|^  and [\d,]+ more\n"
    r"|^.*(settings, \d+ with a remark|datasets taken); .*\n",
    re.MULTILINE,
)
"""What stands beside mistakes and warnings, each of which is a line."""


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str
    seconds: float


def ask(*arguments: str) -> Answer:
    """Run the command line in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    began = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app.main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Answer(code, out.getvalue(), err.getvalue(), time.process_time() - began)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def folder_of(case: Case) -> Iterator[None]:
    """Stand in a folder with the files of a case, in an environment that says nothing of settings."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ.clear()
        os.environ.update({"PATH": before["PATH"], "HOME": folder, "COLUMNS": "100", "HF_TOKEN": "hf_x"})
        alarm = signal.signal(signal.SIGALRM, interrupt)
        try:
            case.write()
            yield
        finally:
            signal.signal(signal.SIGALRM, alarm)
            os.environ.clear()
            os.environ.update(before)


@dataclass
class Fuzz:
    """Cases drawn from a seed; `problems` is empty if all promises held."""

    seed: int
    problems: list[str] = field(default_factory=list)
    codes: Counter[tuple[str, int]] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    verbose: bool = False
    imports: Counter[int] = field(default_factory=Counter)
    """Exit codes of `config import`."""
    imported: Counter[int] = field(default_factory=Counter)
    """Exit codes of `config validate` for what it has written."""

    def remarks(self) -> list[str]:
        return [f"import: {dict(self.imports)}; validate of what it has written: {dict(self.imported)}"]

    def run(self, cases: range) -> None:
        for number in cases:
            self.run_case(number)

    def run_case(self, number: int) -> None:
        draw = random.Random(f"{self.seed}-{number}")
        case = draw_case(draw)
        with folder_of(case):
            code, problems = self.judge(case, draw)
        self.codes[case.kind, code] += 1
        for problem in problems:
            self.note(f"case {number}: {case.kind} ({', '.join(case.done)}): {problem}")

    def note(self, problem: str) -> None:
        """Keep a problem, and print it: what is found must survive a campaign that is stopped."""
        self.problems.append(problem)
        sort = re.sub(r"^case.*?\): |`[^`]*`|'[^']*'|= .*? \(|\d+", "", problem)[:100]
        self.seen[sort] += 1
        if self.seen[sort] <= SHOWN:
            print(problem, flush=True)

    def judge(self, case: Case, draw: random.Random) -> tuple[int, list[str]]:
        """Return the exit code of a case, and which promises its answers break."""
        checked = ask("config", "validate", case.config)
        tried = ask("train", "--dry_run", f"--config={case.config}")
        problems = [*broken_promises(case, checked), *broken_promises(case, tried)]
        said = re.sub(r".*: \d+ settings, all valid\n\Z", "", checked.err)
        if (checked.code, said) != (tried.code, tried.err):
            problems.append(f"VALIDATE AND DRY RUN DIFFER: {checked.code} {said}--- {tried.code} {tried.err}")
        if self.verbose:
            print(case.kind, case.done, *(f"--- {name}\n{text!r}" for name, text in case.files.items()), sep="\n")
            print(f"$ validate\n{checked.err}exit {checked.code}\n$ dry run\n{tried.out}{tried.err}exit {tried.code}")
        if checked.code == 0:
            problems += replay(case, draw)
        problems += (
            problem for source in dict.fromkeys((case.config, case.odd)) for problem in self.judge_import(case, source)
        )
        return checked.code, list(dict.fromkeys(problems))

    def judge_import(self, case: Case, source: str) -> Iterator[str]:
        """Yield which promises `config import` breaks, and what is wrong with the file that it writes."""
        answer = ask("config", "import", source)
        self.imports[answer.code] += 1
        if self.verbose:
            print(f"$ import {source}\n{answer.out}{answer.err}exit {answer.code}")
        yield from (f"IMPORT: {problem}" for problem in broken_promises(case, answer))
        partial = ("--partial",) if answer.code else ()
        if answer.code:
            answer = ask("config", "import", source, *partial)
            yield from (f"IN PART: {problem}" for problem in broken_promises(case, answer))
        if answer.code:
            return
        new = "new.json" if answer.out.startswith("[") else "new.toml"
        again = ask("config", "import", source, f"--output={new}", "--force", *partial)
        if again.code:
            yield f"NOT WRITTEN\n{again.err}"
            return
        if new == "new.json":
            Path("n.json").write_text(json.dumps(MODEL | {"data_backend_config": new}, indent=1))
        names = [name for name in (new, "new.datasets.json", "n.json") if Path(name).exists()]
        written = {name: Path(name).read_bytes() for name in names}
        checked = ask("config", "validate", "n.json" if new == "new.json" else new)
        self.imported[checked.code] += 1
        if self.verbose:
            print(*written.values(), f"$ validate\n{checked.err}exit {checked.code}", sep="\n")
        both = replace(case, files=case.files | written)
        yield from (f"IMPORTED: {problem}" for problem in broken_promises(both, checked))


def broken_promises(case: Case, answer: Answer) -> Iterator[str]:
    """Yield what is wrong with one answer."""
    said = answer.err
    if answer.code == 130:
        yield f"HANG\n{said}"
    elif answer.code not in CODES and not (answer.code in (3, 4) and UNUSABLE.search(said)):
        yield f"EXIT CODE {answer.code}\n{said}"
    if "Traceback" in said or "this is a bug" in said:
        yield f"BUG\n{said}"
    if answer.code and (answer.out or said.count("error: ") < 1):  # a sentence may say itself what to do
        yield f"NO SENTENCE\n{said}"
    if CONTROLS.search(said) or CONTROLS.search(answer.out):
        yield f"CONTROL CHARACTER {(CONTROLS.search(said) or CONTROLS.search(answer.out))}\n{said!r}"
    if answer.seconds > MOST_SECONDS:
        yield f"SLOW: {answer.seconds:.0f} s\n{said[:300]}"
    yield from (f"NO PLACE\n{line}" for line in NO_SENTENCE.sub("", said).splitlines() if not has_place(case, line))


def has_place(case: Case, line: str) -> bool:
    """Whether a sentence names one of the files, with the line, the dataset or the key where it is about a part."""
    named = [name for name in case.files if name in line]
    whole = WHOLE_FILE.search(line) or "ds.json" in named  # its keys are named, not its lines
    exact = any(re.search(rf"{re.escape(name)}(:\d|\[\d)", line) for name in named)
    return bool((named and (whole or exact)) or WITHOUT_PLACE.match(line.strip()))


def replay(case: Case, draw: random.Random) -> Iterator[str]:
    """Yield what differs when settings are exported and read again."""
    wanted, problem = shown(f"--config={case.config}")
    if wanted is None:
        yield f"VALID, BUT NOT SHOWN\n{problem}"
        return
    table = ask("config", "show", "--all", f"--config={case.config}")
    if CONTROLS.search(table.out) or table.code:
        yield f"CONTROL CHARACTER IN A TABLE\n{table.out!r}"
    to = draw.choice(
        [name for name in FORMATS if name not in CLUSTERS and (name != "deepspeed" or wanted["zero_stage"])]
    )
    saved = ask("config", "export", f"--to={to}", "--output=saved", f"--config={case.config}")
    if saved.code:
        yield f"NOT EXPORTED to {to}\n{saved.err}"
        return
    exported = export(load({}, Path(case.config), complete=False), to)
    Path("saved").rename(exported.name or "saved")
    flags = exported.command[exported.command.index("train") + 1 :]
    again, problem = shown(*flags, *(["--accelerate_config=accelerate.yaml"] if to == "accelerate" else []))
    if again != wanted:
        found = {name: (value, again[name]) for name, value in wanted.items() if value != again[name]} if again else ""
        yield f"ANOTHER MEANING after an export to {to}: {found}{problem}"


def shown(*flags: str) -> tuple[dict[str, Any] | None, str]:
    """Return the value of each setting, or why there are none."""
    answer = ask("config", "show", "--all", "--json", *flags)
    if answer.code:
        return None, answer.err
    return {name: row["value"] for name, row in json.loads(answer.out).items()}, ""


def run_campaign(fuzz_class: Any, cases: int, description: str | None) -> None:
    """Run a campaign of `cases`, or one case of it, as the command line says, and print what was found."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="Run this one alone.")
    given = parser.parse_args()
    fuzz = fuzz_class(given.seed, verbose=given.case is not None)
    fuzz.run(range(given.cases) if given.case is None else range(given.case, given.case + 1))
    for (kind, code), count in sorted(fuzz.codes.items()):
        print(f"{kind}: exit code {code}: {count}")
    for sort, count in fuzz.seen.most_common():
        print(f"{count} x {sort!r}")
    print(f"{sum(fuzz.codes.values())} cases: {len(fuzz.problems)} problems")
    for line in fuzz.remarks():
        print(line)
    raise SystemExit(bool(fuzz.problems))


if __name__ == "__main__":
    run_campaign(Fuzz, 5000, __doc__)
