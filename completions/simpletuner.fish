function __simpletuner_complete
    set -l program (string match -r '^(?:.*/)?simpletuner(?:-train)?$' -- (commandline -opc))[1]
    set -q program[1]; or set program simpletuner # an abbreviation of it was typed
    set program (string replace -r '^~/' "$HOME/" -- $program)
    set -l found (_SIMPLETUNER_LINE=(commandline -cp) $program 2>/dev/null)
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
complete -c{simpletuner,simpletuner-train} -f -k -a '(__simpletuner_complete)'
