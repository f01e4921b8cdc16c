"""Runs: find them, start, stop and watch them. All is read from output folders, so it does not matter who started one.

routes.py     the addresses, and what they answer
folder.py     the output folder of a run, within the page's folders
listing.py    the runs in the folders, and their summaries, made again where a file has changed
log.py        `log.txt` as entries: warnings, errors, and the rest
condition.py  whether a run is running, stuck, stopping or killed, or how it says that it ended
summary.py    a run in a row of the list: steps, loss, time left
watching.py   what is kept of a run between requests, so that only new rows are parsed
curves.py     charts of one run, or of several over one another
checkpoints.py  the checkpoints of a run, and which are complete
checkpoint_routes.py  exporting one, removing one, and comparing two
fragments.py  the parts of a run's page, of which only those that changed are sent again
processes.py  start a run that outlives the page, and stop the one that holds an output folder
"""
