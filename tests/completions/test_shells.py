from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import shells
from shells import ROOT, SCRIPTS, Fish, TypedShell, environment, opened

from simpletuner.models.catalog.registry import flavours_of

CHECKED_IN = {"bash": "simpletuner.bash", "zsh": "_simpletuner", "fish": "simpletuner.fish"}


def needed(shell: str) -> str:
    """Return the shell; a developer may do without it, CI may not."""
    if shutil.which(shell) is None:
        assert "CI" not in os.environ, f"{shell} is not installed: `make tools` installs it"
        pytest.skip(f"{shell} is not installed (`make tools`)")
    return shell


@pytest.fixture(scope="module", params=list(CHECKED_IN))
def shell(request, tmp_path_factory):
    shell = opened(needed(request.param), tmp_path_factory.mktemp(request.param))
    yield shell
    shell.close()


@pytest.mark.parametrize("name", CHECKED_IN)
def test_the_checked_in_scripts_are_what_the_command_prints(name):
    command = [SCRIPTS / "simpletuner", "completion", name]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stderr == ""
    assert printed.stdout == (ROOT / "completions" / CHECKED_IN[name]).read_text(), "run `make completions`"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("simpletuner train --mixed_precision ", {"no", "bf16"}),
        ("simpletuner train --mixed_precision=", {"no", "bf16"}),
        ("simpletuner-train --mixed_precision=b", {"bf16"}),
        ("simpletuner train --model_family flux --model_flavour ", {*flavours_of("flux"), "tiny"}),
        ("simpletuner completion ", {"bash", "zsh", "fish"}),
        ("simpletuner train --fsdp_version=2 --fsdp_v", set()),
        ("simpletuner train --instance_prompt 'a b' --model_typ", {"--model_type"}),
        ("cd . && X=1 simpletuner train --model_typ", {"--model_type"}),
    ],
)
def test_a_shell_offers(shell, typed, offered):
    """What differs between shells: the answers themselves are in `commands/shell/test_completions.py`."""
    assert set(shell.candidates(typed)) == offered


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("simpletuner tr", "simpletuner train "),
        ("simpletuner train --fsdp-e", "simpletuner train --fsdp-enable "),
        ("simpletuner train --mixed_precision=b", "simpletuner train --mixed_precision=bf16 "),
        ("simpletuner train --fsdp_state_dict_type sh", "simpletuner train --fsdp_state_dict_type SHARDED_STATE_DICT "),
        ("simpletuner train --instance_data_dir pi", "simpletuner train --instance_data_dir pictures/"),
        ("simpletuner train --instance_data_dir=pi", "simpletuner train --instance_data_dir=pictures/"),
        ("simpletuner-train --config=./pr", "simpletuner-train --config=./prompts.txt "),
        (f"{SCRIPTS}/simpletuner-train --model_typ", f"{SCRIPTS}/simpletuner-train --model_type "),
    ],
)
def test_one_tab_completes(shell, typed, completed):
    assert shell.tab(typed) == completed


def test_every_command_is_offered(shell):
    assert {"train", "completion"} <= set(shell.candidates("simpletuner "))


def test_fish_and_zsh_show_what_a_word_means(shell):
    typed, meaning = "simpletuner train --train_b", "Samples per rank in one forward pass. [default: 4]"
    if isinstance(shell, Fish):
        assert shell.described(typed) == {"--train_batch_size": meaning}
    elif shell.name == "zsh":
        shell.tab("simpletuner train --t")  # zsh lists only what it cannot decide
        assert shell.draws(meaning)


def test_bash_completes_values_when_it_does_not_break_words_at_equals_signs(tmp_path):
    bash = opened(needed("bash"), tmp_path)
    assert isinstance(bash, TypedShell)
    bash.press("COMP_WORDBREAKS=${COMP_WORDBREAKS//=}\n")
    assert bash.tab("simpletuner train --mixed_precision=b") == "simpletuner train --mixed_precision=bf16 "
    bash.close()


def test_zsh_finds_the_script_on_its_function_path(tmp_path):
    needed("zsh")
    keys = f"fpath=({ROOT / 'completions'} $fpath); autoload -Uz compinit && compinit -u\n{shells.ZSH_KEYS}"
    zsh = TypedShell(["zsh", "-f", "-i"], keys, tmp_path)
    assert zsh.tab("simpletuner train --mixed_precision=b") == "simpletuner train --mixed_precision=bf16 "
    zsh.close()


def test_a_terminal_is_told_how_to_install_and_a_file_is_not(tmp_path):
    ask = f"simpletuner completion fish 2> {tmp_path}/talk"
    subprocess.run(["script", "-qec", ask, "/dev/null"], env=environment(tmp_path), capture_output=True, check=True)
    assert "conf.d/simpletuner.fish" in (tmp_path / "talk").read_text()
