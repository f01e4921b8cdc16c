# bash breaks words at `=`, so of `--flag=value` only the value is replaced.
_simpletuner() {
    local word
    COMPREPLY=()
    while IFS=$'\t' read -r word _; do
        [[ $word == -*=* && $COMP_WORDBREAKS == *=* ]] && word=${word#*=}
        COMPREPLY+=("$word")
    done < <(_SIMPLETUNER_LINE="${COMP_LINE:0:COMP_POINT}" "${1/#\~/$HOME}" 2>/dev/null)
}
complete -o default -F _simpletuner simpletuner simpletuner-train
