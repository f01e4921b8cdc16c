"""Ask a shared folder, from all nodes at once, whether a run on many machines can live in it. No torch.

findings    what a check found: pass, warn, fail, and what mends it
faults      an errno as a sentence and a remedy
mounts      which mount a path lies on          filesystems   what that mount promises
place       the folder of the check, made and removed again (also by a janitor after SIGKILL)
meeting     how nodes meet in that folder: cards, posts, waits
seeing      ping and pong: files seen, clocks, owners
behaviour   rename, exclusive create, lock, delete
room        free space against what the run will write, and speed
port        whether the other nodes reach node 0
check       all of it in order, and the common result
"""
