"""Ask a shared folder, from all nodes at once, whether a run on many machines can live in it. No torch.

check        all checks in order, and the result that the nodes have in common
node         what one node was asked          findings     what a check found: pass, warn, fail, and the remedy
place        the folder of the check, made and removed again, also by a janitor after SIGKILL
meeting      how nodes meet in that folder: cards, posts, waits
patience     a filesystem that does not answer at all
mounts       which mount a path lies on       filesystems  what a mount promises
sharing      what that means for these nodes  faults       an errno as a sentence and a remedy
seeing       ping and pong through files      sameness     users and clocks
behaviour    write, rename, exclusive create, delete
locking      flock                            port         whether the others reach node 0
room         space and speed                  footprint    what the run will write
"""
