"""The queue: runs that wait for this machine's GPUs, and are started one after another.

gpus.py     what this machine has, and what a run takes of it, without torch
entries.py  the file of the queue, which outlives the page and is shared by all pages of a machine
waiting.py  what is free, who is next, and the thread that starts it
routes.py   the addresses: add, remove, move
"""
