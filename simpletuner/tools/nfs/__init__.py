"""Check a shared folder from all nodes at once: can a run on many machines live in it? No torch.

check        all checks in order, and the result that all nodes share
results      what a check found: pass, warn or fail, and the fix; what an errno means
workspace    the folder of the check, removed again even after SIGKILL; a key-value store in it
rendezvous   how nodes find each other there, exchange values, and notice who has gone
mounts       check `mount`: which filesystem a path lies on, and what its options mean for a run
posix_semantics   checks `write`, `rename`, `lock`
visibility   checks `see`, `identity`, `clock`
resources    checks `space`, `port`
"""
