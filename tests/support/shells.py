"""Real shells that are asked what a tab gives: bash and zsh typed into at a terminal, fish by its own query."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

from patience import PATIENCE

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = Path(sys.executable).parent
SECONDS = PATIENCE

ALL = "\x18l"
"""Control-X L: put every completion into the line."""
SHOW = "\x18b"
"""Control-X B: write the line into the file $LINE."""
CLEAR = "\x15"

BASH_KEYS = r"""
PS1='' PS2=''
bind 'set bell-style none'
bind '"\C-xl": insert-completions'
bind -x '"\C-xb": printf %s "$READLINE_LINE" > "$LINE.new" && mv "$LINE.new" "$LINE"'
"""

ZSH_KEYS = r"""
PS1='' PS2=''
unsetopt beep prompt_cr prompt_sp zle_bracketed_paste 2>/dev/null
insert_all() { _main_complete; compstate[insert]=all }
zle -C insert_all complete-word insert_all
show_line() { print -rn -- "$BUFFER" > $LINE.new && mv $LINE.new $LINE }
zle -N show_line
bindkey -e
bindkey '^Xl' insert_all
bindkey '^Xb' show_line
"""


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    own = {"PATH": path, "HOME": str(folder), "LINE": str(folder / "line"), "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own}


class TypedShell:
    """An interactive shell at a terminal of its own, in a folder with `pictures/` and `prompts.txt`."""

    def __init__(self, command: list[str], setup: str, folder: Path) -> None:
        self.name, self.line, self.screen = command[0], folder / "line", b""
        work = folder / "work"
        (work / "pictures").mkdir(parents=True)
        (work / "prompts.txt").touch()
        (folder / "setup").write_text(setup)
        self.terminal, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 200, 250, 0, 0))
        ends = {"stdin": inside, "stdout": inside, "stderr": inside}
        self.process = subprocess.Popen(command, cwd=work, env=environment(folder), start_new_session=True, **ends)
        os.close(inside)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        self.press(f". {folder / 'setup'} && printf ready > {self.line}.new && mv {self.line}.new {self.line}\n")
        assert self.shown() == "ready"

    def read(self) -> None:
        """Take what the shell draws, or it would wait for somebody to look."""
        with contextlib.suppress(OSError):  # so Linux says that the shell has ended
            while drawn := os.read(self.terminal, 65536):
                self.screen += drawn

    def press(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def shown(self) -> str:
        """Wait for the file into which the shell writes its line."""
        end = time.monotonic() + SECONDS
        while not self.line.exists():
            assert time.monotonic() < end, f"no answer; the terminal shows: {self.screen[-2000:]!r}"
            time.sleep(0.01)
        text = self.line.read_text()
        self.line.unlink()
        return text

    def after(self, keys: str) -> str:
        """Return the line that these keys leave, after clearing what was there."""
        self.press(CLEAR + keys + SHOW)
        return self.shown()

    def candidates(self, typed: str) -> list[str]:
        """Return every word that could complete the last one; of `--flag=value` only the value."""
        line = self.after(typed + ALL)
        start = re.split(r"(?<=[ =])(?=[^ =]*$)", typed)[0]
        if line == typed:
            return []
        assert line.startswith(start), line
        return values(line.removeprefix(start).split())

    def tab(self, typed: str) -> str:
        return self.after(typed + "\t")

    def draws(self, text: str) -> bool:
        """Wait until the shell has drawn a text."""
        end = time.monotonic() + SECONDS
        while text not in self.screen.decode(errors="replace") and time.monotonic() < end:
            time.sleep(0.01)
        return text in self.screen.decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join(SECONDS)
        os.close(self.terminal)  # not before: the reader would go on with whatever gets this number next


class Fish:
    """fish, which tells its completions when asked with `complete -C`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "work" / "pictures").mkdir(parents=True)
        (folder / "work" / "prompts.txt").touch()

    def described(self, typed: str) -> dict[str, str]:
        """Return the whole words and their descriptions."""
        script = ROOT / "completions" / "simpletuner.fish"
        ask = ["fish", "--no-config", "-c", "source $argv[1]; complete -C $argv[2]", str(script), typed]
        work, where = self.folder / "work", environment(self.folder)
        done = subprocess.run(ask, cwd=work, env=where, capture_output=True, text=True, timeout=SECONDS, check=True)
        assert done.stderr == ""
        lines = [line.partition("\t") for line in done.stdout.splitlines()]
        return {word: description for word, _, description in lines}

    def candidates(self, typed: str) -> list[str]:
        return values(list(self.described(typed)))

    def tab(self, typed: str) -> str:
        """Return the line after the only completion; fish has no other way to ask without a terminal."""
        [word] = self.described(typed)
        return f"{typed[: typed.rindex(' ') + 1]}{word}{'' if word.endswith('/') else ' '}"

    def close(self) -> None: ...


def values(words: list[str]) -> list[str]:
    return [re.sub(r"^-[^=]*=", "", word) for word in words]


def opened(shell: str, folder: Path) -> TypedShell | Fish:
    """Start a shell with our script loaded."""
    if shell == "fish":
        return Fish(folder)
    if shell == "bash":
        script = f". {ROOT / 'completions' / 'simpletuner.bash'}"
        return TypedShell(["bash", "--norc", "--noprofile", "-i"], BASH_KEYS + script, folder)
    script = f". {ROOT / 'completions' / '_simpletuner'}"
    return TypedShell(["zsh", "-f", "-i"], f"{script}\n{ZSH_KEYS}", folder)
