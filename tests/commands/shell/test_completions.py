from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, get_origin

import pytest
import typer
from pydantic import TypeAdapter, ValidationError
from typer.main import get_command

from simpletuner.app import command_of
from simpletuner.commands.shell.completions import completions_for, words_of
from simpletuner.commands.shell.scripts import PROGRAMS
from simpletuner.models.catalog.registry import flavours_of, presets
from simpletuner.settings.declared.sections import setting_fields
from simpletuner.settings.values.spelling import normalize_value

EVERY_FLAVOUR = dict.fromkeys(flavour for key in presets() for flavour in flavours_of(key))


def offered(line: str, program: str = "simpletuner") -> list[str]:
    return [candidate.word for candidate in completions_for(command_of(program), line, PROGRAMS)]


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@pytest.fixture
def other():
    """Commands that nobody announced to the tab key."""
    app, group = typer.Typer(add_completion=False), typer.Typer()

    @group.command("paint", help="Paint a wall.")
    def paint(
        wall: Path,
        colours: Annotated[list[Colour], typer.Argument()],
        dry_run: Annotated[bool, typer.Option("--dry_run/--no-dry_run")] = False,
        finish: Annotated[Colour, typer.Option("--finish", "-f", help="The last\ncoat.")] = Colour.RED,
        secret: Annotated[str, typer.Option(hidden=True)] = "",
    ) -> None: ...

    @group.command("scrape", hidden=True)
    def scrape() -> None: ...

    app.add_typer(group, name="wall", help="Look after walls.")
    app.command("other")(lambda: None)
    return get_command(app)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("st ", ["other", "wall"]),
        ("st w", ["wall"]),
        ("st wall ", ["paint"]),
        ("st wall paint --", ["--dry_run", "--no-dry_run", "--finish", "--help"]),
        ("st wall paint -", ["--dry_run", "--no-dry_run", "--finish", "-f", "--help"]),
        ("st wall paint --dry_run --", ["--finish", "--help"]),
        ("st wall paint --dry-", []),
        ("st wall paint -f ", ["red", "blue"]),
        ("st wall paint --finish=b", ["--finish=blue"]),
        ("st wall paint ", []),
        ("st wall paint here/", []),
        ("st wall paint here ", ["red", "blue"]),
        ("st wall paint -f red here r", ["red"]),
        ("st wall paint here red b", ["blue"]),
        ("st wall paint -- here -", []),
        ("st wall paint --dry_run=", []),
        ("st wall paint --no_such --fin", ["--finish"]),
        ("st nothing ", ["other", "wall"]),
    ],
)
def test_commands_are_read_from_typer(other, line, words):
    assert sorted(candidate.word for candidate in completions_for(other, line, PROGRAMS)) == sorted(words)


def test_meanings_are_whole_and_on_one_line(other):
    [group] = completions_for(other, "st wall", PROGRAMS)
    [finish] = completions_for(other, "st wall paint --fin", PROGRAMS)
    [batch] = completions_for(command_of("simpletuner"), "simpletuner train --train_b", PROGRAMS)
    assert (group.help, finish.help) == ("Look after walls.", "The last coat.")
    assert batch.help == "Samples per rank in one forward pass. [default: 4]"


def test_every_setting_is_offered_with_words_that_it_takes():
    taken = 0
    for name, declared in setting_fields().items():
        assert f"--{name}" in offered(f"simpletuner train --{name}")
        words = offered(f"simpletuner train --{name} ")
        assert offered(f"simpletuner train --{name}=") == [f"--{name}={word}" for word in words]
        accepts = TypeAdapter(declared.annotation)
        for word in words if name not in ("model_family", "model_flavour") else ():
            accepts.validate_python(normalize_value(name, declared, word))
            taken += 1
        if get_origin(declared.annotation) is Literal or declared.annotation is bool:
            assert len(words) > 1, name
            with pytest.raises(ValidationError):
                accepts.validate_python(normalize_value(name, declared, "nothing of these"))
    assert taken > 100


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model_family=", [f"--model_family={key}" for key in [*presets(), "auto"]]),
        ("--model-family flux --model_flavour ", [*flavours_of("flux"), "tiny"]),
        (
            "--model_family=SDXL --model_flavour=",
            [f"--model_flavour={name}" for name in (*flavours_of("sdxl"), "tiny")],
        ),
        ("--model_family=other --model_flavour ", [*EVERY_FLAVOUR, "tiny"]),
        ("--fsdp_auto_wrap_policy s", ["SIZE_BASED_WRAP"]),
        ("--accelerate_config ", []),
        ("--resume_from_checkpoint ", ["latest", "none"]),
        ("--resume_from_checkpoint out", []),
        ("--fsdp-cpu", ["--fsdp-cpu-ram-efficient-loading"]),
        ("--model_fam", ["--model_family"]),
        ("--model_famili", ["--model_families"]),
        ("--model_family=sdxl --model_fam", ["--model_families"]),
        ("--model_f", ["--model_family", "--model_flavour", "--model_families"]),
        ("--FSDP_V", ["--FSDP_Version"]),
        ("--checkpointing_steps 5 --checkpoint_step", []),
        ("--fsdp_enable --fsdp_v", ["--fsdp_version"]),
        ("--fsdp_enable y --fsdp_v", ["--fsdp_version"]),
        ("--fsdp_enable n", []),
        ("--fsdp_enable f", ["false"]),
        ("--validation_prompt a --validation_pr", ["--validation_prompt", "--validation_prompt_file"]),
        ("--seed -1 --mixed_p", ["--mixed_precision"]),
        ("--seed ", []),
        ("--no_such_flag x --mixed_p", ["--mixed_precision"]),
    ],
)
def test_training_flags_and_values(line, words):
    assert offered(f"simpletuner train {line}") == words
    assert offered(f"simpletuner-train {line}", "simpletuner-train") == words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("det", ["detect-blocks"]),
        ("detect-blocks --model_family=sdx", ["--model_family=sdxl"]),
        ("detect-blocks --model-family flux --model_flavour schn", ["schnell"]),
        ("detect-blocks --re", ["--refresh", "--revision"]),
        ("detect-blocks --apply ", []),
        ("models --", ["--json", "--check", "--class", "--help"]),
        ("recipes wan", ["wan-video"]),
        ("config init --recipe=wan", ["--recipe=wan-video"]),
        ("config s", ["show", "schema"]),
        ("train --model_flavour=b", [f"--model_flavour={name}" for name in EVERY_FLAVOUR if name.startswith("b")]),
    ],
)
def test_block_detection_is_completed_as_well(line, words):
    assert offered(f"simpletuner {line}") == words


def test_an_empty_word_offers_the_flags_where_nothing_else_can_come():
    flags = offered("simpletuner train ")
    assert flags == offered("simpletuner train --")
    assert {"--config", "--help", *(f"--{name}" for name in setting_fields())} <= set(flags)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("simpletuner", [""]),
        ("simpletuner tr", ["tr"]),
        ("simpletuner train ", ["train", ""]),
        ("X=1 sudo /opt/bin/simpletuner train", ["train"]),
        ("alias train", ["train"]),
        ("simpletuner 'a b' c\\ d", ["a b", "c d"]),
        ("simpletuner a\\ ", ["a "]),
        ("simpletuner 'open quote ", ["open quote "]),
        ("simpletuner --x=# ", ["--x=#", ""]),
    ],
)
def test_a_line_is_split_as_a_shell_does(line, words):
    assert words_of(line, PROGRAMS) == words
