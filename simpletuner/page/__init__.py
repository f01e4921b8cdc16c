"""`simpletuner page`: settings, exports, caches and runs in a browser. HTML is made here, on the server.

server.py          bind, print the address, serve
application.py     all routes, and errors as pages
guard.py           token, Host, CSRF, size of requests, and the headers of every response
folders.py         the only way from a name in a request to a file
rendering.py       templates, fragments, toasts
configurations.py  list config files, copy one, make a new one
editor.py          one config file: show, check what is typed, save in place
documents.py       a config file with what was typed over it
examination.py     what the settings layer says of it: origins, mistakes, warnings
fields.py          the form, made of the declarations of settings
hardware.py        Hardware -> Accelerate: labels, and what cannot be had
blocks.py          the Detect Blocks dialog; a separate process builds the model
builder_dialog.py  the DeepSpeed Builder dialog
exports.py         every format of `config export`, to copy or download
preferences.py     cache maintenance
runs/              start, stop and watch runs
"""
