"""`simpletuner page`: settings, exports, caches and runs in a browser. HTML is made here, on the server.

server.py          bind, print the address, serve
application.py     all routes, and errors as pages
guard.py           token, Host, CSRF, size of requests, and the headers of every response
folders.py         the only way from a name in a request to a file
rendering.py       templates, fragments, toasts
configurations.py  list config files, copy one, make a new one
editing/           one config file: its form, what is wrong in it, and dialogs that fill it
datasets/          what `dataset check` finds as pictures, and captions to edit
exports.py         every format of `config export`, to copy or download
preferences.py     cache maintenance
queue/             runs that wait for this machine's GPUs
runs/              start, stop and watch runs
"""
