r"""Completion scripts. They ask the program itself: no command and no flag is named here, so that none can go stale.

All send the command up to the cursor, get `word<TAB>meaning` per line, and fall back to files where there is none.
"""

from __future__ import annotations

LINE = "_SIMPLETUNER_LINE"
"""The environment variable in which a shell passes the command up to the cursor."""

PROGRAMS: dict[str, tuple[str, ...]] = {"simpletuner": (), "simpletuner-train": ("train",)}
"""The programs, and the subcommand that each one is."""

BASH = r"""# bash breaks words at `=`, so of `--flag=value` only the value is replaced.
_simpletuner() {
    local word
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        [[ $word == -*=* && $COMP_WORDBREAKS == *=* ]] && word=${word#*=}
        COMPREPLY+=("$word")
    done < <(LINE="${COMP_LINE:0:COMP_POINT}" "${1/#\~/$HOME}" 2>/dev/null)
}
complete -o default -F _simpletuner PROGRAMS
"""

ZSH = r"""#compdef PROGRAMS
_simpletuner() {
    local answer word program=${${(Q)words[1]}/#\~/$HOME}
    local -a found
    for answer in ${(f)"$(LINE="${(j: :)words[1,CURRENT-1]} $PREFIX" $program 2>/dev/null)"}; do
        word=${answer%%$'\t'*}
        [[ $word == -*=* ]] && word=${word#*=}
        found+=("${word//:/\\:}:${answer#*$'\t'}")
    done
    [[ $PREFIX == -*=* ]] && compset -P 1 '*='
    if (( $#found )); then
        _describe -V simpletuner found -M 'm:{a-zA-Z-_}={A-Za-z_-}'
    else
        _files
    fi
}
if [[ $funcstack[1] == _simpletuner ]]; then
    _simpletuner "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _simpletuner PROGRAMS
fi
"""

FISH = r"""function __simpletuner_complete
    set -l program (string match -r '^(?:.*/)?simpletuner(?:-train)?$' -- (commandline -opc))[1]
    set -q program[1]; or set program simpletuner # an abbreviation of it was typed
    set program (string replace -r '^~/' "$HOME/" -- $program)
    set -l found (LINE=(commandline -cp) $program 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
        return
    end
    set -l word (commandline -ct)
    set -l flag (string match -r '^-[^=]*=' -- $word)
    for path in (__fish_complete_path (string replace -r '^-[^=]*=' '' -- $word))
        printf '%s\n' "$flag$path"
    end
end
complete -c{PROGRAMS} -f -k -a '(__simpletuner_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

INSTALL = {
    "bash": "simpletuner completion bash > ~/.simpletuner.bash && echo 'source ~/.simpletuner.bash' >> ~/.bashrc",
    "zsh": "simpletuner completion zsh > ~/.simpletuner.zsh && echo 'source ~/.simpletuner.zsh' >> ~/.zshrc",
    "fish": "simpletuner completion fish > ~/.config/fish/conf.d/simpletuner.fish",
}


def script_for(shell: str) -> str:
    names = (",".join if shell == "fish" else " ".join)(PROGRAMS)
    return SCRIPTS[shell].replace("PROGRAMS", names).replace("LINE=", f"{LINE}=")
